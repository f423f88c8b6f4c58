"""How bytes come in and go out: sizes of bodies, the memory that bodies and answers may take, and what became of a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from whimbrel.dialects import Response
from whimbrel.errors import InvalidRequest, Overloaded, TooLarge, UnsupportedMediaType, WhimbrelError
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.request_record import RequestContext, context_of
from whimbrel.server.app.routing import ROUTES_BY_PATH
from whimbrel.telemetry.trace import Outcome

_CLIENT_LEFT: Final = 499
"""The status of a request that nobody waits for the answer to."""
_LARGE: Final = 2**18
"""Answers above this size are counted among what is in memory."""
_SMALL: Final = 2**16
_CLOSE: Final = (b"connection", b"close")
_NO_SNIFFING: Final = (b"x-content-type-options", b"nosniff")
_LAST_ANSWERS: Final = frozenset({408, 413})
"""After them a connection is closed: what else is on its way is no request."""
_OUTCOMES: Final[dict[int, Outcome]] = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "timeout",
    429: "overloaded",
    503: "unavailable",
    504: "timeout",
}


class MemoryBudget:
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


class MeteredTransfer:
    """What goes between a client and the app, limited and watched. `receive` and `send` are ASGI's."""

    def __init__(self, receive: Receive, send: Send, notes: RequestContext, options: ServerLimits, held: MemoryBudget) -> None:
        self._receive = receive
        self._send = send
        self._notes = notes
        self._max_body_bytes = options.max_body_bytes
        self._held = held
        self._announced = int(notes.request_headers.get(b"content-length", b"0"))  # the HTTP parser has checked it
        self._body_ended = self._announced == 0 and b"transfer-encoding" not in notes.request_headers
        self._body_size = 0
        self._answer_size = 0
        self.status = 0
        self.complete = False
        """Whether the whole answer was handed to the server."""
        self.left = False
        """Whether the client left, or its body broke off, before that."""
        self.ended = 0.0
        """When the answer was complete (time.perf_counter); the app may still have to clear up after it."""

    async def receive(self) -> Message:
        """The next piece of the body. Raises TooLarge, unread if the length is announced; Overloaded if memory is short."""
        if self._announced and not self._body_ended:
            self._check_size(self._announced)
            self._held.check(self._announced - self._body_size)
        message = await self._receive()
        if not self._body_ended:
            self._take(message)
        if message["type"] == "http.disconnect" and not self.complete:
            self.left = True
        return message

    def _take(self, message: Message) -> None:
        size = len(message.get("body", b""))
        self._held.check(size)
        self._held.add(size)
        self._body_size += size
        self._body_ended = not message.get("more_body", False) or 0 < self._announced <= self._body_size
        self._check_size(self._body_size)

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise TooLarge(f"the body has {size:,} bytes or more; the limit is {self._max_body_bytes:,}. Split the request.")

    async def send(self, message: Message) -> None:
        """Send; what every answer has is added. Raises OSError if nobody is there to take it."""
        is_start = message["type"] == "http.response.start"
        if is_start:
            self.status = status = message["status"]
            last = (_CLOSE,) if self._notes.closes or status in _LAST_ANSWERS else ()
            message = {**message, "headers": [*message["headers"], *self._notes.headers(), _NO_SNIFFING, *last]}
        elif not self._answer_size:
            size = max(len(message.get("body", b"")), self._notes.held)
            if size > _LARGE:
                self._answer_size = size
                self._held.add(size)
        try:
            await self._send(message)
        except OSError:
            self.left = True
            raise
        if not is_start and not message.get("more_body", False):
            self.complete = True
            self.ended = time.perf_counter()

    def end(self, *, lost: bool) -> tuple[int, Outcome]:
        """Status and outcome, now that nothing more will be sent."""
        self._held.add(-self._body_size - self._answer_size)
        if self.left:
            return self.status or _CLIENT_LEFT, "client_gone"
        if self.complete:
            return self.status, _outcome(self.status)
        if lost:
            return self.status, "lost"
        # An answer that was begun and not ended: after a bug, or because the client took it too slowly.
        return self.status, "error" if self._notes.error else "client_gone"


def _outcome(status: int) -> Outcome:
    if status in _OUTCOMES:
        return _OUTCOMES[status]
    if status < 400:
        return "ok"
    return "invalid" if status < 500 else "error"


def check_type(headers: Mapping[bytes, bytes], media_types: Sequence[str]) -> None:
    """Refuse a body that is not of one of these types, or of any if there are none. Raises UnsupportedMediaType."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if media_types and kind not in media_types:
        raise UnsupportedMediaType(f"Content-Type is {kind[:100] or 'missing'}; send {' or '.join(media_types)}.")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise UnsupportedMediaType("Content-Encoding is not supported; send the body as it is.")


async def read_body(receive: Receive) -> bytes:
    """The whole body. Raises InvalidRequest if it ends early, and what `Transfer.receive` raises."""
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
    headers = context_of(scope).request_headers
    size = headers.get(b"content-length", b"")
    shared = scope["path"] in ROUTES_BY_PATH and len(ROUTES_BY_PATH[scope["path"]].routes) > 1
    if not shared or not size.isdigit() or int(size) > _SMALL or b"expect" in headers:
        return b""
    try:
        return await read_body(receive)
    except WhimbrelError:  # it comes too slowly, or not all of it
        return b""


async def send_answer(answer: Response, scope: Scope, send: Send) -> None:
    """Send an answer in its pieces, each made when the one before it is handed over, and others have had their turn."""
    headers = [(b"content-type", answer.media_type.encode())]
    headers += [(name.lower().encode(), text.encode()) for name, text in answer.headers.items()]
    if answer.size is not None:
        headers.append((b"content-length", b"%d" % answer.size))
    context_of(scope).held = answer.memory_bytes if answer.size is None else answer.size
    pieces = iter(answer.chunks)
    piece = next(pieces, b"")  # if that fails, there is still time to say so
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for following in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
        piece = following
    await send({"type": "http.response.body", "body": piece})
