"""One request and its answer on a connection, as ASGI's `receive` and `send`. Bounds the rates of bodies and answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final, Protocol, TypeAlias

from starlette.types import ASGIApp, Message, Scope

from whimbrel.errors import BodyTimeout
from whimbrel.server.http.limits import HttpLimits

Headers: TypeAlias = list[tuple[bytes, bytes]]

DISCONNECT_EXTENSION: Final = "whimbrel.gone"
"""ASGI extension: a function that registers a callback for the end of the connection."""

_log = logging.getLogger("whimbrel")

_MAX_UNREAD: Final = 2**18
"""Bytes of a body that may wait for the app. Above it, reading from the socket pauses."""
_CHECKS: Final = 8
"""Number of checks of the client's progress within `write_pause`."""
_NO_BODY: Final = frozenset({204, 304})
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES: Final = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}


class ClientDisconnected(OSError):
    """The client has left, or was cut off."""


class Transport(Protocol):
    """The part of a `Connection` that an exchange uses."""

    limits: HttpLimits
    transport: asyncio.Transport
    is_full: bool
    """True if the send buffers of the kernel and of the transport are full."""
    room: asyncio.Future[None] | None
    """Set by an exchange that waits for room in the buffers; done when there is room or the connection is lost."""
    lost: bool

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def reset(self) -> None: ...
    def finish(self, exchange: RequestResponseCycle) -> None: ...


