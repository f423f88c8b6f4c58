"""Parser of multipart/form-data (RFC 7578), for bodies that come in pieces. Pure: it holds a head or a delimiter, never a file.

`feed` takes bytes as they come and gives the parts' heads and data. A part is data until its delimiter, whatever it looks like.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from whimbrel.dialects.common.bodies import MalformedBody

_MAX_HEAD: Final = 8 * 2**10
_MAX_PARTS: Final = 32
_BOUNDARY: Final = re.compile(
    r"""multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s";,]{1,70})(?=\s*(?:;|$)))""", re.IGNORECASE
)
_PARAMETER: Final = re.compile(r""";\s*(name|filename)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """The head of a part."""

    name: str
    filename: str | None
    """The name of a file; None for a field."""


Event: TypeAlias = Part | bytes


class _State(Enum):
    BEFORE = auto()
    DELIMITER = auto()
    HEAD = auto()
    DATA = auto()
    AFTER = auto()


def boundary_of(content_type: str) -> bytes | None:
    """Return the boundary that a Content-Type names, None if it is not multipart/form-data with a boundary."""
    found = _BOUNDARY.match(content_type)
    return None if found is None else (found[1] or found[2]).encode("latin-1")


class MultipartParser:
    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b"\r\n"  # so that the first delimiter looks like the others
        self._state = _State.BEFORE
        self._num_parts = 0

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the head of each part and its data, in pieces. Raises MalformedBody."""
        self._buffer += data
        while (event := self._step()) is not None:
            if event != b"":
                yield event

    def close(self) -> None:
        """Raise MalformedBody if the body ended before its last delimiter."""
        if self._state is not _State.AFTER:
            raise MalformedBody("the body ends before its last boundary.")

    def _step(self) -> Event | None:
        """Return the next event, b"" if there is none yet but more to do, None if more bytes are needed."""
        match self._state:
            case _State.BEFORE | _State.DATA:
                return self._read_to_delimiter()
            case _State.DELIMITER:
                return self._read_delimiter()
            case _State.HEAD:
                return self._read_head()
            case _State.AFTER:
                self._buffer = b""
                return None

    def _read_to_delimiter(self) -> bytes | None:
        is_data = self._state is _State.DATA
        place = self._buffer.find(self._delimiter)
        if place >= 0:
            data, self._buffer = self._buffer[:place], self._buffer[place + len(self._delimiter) :]
            self._state = _State.DELIMITER
            return data if is_data else b""
        known = len(self._buffer) - len(self._delimiter) + 1  # the rest may be the beginning of a delimiter
        if known <= 0:
            return None
        data, self._buffer = self._buffer[:known], self._buffer[known:]
        return data if is_data else b""

    def _read_delimiter(self) -> bytes | None:
        if len(self._buffer) < 2:
            return None
        end, self._buffer = self._buffer[:2], self._buffer[2:]
        if end == b"--":
            self._state = _State.AFTER
        elif end == b"\r\n":
            self._state = _State.HEAD
            self._buffer = b"\r\n" + self._buffer  # a head without lines is its end alone
        else:
            raise MalformedBody("a boundary is followed by other bytes than a line end or two hyphens.")
        return b""

    def _read_head(self) -> Event | None:
        place = self._buffer.find(b"\r\n\r\n")
        if place > _MAX_HEAD or (place < 0 and len(self._buffer) > _MAX_HEAD):
            raise MalformedBody(f"the head of a part has more than {_MAX_HEAD:,} bytes.")
        if place < 0:
            return None
        head, self._buffer = self._buffer[:place], self._buffer[place + 4 :]
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise MalformedBody(f"there are more than {_MAX_PARTS} parts.")
        self._state = _State.DATA
        return _part(head)


def _part(head: bytes) -> Part:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-disposition":
            found = {match[1].lower(): _unquoted(match) for match in _PARAMETER.finditer(value.decode("utf-8", "replace"))}
            if "name" in found:
                return Part(found["name"], found.get("filename"))
    raise MalformedBody("a part has no Content-Disposition with a name.")


def _unquoted(match: re.Match[str]) -> str:
    return match[3] if match[2] is None else re.sub(r"\\(.)", r"\1", match[2])
