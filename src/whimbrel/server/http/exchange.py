"""One request and its answer on a connection, as ASGI's `receive` and `send`. Bounds the rates of bodies and answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeAlias

from starlette.types import ASGIApp, Message, Scope

from whimbrel.errors import BodyTimeout, WhimbrelError
from whimbrel.server.http.states import ANSWER, BODY, COMPLETE, Answer, Body, Event, Reading

if TYPE_CHECKING:
    from whimbrel.server.http.connection import Connection

Headers: TypeAlias = list[tuple[bytes, bytes]]

DISCONNECT_EXTENSION: Final = "whimbrel.gone"
"""ASGI extension: a function that registers a callback for the end of the connection."""
KEPT_EXTENSION: Final = "whimbrel.kept"
"""ASGI extension: True if all places for connections are taken, and this request came on one that is kept for probes."""
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_log = logging.getLogger("whimbrel")

_MAX_UNREAD: Final = 2**18
"""Bytes of a body that may wait for the app. Above it, reading from the socket pauses."""
_PIECE_BYTES: Final = 64
"""Memory that a piece of a body takes besides its bytes."""
_CHECKS: Final = 8
"""Number of checks of the client's progress within `write_pause`."""
_NO_BODY: Final = frozenset({204, 304})
_STATUS_LINES: Final = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}


class ClientDisconnected(OSError):
    """The client has left, or was cut off."""


