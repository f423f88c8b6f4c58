"""What stands between the socket and the routes: hosts, origins, keys, sizes and times.

    Edge    every request: head, Host; sizes, times and rates of body and answer
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
from whimbrel.server.access import Headers, Keys, host_name, is_loopback, is_same_origin, origin_name
from whimbrel.server.ledger import notes_of, shown
from whimbrel.server.options import GuardOptions
from whimbrel.server.transfer import Held, Incoming, Outgoing, read_small_body
from whimbrel.server.ways import render_error

OPEN_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
"""Routes that need no key, so that probes can ask."""

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_ANSWER_HEADERS: Final = (
    "metadata", "retry-after", "server-timing", "x-request-id", "x-should-retry", "x-whimbrel-tokens", "x-whimbrel-truncated"
)  # fmt: skip
_NO_SNIFFING: Final = (b"x-content-type-options", b"nosniff")


def guards(options: GuardOptions) -> list[Middleware]:
    """The middleware of an app, from the outside in."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=options.origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        allow_private_network="*" not in options.origins,
        expose_headers=_ANSWER_HEADERS,
    )
    return [Middleware(Edge, options=options), *([cors] if options.origins else []), Middleware(Access, options=options)]


class Edge:
    """ASGI middleware around every request that is entered in the ledger: its head, body and answer keep to the limits."""

    def __init__(self, app: ASGIApp, options: GuardOptions) -> None:
        self._app = app
        self._options = options
        self._hosts = None if options.hosts is None else frozenset(options.hosts)
        self._held = Held(options.max_held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = [_NO_SNIFFING]
        incoming = Incoming(scope, receive, self._options, self._held)
        outgoing = Outgoing(scope, send, self._held, headers)
        try:
            self._check(scope)
        except WhimbrelError as error:
            headers.append((b"connection", b"close"))  # who sends such a head may not mean its end where we do
            await _refuse(error, scope, outgoing.send)
        else:
            await self._app(scope, incoming.receive, outgoing.send)
        finally:
            incoming.release()
            outgoing.release()

    def _check(self, scope: Scope) -> None:
        headers: Headers = scope["headers"]
        _check_sizes(scope, self._options)
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            raise InvalidRequest("Transfer-Encoding may be chunked and nothing else.")
        if not hosts and scope["http_version"] == "1.0":
            return  # it knows no Host header, and browsers do not speak it
        if len(hosts) != 1:
            raise InvalidRequest(f"there are {len(hosts)} Host headers; send one.")
        name = host_name(hosts[0])
        if name is None:
            given = shown(hosts[0]) or "missing"
            raise InvalidRequest(f"the Host header is {given}; send a name or an address, with or without a port.")
        if self._hosts is not None and not (name in self._hosts or is_loopback(name) or name == _own_address(scope)):
            raise Forbidden(
                f"this server does not answer to the host {shown(name)}; --allowed-host {shown(name)} would change that."
            )


class Access:
    """ASGI middleware: every route but OPEN_PATHS asks for a key, if there are keys; a web page must be one that may call.

    Leaves `owner` in the scope's state: a word for the key that came, "" without keys.
    """

    def __init__(self, app: ASGIApp, options: GuardOptions) -> None:
        self._app = app
        self._keys = Keys(options.api_keys)
        self._origins = frozenset(options.origins)
        self._open = OPEN_PATHS | {"/metrics"} if options.public_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_origin(scope)
            scope["state"]["owner"] = self._owner(scope)
        except WhimbrelError as error:
            await _refuse(error, scope, send, await read_small_body(scope, receive))
        else:
            await self._app(scope, receive, send)

    def _owner(self, scope: Scope) -> str:
        owner = self._keys.owner(scope["headers"])
        if owner is None and scope["path"] not in self._open:
            raise Unauthorized("the API key is missing or wrong; send it as `Authorization: Bearer KEY`.")
        return owner or ""

    def _check_origin(self, scope: Scope) -> None:
        """A page of another site may not have a browser change anything here. (What it may read is CORS' business.)"""
        if scope["method"] in _SAFE_METHODS or "*" in self._origins:
            return
        headers = dict[bytes, bytes](scope["headers"])
        origin = headers.get(b"origin")
        if origin is None:
            return
        text = origin.decode("latin-1")
        if text not in self._origins and not is_same_origin(text, headers.get(b"host", b"").decode("latin-1")):
            way = f"; --cors-origin {shown(text)} would change that" if origin_name(text) else ""
            raise Forbidden(f"pages of {shown(text)} may not call this server{way}.")


def _check_sizes(scope: Scope, options: GuardOptions) -> None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if len(headers) > options.max_headers:
        raise HeadersTooLarge(f"there are {len(headers)} headers; the limit is {options.max_headers}.")
    size = sum(len(name) + len(value) for name, value in headers) + len(scope["path"]) + len(scope["query_string"])
    if size > options.max_header_bytes:
        raise HeadersTooLarge(f"path and headers have {size:,} bytes; the limit is {options.max_header_bytes:,}.")


def _own_address(scope: Scope) -> str | None:
    """The address that was called."""
    server = scope.get("server")
    return server[0] if server else None


async def _refuse(error: WhimbrelError, scope: Scope, send: Send, sent: bytes = b"") -> None:
    """Answer without the app, in the shape of the dialect, as far as it is known."""
    notes_of(scope).error = error.code
    status, body = render_error(scope["path"], error, sent)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
