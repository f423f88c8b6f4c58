"""One request and its answer, as ASGI has them, on a connection (connection.py)."""

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
"""Bytes of a body that wait for the app before no more are taken from the socket."""
_CHECKS: Final = 8
"""Checks, within the longest pause, of whether a client reads its answer."""
_NO_BODY: Final = frozenset({204, 304})
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES: Final = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}


class ClientDisconnected(OSError):
    """The client has left, or was cut off."""


class Transport(Protocol):
    """The operations of a connection that an exchange may use."""

    limits: HttpLimits
    transport: asyncio.Transport
    is_full: bool
    """True if the kernel's send buffer and ours are full."""
    room: asyncio.Future[None] | None
    """Set by an exchange that waits for room in the buffers; done when there is room again or the connection is lost."""
    lost: bool
    """True if the connection is closed."""

    def pause(self) -> None:
        """Stop reading from the socket."""
        ...

    def resume(self) -> None:
        """Read from the socket again."""
        ...

    def reset(self) -> None:
        """Close the connection at once, with a reset."""
        ...

    def answered(self, exchange: RequestResponseCycle) -> None:
        """Begin the next request of the connection."""
        ...


class RequestResponseCycle:
    """`receive` and `send` are ASGI's; `feed`, `end` and `abort` say what became of the request."""

    def __init__(self, connection: Transport, scope: Scope, *, keep_alive: bool) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.scope = scope
        self.keep_alive = keep_alive
        headers: dict[bytes, bytes] = dict(scope["headers"])
        self.expects_continue = scope["http_version"] == "1.1" and headers.get(b"expect", b"").lower() == b"100-continue"
        """True if the client sends its body only if told to."""
        self.complete = False
        """True if all of the request has come."""
        self.answered = False
        """True if all of the answer is with the transport."""
        self.task: asyncio.Task[None] | None = None
        self._broken = False
        self._change = asyncio.Event()
        self._unread: list[bytes] = []
        self._num_unread = 0
        self._num_fed = 0
        self._asked: float | None = None
        """Since when the app waits for the body."""
        self._read = False
        """True if the app has had all of the request."""
        self._on_gone: Callable[[], None] | None = None
        scope["extensions"] = {DISCONNECT_EXTENSION: self.on_disconnect}
        self._start: Message | None = None
        self._chunked = False
        self._bodyless = scope["method"] == "HEAD"
        self._announced: int | None = None
        """Bytes of the body that are still to be sent, if the app has said how many there are."""
        self._handed = 0
        """Bytes that the transport has had."""
        self._began: float | None = None
        """Since when there is no room, or was none for a while."""
        self._moved = 0.0
        """The time at which the client last read something."""
        self._left = 0
        """Bytes that were left then."""

    async def run(self, app: ASGIApp) -> None:
        """Let `app` answer. If it does not, to the end, the connection is cut."""
        try:
            await app(self.scope, self.receive, self.send)
        except ClientDisconnected:
            pass
        except Exception:
            _log.exception("the app failed. This is a bug.")
        finally:
            del self.scope["extensions"]  # it refers to us
            if not self.answered:
                self.answered = True
                self._connection.reset()

    # The request

    def feed(self, body: bytes) -> None:
        """A part of the body came."""
        self.expects_continue = False
        self._unread.append(body)
        self._num_unread += len(body)
        self._num_fed += len(body)
        if self._num_unread > _MAX_UNREAD:
            self._connection.pause()
        self._change.set()

    def end(self) -> None:
        """It is whole."""
        self.expects_continue = False
        self.complete = True
        self._change.set()

    def abort(self) -> None:
        """Nothing more will come, or nobody is there any more."""
        self._broken = True
        self._change.set()
        if self._on_gone is not None:
            self._on_gone()

    def on_disconnect(self, call: Callable[[], None]) -> None:
        """Call this when the client leaves; for an app that has read the request and needs not wait for what comes next."""
        self._on_gone = call
        self._connection.resume()  # or nobody would notice
        if self._broken:
            self._loop.call_soon(call)

    async def receive(self) -> Message:
        """A part of the body, or, once it is read, that the client has left. Raises BodyTimeout."""
        if self.expects_continue and not self._broken and not self._handed:
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
        """No pause is longer than `body_idle_timeout`, then `min_body_rate` is kept, and all is there in `body_timeout`."""
        limits, clock = self._connection.limits, self._loop.time
        now = clock()
        asked = self._asked = now if self._asked is None else self._asked
        longest = min(max(limits.body_idle_timeout, self._num_fed / limits.min_body_rate), limits.body_timeout)
        try:
            async with asyncio.timeout_at(min(now + limits.body_idle_timeout, asked + longest)):
                await self._change.wait()
        except TimeoutError:
            seconds = clock() - asked
            raise BodyTimeout(f"the body came too slowly: {self._num_fed:,} bytes in {seconds:.1f} s.") from None

    # The answer

    async def send(self, message: Message) -> None:
        """Returns once there is room for more. Raises Gone, also when a client that takes its answer too slowly is cut off."""
        if message["type"] == "http.response.start":
            self._start = message  # it goes out with the first part of the body
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
            self._handed += sum(map(len, pieces))
            connection.transport.writelines(pieces)
        if connection.is_full:
            await self._wait()
        if not more:
            self.answered = True
            connection.answered(self)

    def _head(self, start: Message, size: int, more: bool) -> bytes:
        headers: Headers = list(start["headers"])
        given = dict(headers)
        if not self.complete or b"close" in given.get(b"connection", b"").lower():
            self.keep_alive = False
        if self._bodyless or start["status"] in _NO_BODY:
            self._bodyless = True
        elif b"content-length" in given:
            self._announced = int(given[b"content-length"])
        elif not more:
            headers.append((b"content-length", b"%d" % size))
        elif self.scope["http_version"] == "1.1":
            self._chunked = True
            headers.append((b"transfer-encoding", b"chunked"))
        else:
            self.keep_alive = False  # the body goes on until the connection ends
        if b"connection" not in given and (not self.keep_alive or self.scope["http_version"] == "1.0"):
            headers.append((b"connection", b"keep-alive" if self.keep_alive else b"close"))
        return head_of(start["status"], headers)

    def _framed(self, body: bytes | memoryview, more: bool) -> list[bytes | memoryview]:
        if self._chunked:
            pieces = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
            return pieces if more else [*pieces, b"0\r\n\r\n"]
        if self._announced is not None:
            self._announced -= len(body)
            if self._announced < 0 or (self._announced > 0 and not more):
                raise RuntimeError("the length of an answer is not what its head says")
        return [body] if body else []

    async def _wait(self) -> None:
        """Until the transport has room. No pause is longer than `write_pause`, and after the first one `min_write_rate` is
        kept."""
        connection, now = self._connection, self._loop.time()
        if self._began is None:
            self._began = now
        self._moved, self._left = now, connection.transport.get_write_buffer_size()
        connection.room = self._loop.create_future()
        self._timer = self._loop.call_later(connection.limits.write_pause / _CHECKS, self._check_pace)
        try:
            await connection.room
        finally:
            self._timer.cancel()
        if connection.lost:
            raise ClientDisconnected

    def _check_pace(self) -> None:
        """True if the client takes its answer. If not, it is cut off, which ends the waiting."""
        connection, limits, now = self._connection, self._connection.limits, self._loop.time()
        left = connection.transport.get_write_buffer_size()
        if left < self._left:
            self._moved, self._left = now, left
        seconds = now - (self._began or now)
        too_slow = seconds > limits.write_pause and self._handed - left < seconds * limits.min_write_rate
        if too_slow or now - self._moved > limits.write_pause:
            _log.info("cut off a client that took its answer too slowly")
            connection.reset()
        else:
            self._timer = self._loop.call_later(limits.write_pause / _CHECKS, self._check_pace)


def head_of(status: int, headers: Headers) -> bytes:
    """The head of an answer. Raises RuntimeError if a header holds more than one line."""
    lines = b"\r\n".join([*map(b": ".join, headers), b"date: " + _date(int(time.time())), b"\r\n"])
    if lines.count(b"\n") != len(headers) + 2 or lines.count(b"\r") != len(headers) + 2:
        raise RuntimeError("a header of an answer holds more than one line")
    return _STATUS_LINES[status] + lines


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()
