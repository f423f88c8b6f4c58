"""Records of files of lines: JSON lines, CSV and plain text, each with its row, its first byte and its size.

A record that cannot be read is a fault and does not end the file. A line is bounded, so that a file without line ends does not
fill the memory.
"""

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

import orjson

from whimbrel.bulk.files import FormatName

MAX_LINE_BYTES: Final = 2**26
_BOM: Final = b"\xef\xbb\xbf"
TEXT_COLUMN: Final = "text"
"""Name of the only column of plain text."""


class Record(NamedTuple):
    """A row of a file of lines."""

    row: int
    offset: int
    size: int
    """Bytes of the row in the file, without its compression."""
    values: dict[str, Any] | None
    """Values by column; None if the row has none: it cannot be read, or is a blank line of JSON."""
    fault: str = ""
    """Reason why the row cannot be read."""


class Start(NamedTuple):
    """The place in a file where reading begins."""

    row: int = 0
    offset: int = 0


def read_header(stream: io.BufferedReader) -> tuple[list[str], int]:
    """Return the columns of a CSV file, and the byte at which its first row begins."""
    lines = _Lines(stream, 0)
    try:
        header = next(csv.reader(lines), list[str]())
    except csv.Error:
        header = []
    return header, lines.offset


def records(stream: io.BufferedReader, kind: FormatName, start: Start, header: list[str]) -> Iterator[Record]:
    """Yield the records from `start`, where the stream stands already."""
    lines = _Lines(stream, start.offset)
    if kind == "csv":
        yield from _csv_records(lines, start.row, header)
        return
    read, row = _read_json if kind == "jsonl" else _read_text, start.row
    for line in lines.raw():
        offset = lines.offset - lines.size
        if lines.size > MAX_LINE_BYTES:
            yield Record(row, offset, lines.size, None, _too_long(lines.size))
        else:
            yield Record(row, offset, lines.size, *read(line))
        row += 1


def _too_long(size: int) -> str:
    return f"the line has {size:,} bytes; the limit is {MAX_LINE_BYTES:,}"


class _Lines:
    """Lines of a stream, with the number of bytes up to the end of the last."""

    def __init__(self, stream: io.BufferedReader, offset: int) -> None:
        self._stream = stream
        self.offset = offset
        self.size = 0
        self.count = 0
        self.fault = ""
        """Reason why a line since the last record cannot be read."""

    def raw(self) -> Iterator[bytes]:
        """Yield lines as bytes; of one that is too long only the beginning."""
        while line := self._stream.readline(MAX_LINE_BYTES + 1):
            first, self.size = self.offset == 0, len(line)
            more = line
            while len(line) > MAX_LINE_BYTES and more and not more.endswith(b"\n"):
                more = self._stream.readline(MAX_LINE_BYTES)
                self.size += len(more)
            self.offset += self.size
            self.count += 1
            yield line.removeprefix(_BOM) if first else line

    def __iter__(self) -> Iterator[str]:
        """Yield lines as strings, for a reader of CSV. Bytes that are not UTF-8 are a fault of the record."""
        for line in self.raw():
            if self.size > MAX_LINE_BYTES:
                self.fault = _too_long(self.size)
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                self.fault = _not_utf8(error)
                yield line.decode(errors="replace")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte {error.start} of the line is not UTF-8"


def _read_json(line: bytes) -> tuple[dict[str, Any] | None, str]:
    if line.isspace():
        return None, ""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return None, f"is no JSON: {error.msg}, at character {error.pos}"
    if not isinstance(value, dict):
        return None, f"is no JSON object, but {_KINDS.get(type(cast(object, value)), 'a number')}"
    return cast(dict[str, Any], value), ""


_KINDS: Final[Mapping[object, str]] = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}


def _read_text(line: bytes) -> tuple[dict[str, Any] | None, str]:
    try:
        return {TEXT_COLUMN: line.decode().rstrip("\r\n")}, ""
    except UnicodeDecodeError as error:
        return None, _not_utf8(error)


def _csv_records(lines: _Lines, row: int, header: list[str]) -> Iterator[Record]:
    csv.field_size_limit(MAX_LINE_BYTES)
    offset, reader = lines.offset, csv.reader(lines, strict=True)
    while True:
        count = lines.count
        try:
            fields = next(reader)
            fault = lines.fault
        except StopIteration:
            return
        except csv.Error as error:
            number = lines.count - count
            fields, fault = [], f"is no CSV: {error}{f', in a record of {number:,} lines' if number > 1 else ''}"
        lines.fault, size = "", lines.offset - offset
        if size == 0:  # the end, at which the reader complains of a quote that is never closed
            return
        if not fault and fields and len(fields) != len(header):
            fault = f"has {len(fields)} fields; the header has {len(header)}"
        values = dict(zip(header, fields, strict=True)) if fields and not fault else None
        yield Record(row, offset, size, values, fault)
        row, offset = row + 1, lines.offset
