"""Reading of request bodies and sending of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.types import Receive, Scope, Send

from whimbrel.dialects import Response
from whimbrel.errors import InvalidRequest, UnsupportedMediaType, WhimbrelError
from whimbrel.server.app.request_context import context_of
from whimbrel.server.app.routing import ROUTES_BY_PATH

_SMALL: Final = 2**16


def check_type(headers: Mapping[bytes, bytes], media_types: Sequence[str]) -> None:
    """Refuse a body that is not of one of these types, or of any if there are none. Raises UnsupportedMediaType."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if media_types and kind not in media_types:
        raise UnsupportedMediaType(f"Content-Type is {kind[:100] or 'missing'}; send {' or '.join(media_types)}.")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise UnsupportedMediaType("Content-Encoding is not supported; send the body as it is.")


async def read_body(receive: Receive) -> bytes:
    """The whole body. Raises InvalidRequest if it ends early, and what `RequestContext.receive` raises."""
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
    context_of(scope).answer_bytes = answer.memory_bytes if answer.size is None else answer.size
    pieces = iter(answer.chunks)
    piece = next(pieces, b"")  # if that fails, there is still time to say so
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for following in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
        piece = following
    await send({"type": "http.response.body", "body": piece})