class RequestResponseCycle:
    """One exchange. The app calls `receive` and `send`, the connection `feed`, `end` and `abort`."""

    def __init__(self, connection: Transport, scope: Scope, *, keep_alive: bool) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.scope = scope
        self.keep_alive = keep_alive
        headers: dict[bytes, bytes] = dict(scope["headers"])
        self.expects_continue = scope["http_version"] == "1.1" and headers.get(b"expect", b"").lower() == b"100-continue"
        self.complete = False
        """True if the whole request was received."""
        self.answered = False
        """True if the whole answer was given to the transport."""
        self.task: asyncio.Task[None] | None = None
        self._broken = False
        self._change = asyncio.Event()
        self._unread: list[bytes] = []
        self._num_unread = 0
        self._num_fed = 0
        self._reading_since: float | None = None
        """Time at which the app first waited for the body."""
        self._read = False
        """True if the app has received the whole request."""
        self._on_disconnect: Callable[[], None] | None = None
        scope["extensions"] = {DISCONNECT_EXTENSION: self.on_disconnect}
        self._start: Message | None = None
        self._chunked = False
        self._bodyless = scope["method"] == "HEAD"
        self._num_unsent: int | None = None
        """Bytes of the body that the app has still to send, if it announced a length."""
        self._num_written = 0
        self._full_since: float | None = None
        self._last_progress = 0.0
        self._num_buffered = 0
        """Bytes in the transport's buffer at the time of the last progress."""

    async def run(self, app: ASGIApp) -> None:
        """Run `app`. If it does not answer completely, reset the connection."""
        try:
            await app(self.scope, self.receive, self.send)
        except ClientDisconnected:
            pass
        except Exception:
            _log.exception("the app failed. This is a bug.")
        finally:
            del self.scope["extensions"]  # it refers to this object
            if not self.answered:
                self.answered = True
                self._connection.reset()

    # Request

    def feed(self, body: bytes) -> None:
        self.expects_continue = False
        self._unread.append(body)
        self._num_unread += len(body)
        self._num_fed += len(body)
        if self._num_unread > _MAX_UNREAD:
            self._connection.pause()
        self._change.set()

    def end(self) -> None:
        self.expects_continue = False
        self.complete = True
        self._change.set()

    def abort(self) -> None:
        """Mark the request as broken off, or the client as gone."""
        self._broken = True
        self._change.set()
        if self._on_disconnect is not None:
            self._on_disconnect()

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client leaves, so that an app that has read the request need not wait in `receive`."""
        self._on_disconnect = callback
        self._connection.resume()  # otherwise the end of the connection goes unnoticed
        if self._broken:
            self._loop.call_soon(callback)

    async def receive(self) -> Message:
        """Return a piece of the body or, after its end, the disconnection of the client. Raises BodyTimeout."""
        if self.expects_continue and not self._broken and not self._num_written:
            self.expects_continue = False
            self._connection.transport.write(_CONTINUE)
        while not self._broken and not self.answered:
            if self._unread or (self.complete and not self._read):
                body = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
                self._unread.clear()
                self._num_unread = 0
                self._read = self.complete
                return {"type": "http.request", "body": body, "more_body": not self.complete}
            self._change.clear()
            self._connection.resume()
            await (self._change.wait() if self.complete else self._wait_for_more())
        return {"type": "http.disconnect"}

    async def _wait_for_more(self) -> None:
        """Wait at most `body_idle_timeout`. After that time in all, the body must keep `min_body_rate` and `body_timeout`."""
        limits, now = self._connection.limits, self._loop.time()
        since = self._reading_since = now if self._reading_since is None else self._reading_since
        longest = min(max(limits.body_idle_timeout, self._num_fed / limits.min_body_rate), limits.body_timeout)
        try:
            async with asyncio.timeout_at(min(now + limits.body_idle_timeout, since + longest)):
                await self._change.wait()
        except TimeoutError:
            seconds = self._loop.time() - since
            raise BodyTimeout(f"the body came too slowly: {self._num_fed:,} bytes in {seconds:.1f} s.") from None

    # Answer

    async def send(self, message: Message) -> None:
        """Write a message, and wait for room for the next. Raises ClientDisconnected, also if the client reads too slowly."""
        if message["type"] == "http.response.start":
            self._start = message  # it is sent with the first part of the body
            return
        connection = self._connection
        if connection.lost or self.answered:
            raise ClientDisconnected
        body, more = message.get("body", b""), message.get("more_body", False)
        pieces: list[bytes | memoryview] = []
        if self._start is not None:
            pieces.append(self._head(self._start, len(body), more))
            self._start = None
        if not self._bodyless:
            pieces += self._framed(body, more)
        if pieces:
            self._num_written += sum(map(len, pieces))
            connection.transport.writelines(pieces)
        if connection.is_full:
            await self._wait_for_room()
        if not more:
            self.answered = True
            connection.finish(self)

    def _head(self, start: Message, size: int, more: bool) -> bytes:
        headers: Headers = list(start["headers"])
        by_name = dict(headers)
        if not self.complete or b"close" in by_name.get(b"connection", b"").lower():
            self.keep_alive = False
        if self._bodyless or start["status"] in _NO_BODY:
            self._bodyless = True
        elif b"content-length" in by_name:
            self._num_unsent = int(by_name[b"content-length"])
        elif not more:
            headers.append((b"content-length", b"%d" % size))
        elif self.scope["http_version"] == "1.1":
            self._chunked = True
            headers.append((b"transfer-encoding", b"chunked"))
        else:
            self.keep_alive = False  # the end of the connection is the end of the body
        if b"connection" not in by_name and (not self.keep_alive or self.scope["http_version"] == "1.0"):
            headers.append((b"connection", b"keep-alive" if self.keep_alive else b"close"))
        return encode_head(start["status"], headers)

    def _framed(self, body: bytes | memoryview, more: bool) -> list[bytes | memoryview]:
        if self._chunked:
            pieces = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
            return pieces if more else [*pieces, b"0\r\n\r\n"]
        if self._num_unsent is not None:
            self._num_unsent -= len(body)
            if self._num_unsent < 0 or (self._num_unsent > 0 and not more):
                raise RuntimeError("the length of an answer is not what its head says")
        return [body] if body else []

    async def _wait_for_room(self) -> None:
        """Wait until the transport has room. The client must keep `write_pause` and, after that time, `min_write_rate`."""
        connection, now = self._connection, self._loop.time()
        if self._full_since is None:
            self._full_since = now
        self._last_progress, self._num_buffered = now, connection.transport.get_write_buffer_size()
        connection.room = self._loop.create_future()
        self._timer = self._loop.call_later(connection.limits.write_pause / _CHECKS, self._check_progress)
        try:
            await connection.room
        finally:
            self._timer.cancel()
        if connection.lost:
            raise ClientDisconnected

    def _check_progress(self) -> None:
        """Reset the connection if the client reads too slowly, which ends the waiting; otherwise check again later."""
        connection, limits, now = self._connection, self._connection.limits, self._loop.time()
        num_buffered = connection.transport.get_write_buffer_size()
        if num_buffered < self._num_buffered:
            self._last_progress, self._num_buffered = now, num_buffered
        seconds = now - (self._full_since or now)
        too_slow = seconds > limits.write_pause and self._num_written - num_buffered < seconds * limits.min_write_rate
        if too_slow or now - self._last_progress > limits.write_pause:
            _log.info("cut off a client that took its answer too slowly")
            connection.reset()
        else:
            self._timer = self._loop.call_later(limits.write_pause / _CHECKS, self._check_progress)


def encode_head(status: int, headers: Headers) -> bytes:
    """Return the head of an answer. Raises RuntimeError if a header holds more than one line."""
    lines = b"\r\n".join([*map(b": ".join, headers), b"date: " + _date(int(time.time())), b"\r\n"])
    if lines.count(b"\n") != len(headers) + 2 or lines.count(b"\r") != len(headers) + 2:
        raise RuntimeError("a header of an answer holds more than one line")
    return _STATUS_LINES[status] + lines


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()
