"""What stands between the socket and a dialect: the API key, the body's type and size."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from whimbrel.dialects import openai
from whimbrel.errors import InvalidRequest, TooLarge, Unauthorized, UnsupportedMediaType

OPEN_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready"})
"""Routes that need no key, so that probes can ask."""


class ApiKeys:
    """ASGI middleware: every route except OPEN_PATHS asks for `Authorization: Bearer KEY`, if there are keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allows(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("the API key is missing or wrong; send it as `Authorization: Bearer KEY`.")
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": openai.write_error(error)})

    def _allows(self, scope: Scope) -> bool:
        if not self._keys:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if given[:7].lower() != b"bearer ":
            return False
        # Compared with every key, so that time does not tell which one was close.
        return sum(hmac.compare_digest(given[7:].strip(), key) for key in self._keys) > 0


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises UnsupportedMediaType, TooLarge (unread, if its length is announced), InvalidRequest."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(f"Content-Type is {kind or 'missing'}; send application/json.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedMediaType("Content-Encoding is not supported; send the body as it is.")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            chunks.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(size, max_bytes)
    except ClientDisconnect:  # or its chunks cannot be read, and it waits for an answer
        raise InvalidRequest("the body ended early.") from None
    return b"".join(chunks)


def _too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(f"the body has {size:,} bytes or more; the limit is {limit:,}. Split the request.")
