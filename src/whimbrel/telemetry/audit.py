"""Audit log: a line of JSON for every request that asks for a key, in a file. It holds no text, no key and no address.

Requests never wait for the disk: a thread writes the lines, those that have come meanwhile with one call, so that the lines of
several processes do not mix. The file is opened anew when its name leads to another, as after a rotation. Lines that cannot be
written are counted and told in the log. A process that is killed loses the lines of its last moment.
"""

import logging
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Final

import msgspec

from whimbrel.errors import SetupError
from whimbrel.telemetry.trace import RequestFinished, subscribe

_log = logging.getLogger("whimbrel")

_MAX_LINES: Final = 2**16
"""Lines that may wait for the disk."""
_MAX_TOGETHER: Final = 256
_CLOSE_SECONDS: Final = 5.0
_READING: Final = frozenset({"GET", "HEAD"})


class AuditLine(msgspec.Struct, frozen=True, gc=False):
    """One line of the file."""

    time: str
    """The time of its arrival (RFC 3339, UTC)."""
    key: str
    """The name of the API key, "" if there was none or it was wrong."""
    route: str
    model: str
    status: int
    texts: int
    tokens: int
    """Tokens of the answer, 0 if there was none."""
    seconds: float
    request_id: str


def start(path: Path, *, unlogged: Collection[str] = ()) -> Callable[[], None]:
    """Append the requests of this process to a file, except those that read the routes `unlogged`.

    Returns a function that ends it when all lines are written. Raises SetupError.
    """
    check(path)
    writer = _Writer(path)

    def note(request: RequestFinished) -> None:
        if request.route not in unlogged or request.method not in _READING:
            writer.put(_encode(_line(request)) + b"\n")

    unsubscribe = subscribe(RequestFinished, note)

    def end() -> None:
        unsubscribe()
        writer.close()

    return end


def check(path: Path) -> None:
    """Raise SetupError if lines cannot be appended to a file."""
    try:
        os.close(_open(path))
    except OSError as error:
        raise SetupError(
            f"audit_log cannot be written: {path}: {error.strerror or error}.", hint="choose another path"
        ) from None


_encode: Final = msgspec.json.Encoder().encode


def _line(request: RequestFinished) -> AuditLine:
    return AuditLine(
        time=datetime.fromtimestamp(request.received, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        key=request.tenant,
        route=request.route,
        model=request.model,
        status=request.status,
        texts=request.num_texts,
        tokens=request.num_tokens,
        seconds=round(request.seconds, 6),
        request_id=request.request_id,
    )


def _open(path: Path) -> int:
    """Return a descriptor that appends to a file, which only its owner may read if it is new."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)


class _Writer:
    """A thread that appends lines to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: Queue[bytes | None] = Queue(_MAX_LINES)
        """Lines to write; None is the end."""
        self._num_lost = 0
        self._fd = -1
        self._thread = threading.Thread(target=self._run, name="whimbrel-audit", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        try:
            self._lines.put_nowait(line)
        except Full:
            self._num_lost += 1

    def close(self) -> None:
        """Write the lines that wait, for at most five seconds."""
        with suppress(Full):
            self._lines.put(None, timeout=_CLOSE_SECONDS)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        ended = False
        while not ended:
            lines = self._take()
            ended = lines[-1] is None
            self._write([line for line in lines if line is not None])
        if self._fd >= 0:
            os.close(self._fd)

    def _take(self) -> list[bytes | None]:
        lines = [self._lines.get()]
        with suppress(Empty):
            while lines[-1] is not None and len(lines) < _MAX_TOGETHER:
                lines.append(self._lines.get_nowait())
        return lines

    def _write(self, lines: list[bytes]) -> None:
        num_lost, self._num_lost = self._num_lost, 0
        data = b"".join(lines)
        try:
            written = os.write(self._current(), data) if data else 0
        except OSError as error:
            _log.error("the audit log lost %d lines: %s: %s", num_lost + len(lines), self._path, error.strerror or error)
            return
        num_lost += data.count(b"\n", written)
        if num_lost:
            _log.error("the audit log lost %d lines: %s: the disk is full or too slow", num_lost, self._path)

    def _current(self) -> int:
        """Return a descriptor of the file that the path names now."""
        if self._fd >= 0:
            own = os.fstat(self._fd)
            with suppress(OSError):
                named = self._path.stat()
                if (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino):
                    return self._fd
            os.close(self._fd)
            self._fd = -1
        self._fd = _open(self._path)
        return self._fd