class RequestResponseCycle:
    """One exchange. The app calls `receive` and `send`, the connection `feed`, `end` and `abort`."""

    def __init__(self, connection: Connection, scope: Scope, *, keep_alive: bool) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.scope = scope
        scope["extensions"] = {DISCONNECT_EXTENSION: self.on_disconnect, KEPT_EXTENSION: connection.is_kept}
        self.keep_alive = keep_alive
        self.task: asyncio.Task[None] | None = None
        expectation = dict(scope["headers"]).get(b"expect", b"").lower() if scope["http_version"] == "1.1" else b""
        self._body = Body.EXPECTED if expectation == b"100-continue" else Body.COMING
        self._error: WhimbrelError | None = None
        """The error that cut the body off."""
        self._change = asyncio.Event()
        self._unread: list[bytes] = []
        self._num_unread = 0
        self.num_fed = 0
        """Bytes of the body that have come."""
        self._reading_since: float | None = None
        """Time at which the app first waited for the body."""
        self._on_disconnect: Callable[[], None] | None = None
        self.answer = Answer.AWAITED
        self._start: Message | None = None
        self._chunked = False
        self._bodyless = scope["method"] == "HEAD"
        self._num_unsent: int | None = None
        """Bytes of the body that the app has still to send, if it announced a length."""
        self._num_written = 0
        self._full_since = 0.0
        """Time at which the buffers of the transport were first full."""

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
            if self.answer is not Answer.DONE:
                self._connection.reset()

    # Request

    @property
    def is_complete(self) -> bool:
        """True if the whole request has come."""
        return self._body in COMPLETE

    @property
    def is_expected(self) -> bool:
        """True if the client holds the body back."""
        return self._body is Body.EXPECTED

    @property
    def is_full(self) -> bool:
        """True if so much of the body waits for the app that no more should be read."""
        return self._num_unread > _MAX_UNREAD

    def _follow(self, event: Event) -> None:
        self._body = BODY[self._body][event]
        self._change.set()

    def feed(self, body: bytes) -> None:
        self._follow(Event.BODY_COMES)
        self._unread.append(body)
        self._num_unread += len(body) + _PIECE_BYTES
        self.num_fed += len(body)
        if self.is_full:
            self._connection.pause()

    def end(self) -> None:
        self._follow(Event.BODY_ENDS)

    def abort(self, error: WhimbrelError | None = None) -> None:
        """Mark the request as broken off, or the client as gone. The app gets the `error` if it reads on."""
        self._error = error
        self._follow(Event.CUT_OFF)
        if self._on_disconnect is not None:
            self._on_disconnect()

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client leaves, so that an app that has read the request need not wait in `receive`."""
        self._on_disconnect = callback
        self._connection.resume()  # otherwise the end of the connection goes unnoticed
        if self._body is Body.CUT:
            self._loop.call_soon(callback)

    async def receive(self) -> Message:
        """Return a piece of the body or, after its end, the disconnection. Raises BodyTimeout, and errors of the parser."""
        if self._body is Body.EXPECTED and self.answer is Answer.AWAITED:
            self._follow(Event.ASKED)
            self._connection.transport.write(CONTINUE)
        while self._body is not Body.CUT and self.answer is not Answer.DONE:
            is_whole = self._body is Body.WHOLE
            if self._unread or is_whole:
                body = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
                self._unread.clear()
                self._num_unread = 0
                if is_whole:
                    self._follow(Event.TAKEN)
                return {"type": "http.request", "body": body, "more_body": not is_whole}
            self._change.clear()
            self._connection.resume()
            await (self._change.wait() if self._body is Body.TAKEN else self._wait_for_more())
        if self._error is not None:
            raise self._error
        return {"type": "http.disconnect"}

    async def _wait_for_more(self) -> None:
        """Wait at most `body_idle_timeout`. After that time in all, the body must keep `min_body_rate` and `body_timeout`."""
        limits, now = self._connection.limits, self._loop.time()
        since = self._reading_since = now if self._reading_since is None else self._reading_since
        longest = min(max(limits.body_idle_timeout, self.num_fed / limits.min_body_rate), limits.body_timeout)
        try:
            async with asyncio.timeout_at(min(now + limits.body_idle_timeout, since + longest)):
                await self._change.wait()
        except TimeoutError:
            seconds = self._loop.time() - since
            raise BodyTimeout(f"the body came too slowly: {self.num_fed:,} bytes in {seconds:.1f} s.") from None

    # Answer

    async def send(self, message: Message) -> None:
        """Write a message, and wait for room for the next. Raises ClientDisconnected, also if the client reads too slowly."""
        if message["type"] == "http.response.start":
            self._start = message  # it is sent with the first part of the body
            return
        connection = self._connection
        if connection.reading is Reading.CLOSED or self.answer is Answer.DONE:
            raise ClientDisconnected
        body, more = message.get("body", b""), message.get("more_body", False)
        pieces: list[bytes | memoryview] = []
        if self._start is not None:
            pieces.append(self._head(self._start, len(body), more))
            self._start = None
            self.answer = ANSWER[self.answer][Event.ANSWER_BEGINS]
        if not self._bodyless:
            pieces += self._framed(body, more)
        if pieces:
            self._num_written += sum(map(len, pieces))
            connection.transport.writelines(pieces)
        if connection.room is not None:
            await self._wait_for_room(connection.room)
        if not more:
            self.answer = ANSWER[self.answer][Event.ANSWER_ENDS]
            self._change.set()
            connection.finish(self)

    def _head(self, start: Message, size: int, more: bool) -> bytes:
        headers: Headers = list(start["headers"])
        by_name = dict(headers)
        if not self.is_complete or self._connection.gives_way or b"close" in by_name.get(b"connection", b"").lower():
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

    async def _wait_for_room(self, room: asyncio.Future[None]) -> None:
        """Wait until the transport has room. The client must keep `write_pause` and, after that time, `min_write_rate`."""
        connection, limits, transport = self._connection, self._connection.limits, self._connection.transport
        since = self._full_since = self._full_since or self._loop.time()
        last_progress, least_buffered = self._loop.time(), transport.get_write_buffer_size()
        while not room.done():
            await asyncio.wait([room], timeout=limits.write_pause / _CHECKS)
            now, num_buffered = self._loop.time(), transport.get_write_buffer_size()
            if num_buffered < least_buffered:
                last_progress, least_buffered = now, num_buffered
            rate_is_due = now - since > limits.write_pause
            too_slow = rate_is_due and self._num_written - num_buffered < (now - since) * limits.min_write_rate
            if not room.done() and (too_slow or now - last_progress > limits.write_pause):
                _log.info("cut off a client that took its answer too slowly")
                connection.reset()  # which ends the waiting
                await room
        if connection.reading is Reading.CLOSED:
            raise ClientDisconnected


def encode_head(status: int, headers: Headers) -> bytes:
    """Return the head of an answer. Raises RuntimeError if a header holds more than one line."""
    lines = b"\r\n".join([*map(b": ".join, headers), b"date: " + _date(int(time.time())), b"\r\n"])
    if lines.count(b"\n") != len(headers) + 2 or lines.count(b"\r") != len(headers) + 2:
        raise RuntimeError("a header of an answer holds more than one line")
    return _STATUS_LINES[status] + lines


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()
