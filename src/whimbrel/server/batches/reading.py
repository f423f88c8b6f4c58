"""Reading of batch files: lines with their numbers and places, a bounded number of bytes at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_BOM: Final = b"\xef\xbb\xbf"
_SKIPPED: Final = 2**20
"""Bytes that are read at a time of a line that is too long."""


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    """Its number in the file, from 1."""
    raw: bytes
    """Its bytes without the line end; of a line that is too long, none."""
    end: int
    """The place in the file at which the next line begins."""
    size: int

    @property
    def is_too_long(self) -> bool:
        return self.size > len(self.raw)


class LineReader:
    """The lines of a file that are not blank. It can begin after a line whose end is known."""

    def __init__(self, path: Path, *, max_bytes: int, number: int = 0, offset: int = 0) -> None:
        self._file = path.open("rb")
        self._file.seek(offset)
        self._number = number
        self._offset = offset
        self._max_bytes = max_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Line]:
        while (line := self.next()) is not None:
            yield line

    def next(self) -> Line | None:
        """Return the next line, None after the last."""
        while data := self._file.readline(self._max_bytes + 2):
            size = len(data)
            while not data.endswith(b"\n") and (more := self._file.readline(_SKIPPED)):
                data = more  # what has come of the line is dropped: it is too long
                size += len(more)
            self._number += 1
            self._offset += size
            if size > self._max_bytes + 2:
                return Line(self._number, b"", self._offset, size)
            raw = data.removeprefix(_BOM) if self._number == 1 else data
            if raw := raw.strip():
                too_long = len(raw) > self._max_bytes
                return Line(self._number, b"" if too_long else raw, self._offset, len(raw))
        return None

    def take(self, max_lines: int, max_bytes: int) -> list[Line]:
        """Return the next lines: at least one, unless there is none, and no more than this once that is reached."""
        lines, size = list[Line](), 0
        while len(lines) < max_lines and size < max_bytes and (line := self.next()) is not None:
            lines.append(line)
            size += len(line.raw)
        return lines
