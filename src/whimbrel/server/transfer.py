"""How bytes come in and go out: sizes, times and rates of bodies and answers, and the memory that they may take.

Granian takes bytes, which it copies; of a view it would look at byte after byte, fifty times as slowly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from whimbrel.dialects import Answer
from whimbrel.errors import BodyTimeout, InvalidRequest, Overloaded, TooLarge, UnsupportedMediaType
from whimbrel.server.connections import cut
from whimbrel.server.ledger import notes_of
from whimbrel.server.options import GuardOptions

_log = logging.getLogger("whimbrel")

_WHOLE: Final = 2**18
"""An answer up to this size goes out at once; of a larger one, no more than a piece is ahead of the client."""
_PIECE: Final = 256 * 2**10
_LAST_ANSWERS: Final = frozenset({408, 413})
"""After them a connection is closed: what else is on its way is no request."""


async def read_body(request: Request, media_types: Sequence[str]) -> bytes:
    """The whole body, of one of these types, or of any if there are none.

    Raises UnsupportedMediaType, InvalidRequest and what `Incoming.receive` raises.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_types and kind not in media_types:
        raise UnsupportedMediaType(f"Content-Type is {kind[:100] or 'missing'}; send {' or '.join(media_types)}.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedMediaType("Content-Encoding is not supported; send the body as it is.")
    first, more = b"", bytearray()
    try:
        async for chunk in request.stream():
            if first:
                more += chunk
            else:
                first = chunk
    except ClientDisconnect:  # or its chunks cannot be read, and it waits for an answer
        raise InvalidRequest("the body ended early.") from None
    return first + more if more else first


class AnswerResponse(Response):
    """An answer in pieces, each made when the one before it is handed over, and others have had their turn."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(media_type=answer.media_type, headers=answer.headers)
        del self.headers["content-length"]
        if answer.size is not None:
            self.headers["content-length"] = str(answer.size)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        notes_of(scope).held = answer.held if answer.size is None else answer.size
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if answer.size is not None and answer.size <= _WHOLE:
            await send({"type": "http.response.body", "body": b"".join(answer.pieces)})
            return
        for piece in answer.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


class ClientIsCut(Exception):
    """It took its answer too slowly."""


class Held:
    """Counts the bytes that requests hold in this process."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0

    def check(self, wanted: int) -> None:
        """Raise Overloaded if there is no room for so many more."""
        if self._count + wanted > self._limit:
            raise Overloaded("too many bytes of requests are in memory; try again later.", retry_after=1)

    def add(self, count: int) -> None:
        """So many more are held; or less, if negative."""
        self._count += count


class Incoming:
    """The body of one request. `receive` is ASGI's, and raises when the body breaks a limit."""

    def __init__(self, scope: Scope, receive: Receive, options: GuardOptions, held: Held) -> None:
        headers = dict[bytes, bytes](scope["headers"])
        self._receive = receive
        self._options = options
        self._held = held
        self._announced = int(headers.get(b"content-length", b"0"))  # the HTTP parser has checked it
        self._waits = b"expect" in headers
        self._ended = self._announced == 0 and b"transfer-encoding" not in headers
        self._size = 0
        self._started: float | None = None

    async def receive(self) -> Message:
        """The next piece. Raises TooLarge, unread if the length is announced; BodyTimeout; Overloaded if memory is short."""
        if self._ended:
            return await self._receive()
        now = asyncio.get_running_loop().time()
        if self._started is None:
            self._check_size(self._announced)
            self._held.check(self._announced)
            self._started = now
        limit = self._options
        latest = _latest(now, self._started, self._size, limit.body_pause, limit.min_body_rate)
        try:
            async with asyncio.timeout_at(min(latest, self._started + limit.body_timeout)):
                message = await self._receive()
        except TimeoutError:
            self._ended = True  # what is on its way is not waited for
            seconds = asyncio.get_running_loop().time() - self._started
            raise BodyTimeout(f"the body came too slowly: {self._size:,} bytes in {seconds:.1f} s.") from None
        self._take(message)
        return message

    def _take(self, message: Message) -> None:
        size = len(message.get("body", b""))
        self._held.check(size)
        self._held.add(size)
        self._size += size
        self._ended = not message.get("more_body", False) or 0 < self._announced <= self._size
        self._check_size(self._size)

    def _check_size(self, size: int) -> None:
        if size > self._options.max_body_bytes:
            raise TooLarge(
                f"the body has {size:,} bytes or more; the limit is {self._options.max_body_bytes:,}. Split the request."
            )

    async def drain(self) -> None:
        """Once the answer is out: read what is left, within limits, so that a client that is still writing gets to read it."""
        if self._ended or (self._waits and self._started is None):
            return
        left = self._options.drain_bytes
        try:
            async with asyncio.timeout(self._options.drain_timeout):
                while left > 0:
                    message = await self._receive()
                    if not message.get("more_body", False):
                        return
                    left -= len(message["body"])
        except TimeoutError:
            pass

    def release(self) -> None:
        """The request is over."""
        self._held.add(-self._size)
        self._size = 0


class Outgoing:
    """The answer to one request. `send` is ASGI's; it adds headers to every answer and holds a large one back."""

    def __init__(self, scope: Scope, send: Send, options: GuardOptions, held: Held, headers: dict[str, str]) -> None:
        self._scope = scope
        self._send = send
        self._options = options
        self._held = held
        self._headers = headers
        self._size = 0
        self._started: float | None = None
        """When the first piece went out, of an answer in pieces."""
        self._moved = 0

    async def send(self, message: Message) -> None:
        """Send. Raises ClientIsCut if the client does not take it."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message["headers"]))
            headers.update(self._headers)
            if message["status"] in _LAST_ANSWERS:
                headers["connection"] = "close"
            await self._send({**message, "headers": headers.raw})
        elif self._started is None and not message.get("more_body", False) and len(message["body"]) <= _WHOLE:
            await self._send({**message, "body": bytes(message["body"])})
        else:
            await self._send_slowly(memoryview(message["body"]), message.get("more_body", False))

    async def _send_slowly(self, body: memoryview, more_follows: bool) -> None:
        """Piece by piece, as the client takes them: `send` returns when there is room for the next."""
        loop, limit = asyncio.get_running_loop(), self._options
        if self._started is None:
            self._started, self._size = loop.time(), max(len(body), notes_of(self._scope).held)
            self._held.add(self._size)
        try:
            async with asyncio.timeout_at(None) as clock:
                for start in range(0, len(body) or 1, _PIECE):
                    more = more_follows or start + _PIECE < len(body)
                    clock.reschedule(_latest(loop.time(), self._started, self._moved, limit.write_pause, limit.min_write_rate))
                    piece = bytes(body[start : start + _PIECE])
                    await self._send({"type": "http.response.body", "body": piece, "more_body": more})
                    self._moved += len(piece)
        except TimeoutError:
            _log.info("cut off a client that took its answer too slowly")
            if client := self._scope.get("client"):
                cut((client[0], int(client[1])))
            raise ClientIsCut from None

    def release(self) -> None:
        """The request is over."""
        self._held.add(-self._size)
        self._size = 0


def _latest(now: float, started: float, moved: int, pause: float, rate: int) -> float:
    """When the next bytes must have moved: no pause is longer than `pause`, and after the first one the rate is kept."""
    return min(now + pause, started + max(pause, moved / rate))
