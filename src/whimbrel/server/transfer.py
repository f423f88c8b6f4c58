"""How bytes come in and go out: sizes of bodies, and the memory that bodies and answers may take."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from whimbrel.dialects import Answer
from whimbrel.errors import InvalidRequest, Overloaded, TooLarge, UnsupportedMediaType, WhimbrelError
from whimbrel.server.access import Headers
from whimbrel.server.ledger import notes_of
from whimbrel.server.options import GuardOptions
from whimbrel.server.ways import WAYS

_LARGE: Final = 2**18
"""Answers above this size are counted among what is in memory."""
_SMALL: Final = 2**16
_CLOSE: Final = (b"connection", b"close")
_LAST_ANSWERS: Final = frozenset({408, 413})
"""After them a connection is closed: what else is on its way is no request."""


def check_type(headers: Mapping[bytes, bytes], media_types: Sequence[str]) -> None:
    """Refuse a body that is not of one of these types, or of any if there are none. Raises UnsupportedMediaType."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if media_types and kind not in media_types:
        raise UnsupportedMediaType(f"Content-Type is {kind[:100] or 'missing'}; send {' or '.join(media_types)}.")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise UnsupportedMediaType("Content-Encoding is not supported; send the body as it is.")


async def read_body(receive: Receive) -> bytes:
    """The whole body. Raises InvalidRequest if it ends early, and what `Incoming.receive` raises."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":  # or its chunks cannot be read, and it waits for an answer
            raise InvalidRequest("the body ended early.")
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def read_small_body(scope: Scope, receive: Receive) -> bytes:
    """The body of a request that is refused whatever it says, so that it is refused in the words of its dialect; none of it is
    read yet. Nothing where only one dialect has the path, or where it does not say that it is small and on its way."""
    headers = dict[bytes, bytes](scope["headers"])
    size = headers.get(b"content-length", b"")
    shared = scope["path"] in WAYS and len(WAYS[scope["path"]].routes) > 1
    if not shared or not size.isdigit() or int(size) > _SMALL or b"expect" in headers:
        return b""
    try:
        return await read_body(receive)
    except WhimbrelError:  # it comes too slowly, or not all of it
        return b""


class AnswerResponse(Response):
    """An answer in pieces, each made when the one before it is handed over, and others have had their turn."""

    def __init__(self, answer: Answer) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [(b"content-type", answer.media_type.encode())]
        self.raw_headers += [(name.lower().encode(), text.encode()) for name, text in answer.headers.items()]
        if answer.size is not None:
            self.raw_headers.append((b"content-length", b"%d" % answer.size))
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        notes_of(scope).held = answer.held if answer.size is None else answer.size
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pieces = iter(answer.pieces)
        piece = next(pieces, b"")
        for following in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
            piece = following
        await send({"type": "http.response.body", "body": piece})


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
        self._ended = self._announced == 0 and b"transfer-encoding" not in headers
        self._size = 0

    async def receive(self) -> Message:
        """The next piece. Raises TooLarge, unread if the length is announced; Overloaded if memory is short."""
        if self._ended:
            return await self._receive()
        if self._announced:
            self._check_size(self._announced)
            self._held.check(self._announced - self._size)
        message = await self._receive()
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

    def release(self) -> None:
        """The request is over."""
        self._held.add(-self._size)
        self._size = 0


class Outgoing:
    """The answer to one request. `send` is ASGI's; what every answer has is added, and what a large one holds is counted."""

    def __init__(self, scope: Scope, send: Send, held: Held, headers: Headers) -> None:
        self._scope = scope
        self._send = send
        self._held = held
        self._headers = headers
        self._size = 0

    async def send(self, message: Message) -> None:
        """Send."""
        if message["type"] == "http.response.start":
            last = [_CLOSE] if message["status"] in _LAST_ANSWERS else []
            message = {**message, "headers": [*message["headers"], *self._headers, *last]}
        elif not self._size:
            size = max(len(message["body"]), notes_of(self._scope).held)
            if size > _LARGE:
                self._size = size
                self._held.add(size)
        await self._send(message)

    def release(self) -> None:
        """The request is over."""
        self._held.add(-self._size)
        self._size = 0
