"""Requests of the server to its own routes: those of batch files. They pass the routes, the log and the budgets of a key.

They are no requests of HTTP, so they have neither head nor connection, and their memory is that of the file's reader. They run
after all others.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whimbrel.dialects.common.route import JSON
from whimbrel.errors import WhimbrelError
from whimbrel.server.app.guards import GuardMiddleware, no_route
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.request_context import RequestMiddleware, context_of, send_error
from whimbrel.server.app.routing import ROUTES_BY_PATH, canonical
from whimbrel.server.batches.lines import LineAnswer
from whimbrel.server.batches.runner import KeyGone
from whimbrel.server.http.exchange import DISCONNECT_EXTENSION
from whimbrel.server.keys import ApiKey

LOWEST: Final = 2**31 - 1
"""The last priority: whatever else waits runs first."""
_KEY: Final = "whimbrel.key"
_UNTIL_LATER: Final = frozenset({"overloaded", "rate_limited", "unavailable"})
"""Outcomes of requests that may succeed when they are sent again."""
_RETRY_SECONDS: Final = 1.0


class OwnRequests:
    """Bodies to routes, and their answers."""

    def __init__(self, guards: GuardMiddleware, route: ASGIApp, template: Callable[[str], str], limits: ServerLimits) -> None:
        self._guards = guards
        self._route = route
        self._app = RequestMiddleware(self._admit, template, limits)

    async def ask(self, path: str, body: bytes, *, request_id: str, key: ApiKey | None = None) -> LineAnswer:
        """Return the answer of a POST route to a body of JSON, as a request of this key. Cancelling it drops the request."""
        answer = _Answer(body)
        headers = {b"content-type": JSON.encode(), b"content-length": b"%d" % len(body), b"x-request-id": request_id.encode()}
        scope: Scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "scheme": "http", "server": None, "client": None,
            "headers": list(headers.items()), "extensions": {DISCONNECT_EXTENSION: _on_disconnect}, _KEY: key,
        }  # fmt: skip
        scope = canonical(scope)
        await self._app(scope, answer.receive, answer.send)
        waits = context_of(scope).error_outcome in _UNTIL_LATER
        seconds = float(answer.headers.get(b"retry-after", _RETRY_SECONDS)) if waits else None
        media_type = answer.headers.get(b"content-type", b"").decode("latin-1")
        return LineAnswer(answer.status, b"".join(answer.pieces), media_type, seconds)

    def key_of(self, owner: str) -> ApiKey | None:
        """Return the key whose hash an owner is; None if the server has no keys. Raises KeyGone."""
        if not owner and not self._guards.needs_key:
            return None
        key = self._guards.key_of(bytes.fromhex(owner))
        if key is None:
            raise KeyGone
        return key

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, key, path = context_of(scope), scope[_KEY], scope["path"]
        context.priority = LOWEST
        try:
            if path not in ROUTES_BY_PATH:
                raise no_route(path)
            if key is not None:
                context.key, context.tenant = key, key.name
                self._guards.admit(key, path, context)
        except WhimbrelError as error:
            await send_error(error, scope, send)
        else:
            await self._route(scope, receive, send)


def _on_disconnect(callback: Callable[[], None]) -> None:
    """Call nothing: the server does not leave its own requests."""


class _Answer:
    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.pieces: list[bytes] = []

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()  # until it is cancelled, as no client leaves
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.pieces.append(bytes(message.get("body", b"")))
