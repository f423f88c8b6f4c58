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

_JSON: Final = (".jsonl", ".ndjson", ".json")
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


def read_rows(path: Path, columns: Sequence[str], aliases: Mapping[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of each line that is not blank. Raises SetupError.

    JSONL has objects. CSV and TSV may begin with a line that names the columns; without one they are `columns`. Names are taken
    in lower case and replaced by their `aliases`.
    """
    kind = kind_of(path)
    with _open(path) as stream:
        if kind in _JSON:
            yield from _objects(path, stream, aliases)
        else:
            yield from _table(path, stream, _SEPARATORS.get(kind, "\t"), columns, aliases)


def read_words(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the words of each line that is not blank: the files of TREC. Raises SetupError."""
    with _open(path) as stream:
        for number, line in _lines(path, stream):
            yield number, line.split()


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


def _objects(path: Path, stream: TextIO, aliases: Mapping[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path, stream):
        try:
            found = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise failed(path, number, f"no JSON object ({error}).") from None
        yield number, _named(found, aliases)


def _table(
    path: Path, stream: TextIO, separator: str, columns: Sequence[str], aliases: Mapping[str, str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(_MAX_FIELD)
    quotes = csv.QUOTE_MINIMAL if separator == "," else csv.QUOTE_NONE
    reader = csv.reader(_raw(path, stream), delimiter=separator, quoting=quotes, strict=True)
    names: Sequence[str] = ()
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not names:
                head = [aliases.get(cell.strip().lower(), cell.strip().lower()) for cell in cells]
                names = head if set(columns[:2]) <= set(head) else columns
                if names is head:
                    continue
            if not len(cells) == len(names) and not (names is columns and 2 <= len(cells) < len(columns)):
                raise failed(path, reader.line_num, f"{len(cells)} columns; there should be {len(names)}: {', '.join(names)}.")
            yield reader.line_num, dict(zip(names, cells, strict=False))
    except csv.Error as error:
        raise failed(path, reader.line_num, f"no row of a table ({error}).") from None


def _named(row: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    return {aliases.get(name.lower(), name.lower()): value for name, value in row.items()}
