"""Guards before the routes: checks of heads, hosts, origins and keys. (Sizes of bodies are request_context.py's, times and
rates exchange.py's.)

    Edge    every request: sizes of its head, Host
    CORS    where asked for: Starlette's
    Access  Origin and key

Decisions are made on what the head says and on `scope["path"]`, never on a URL put together from the Host header. What
the HTTP parser below refuses by itself (framing, broken heads, too many headers) never comes here.
"""

from __future__ import annotations

from typing import Final

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from whimbrel.errors import Forbidden, HeadersTooLarge, InvalidRequest, Unauthorized, WhimbrelError
from whimbrel.server.app.access import Keys, host_name, is_loopback, is_same_origin, origin_name
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.request_context import context_of
from whimbrel.server.app.request_log import sanitize
from whimbrel.server.app.routing import render_error
from whimbrel.server.app.transfer import read_small_body

OPEN_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
"""Routes that need no key, so that probes can ask."""

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_ANSWER_HEADERS: Final = (
    "metadata", "retry-after", "server-timing", "x-request-id", "x-should-retry", "x-whimbrel-tokens", "x-whimbrel-truncated"
)  # fmt: skip


def guards(options: ServerLimits) -> list[Middleware]:
    """The middleware of an app, from the outside in."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=options.origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        allow_private_network="*" not in options.origins,
        expose_headers=_ANSWER_HEADERS,
    )
    return [
        Middleware(HeadLimitsMiddleware, options=options),
        *([cors] if options.origins else []),
        Middleware(AuthMiddleware, options=options),
    ]


class HeadLimitsMiddleware:
    """ASGI middleware around every request that the ledger enters: its head keeps to the limits, and names this server."""

    def __init__(self, app: ASGIApp, options: ServerLimits) -> None:
        self._app = app
        self._options = options
        self._hosts = None if options.hosts is None else frozenset(options.hosts)
        self._known: tuple[bytes, object] | None = None
        """The host that was last found right, and the address that it was asked at."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except WhimbrelError as error:
            context_of(scope).closes = True  # who sends such a head may not mean its end where we do
            await _refuse(error, scope, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        options = self._options
        if len(headers) > options.max_headers:
            raise HeadersTooLarge(f"there are {len(headers)} headers; the limit is {options.max_headers}.")
        size = len(scope["path"]) + len(scope["query_string"])
        hosts: list[bytes] = []
        codings: list[bytes] = []
        for name, value in headers:
            size += len(name) + len(value)
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding":
                codings.append(value.lower())
        if size > options.max_header_bytes:
            raise HeadersTooLarge(f"path and headers have {size:,} bytes; the limit is {options.max_header_bytes:,}.")
        if codings not in ([], [b"chunked"]):
            raise InvalidRequest("Transfer-Encoding may be chunked and nothing else.")
        if not hosts and scope["http_version"] == "1.0":
            return  # it knows no Host header, and browsers do not speak it
        if len(hosts) != 1:
            raise InvalidRequest(f"there are {len(hosts)} Host headers; send one.")
        asked = hosts[0], scope.get("server")
        if asked != self._known:
            self._check_host(hosts[0].decode("latin-1"), scope)
            self._known = asked

    def _check_host(self, host: str, scope: Scope) -> None:
        name = host_name(host)
        if name is None:
            raise InvalidRequest(
                f"the Host header is {sanitize(host) or 'missing'}; send a name or an address, with or without a port."
            )
        if self._hosts is not None and not (name in self._hosts or is_loopback(name) or name == _own_address(scope)):
            raise Forbidden(
                f"this server does not answer to the host {sanitize(name)}; --allowed-host {sanitize(name)} would change that."
            )


class AuthMiddleware:
    """ASGI middleware: every route but OPEN_PATHS asks for a key, if there are keys; a web page must be one that may call.

    Leaves `tenant` in the scope's state: a word for the key that came, "" without keys.
    """

    def __init__(self, app: ASGIApp, options: ServerLimits) -> None:
        self._app = app
        self._keys = Keys(options.api_keys)
        self._origins = frozenset(options.origins)
        self._open = OPEN_PATHS | {"/metrics"} if options.public_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_origin(scope)
            scope["state"]["tenant"] = self._tenant(scope)
        except WhimbrelError as error:
            await _refuse(error, scope, send, await read_small_body(scope, receive))
        else:
            await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        tenant = self._keys.tenant(scope["headers"])
        if tenant is None and scope["path"] not in self._open:
            raise Unauthorized("the API key is missing or wrong; send it as `Authorization: Bearer KEY`.")
        return tenant or ""

    def _check_origin(self, scope: Scope) -> None:
        """A page of another site may not have a browser change anything here. (What it may read is CORS' business.)"""
        if scope["method"] in _SAFE_METHODS or "*" in self._origins:
            return
        headers = context_of(scope).request_headers
        origin = headers.get(b"origin")
        if origin is None:
            return
        text = origin.decode("latin-1")
        if text not in self._origins and not is_same_origin(text, headers.get(b"host", b"").decode("latin-1")):
            way = f"; --cors-origin {sanitize(text)} would change that" if origin_name(text) else ""
            raise Forbidden(f"pages of {sanitize(text)} may not call this server{way}.")


def _own_address(scope: Scope) -> str | None:
    """The address that was called."""
    server = scope.get("server")
    return server[0] if server else None


async def _refuse(error: WhimbrelError, scope: Scope, send: Send, sent: bytes = b"") -> None:
    """Answer without the app, in the shape of the dialect, as far as it is known."""
    context_of(scope).error = error.code
    status, body = render_error(error, scope["path"], sent)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
