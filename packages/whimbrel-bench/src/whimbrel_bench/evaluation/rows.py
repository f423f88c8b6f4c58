"""Rows of the files of a collection: JSONL, CSV, TSV and columns by spaces, each with the number of its line.

Files may be compressed by gzip. A file that cannot be read is refused with its name and the line.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec

from whimbrel.errors import SetupError

JSON: Final = (".jsonl", ".ndjson", ".json")
Names = Mapping[str, Sequence[str]]
"""Names that a column may have, the first that is found counts."""
_SEPARATORS: Final[Mapping[str, str]] = {".csv": ",", ".tsv": "\t"}
_MAX_FIELD: Final = 2**27
"""Characters of the longest field of a CSV; the module's own limit is 131,072."""


def failed(path: Path, line: int, message: str, *, hint: str | None = None) -> SetupError:
    """Return the error of a line."""
    return SetupError(f"{path}, line {line}: {message}", hint=hint)


def kind_of(path: Path) -> str:
    """Return the suffix that tells the format, without that of a compression."""
    suffixes = [each.lower() for each in path.suffixes if each.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def read_rows(path: Path, columns: Sequence[str], names: Names) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of each line that is not blank, by the keys of `names`. Raises SetupError.

    JSONL has objects. CSV and TSV may begin with a line that names the columns, the first two at least; without one they are
    `columns`.
    """
    kind = kind_of(path)
    with _open(path) as stream:
        rows = _objects(path, stream) if kind in JSON else _table(path, stream, _SEPARATORS.get(kind, "\t"), columns, names)
        for number, row in rows:
            yield number, _renamed(row, names)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line that is not blank. Raises SetupError."""
    with _open(path) as stream:
        yield from _lines(path, stream)


def _open(path: Path) -> TextIO:
    try:
        if path.is_dir():
            raise SetupError(f"{path} is a folder.", hint="name a file; --data takes a folder")
        if path.suffix.lower() == ".gz":
            return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}.") from None


def _lines(path: Path, stream: TextIO) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line that is not blank."""
    for number, line in enumerate(_raw(path, stream), start=1):
        if line.strip():
            yield number, line.rstrip("\r\n")


def _raw(path: Path, stream: TextIO) -> Iterator[str]:
    number = 0
    try:
        for line in stream:
            number += 1
            yield line
    except UnicodeDecodeError as error:
        raise failed(path, number + 1, f"no valid UTF-8 at or after this line ({error.reason}).") from None
    except (OSError, EOFError, zlib.error) as error:
        raise failed(path, number + 1, f"cannot be read on: {error}.") from None


def _objects(path: Path, stream: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path, stream):
        try:
            found = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise failed(path, number, f"no JSON object ({error}).") from None
        yield number, {name.lower(): value for name, value in found.items()}


def _table(
    path: Path, stream: TextIO, separator: str, columns: Sequence[str], names: Names
) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(_MAX_FIELD)
    quotes = csv.QUOTE_MINIMAL if separator == "," else csv.QUOTE_NONE
    reader = csv.reader(_raw(path, stream), delimiter=separator, quoting=quotes, strict=True)
    head: Sequence[str] = ()
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not head:
                first = [cell.strip().lower() for cell in cells]
                head = first if _is_head(path, reader.line_num, first, columns[:2], names) else columns
                if head is first:
                    continue
            if len(cells) != len(head) and not (head is columns and 2 <= len(cells) < len(columns)):
                hint = f"columns are divided by {'commas' if separator == ',' else 'tabs'}"
                message = f"columns: {len(cells)}; there should be {len(head)}: {', '.join(head)}."
                raise failed(path, reader.line_num, message, hint=hint)
            yield reader.line_num, dict(zip(head, cells, strict=False))
    except csv.Error as error:
        raise failed(path, reader.line_num, f"no row of a table ({error}).") from None


def _is_head(path: Path, line: int, cells: Sequence[str], needed: Sequence[str], names: Names) -> bool:
    """Return whether the first line names the columns. Raises SetupError if it names only some that are needed."""
    missing = [each for each in needed if not set(names[each]) & set(cells)]
    if missing and any(set(own) & set(cells) for own in names.values()):
        hint = f"it may be called {', '.join(names[missing[0]])}"
        raise failed(path, line, f"names of columns, but of none that is the {missing[0]}: {', '.join(cells)}.", hint=hint)
    return not missing


def _renamed(row: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return the fields by the keys of `names`, each from the first of its names that the row has."""
    chosen = {key: next((name for name in own if name in row), None) for key, own in names.items()}
    return {key: row[name] for key, name in chosen.items() if name is not None}
