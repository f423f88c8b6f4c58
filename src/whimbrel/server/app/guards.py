"""Guards: limits of request heads, CORS, and checks of host, origin, API key and its budgets, before any route.

Decisions rest on the headers and on `scope["path"]`, never on a URL made from the Host header. The HTTP parser has already
refused malformed heads. `RequestContext` limits the sizes of bodies, `server/http` times and rates.
"""

import hmac
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from ipaddress import ip_address
from itertools import chain
from types import MappingProxyType
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from whimbrel.errors import (
    Forbidden,
    HeadersTooLarge,
    MalformedHTTP,
    NotFound,
    PermissionDenied,
    Unauthorized,
    Unavailable,
    WhimbrelError,
)  # fmt: skip
from whimbrel.server.app.admin import is_admin_path
from whimbrel.server.app.limits import ServerLimits, host_name, origin_name
from whimbrel.server.app.request_context import RequestContext, context_of, sanitize, send_error
from whimbrel.server.budgets import Budgets
from whimbrel.server.http.exchange import KEPT_EXTENSION
from whimbrel.server.keys import ADMIN_PREFIX, MIXED_ROUTES, ApiKey, is_admin_route
from whimbrel.server.pages.files import ASSET_PATHS

OPEN_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready"})
"""Routes that need no key, for probes."""
OPEN_PAGES: Final = frozenset({"/", "/docs", "/openapi.json"})
"""Pages whose GET needs no key, since they are the same on every server. They ask for a key themselves and send it."""
OPEN_ROUTES: Final = frozenset((*OPEN_PATHS, *OPEN_PAGES, *ASSET_PATHS))
"""Routes whose GET needs no key."""

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_ANSWER_HEADERS: Final = (
    "inference-header-content-length", "metadata", "retry-after", "server-timing", "x-request-id", "x-should-retry",
    "x-whimbrel-listwise", "x-whimbrel-revision",
    "x-whimbrel-tokens", "x-whimbrel-truncated", "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests", "x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens",
)  # fmt: skip


class Keys:
    """The keys of a server, found by the digests of those that requests bring."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._by_digest = {key.digest: key for key in keys}

    def of_digest(self, digest: bytes) -> ApiKey | None:
        return self._by_digest.get(digest)

    def find(self, headers: Sequence[tuple[bytes, bytes]]) -> ApiKey | None:
        """Return the key that a request brings, None if none is right.

        OpenAI's clients send `Authorization: Bearer KEY`, Azure's `api-key`.
        """
        if not self._by_digest:
            return None
        first = dict(reversed(headers))
        texts = [first[name] for name in (b"api-key", b"x-api-key") if name in first]
        if first.get(b"authorization", b"")[:7].lower() == b"bearer ":
            texts.append(first[b"authorization"][7:])
        found = None
        for text in texts:
            digest = sha256(text.strip()).digest()
            # The time of a lookup depends on digests, which show nothing of a key: docs/adr/0035-keys.md
            known = self._by_digest.get(digest)
            if known is not None and hmac.compare_digest(digest, known.digest):
                found = known
        return found


class GuardMiddleware:
    """ASGI middleware: limits of the head, then CORS if there are `origins`, then origin and key.

    Every route but OPEN_PATHS and pages requires a key if there are keys: one that opens the route, and has budget left. The
    request's context stores it.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ServerLimits,
        *,
        template: Callable[[str], str] = lambda path: path,
        budgets: Budgets | None = None,
        free: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`template` gives the template of the route that a path belongs to, "" if there is none.

        `free` are templates of routes that take nothing of a key's budgets, as they compute nothing for their clients, each
        with the route that a key names to open it.
        """
        self._app = app
        self._free = free
        self._template = template
        self._budgets = budgets
        self.renew(limits)
        self._inner: ASGIApp = self._authorize
        if limits.origins:
            self._inner = CORSMiddleware(
                self._authorize,
                allow_origins=limits.origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                allow_private_network="*" not in limits.origins,
                expose_headers=_ANSWER_HEADERS,
            )

    def renew(self, limits: ServerLimits) -> None:
        """Take keys, hosts and limits of heads from now on. The origins of CORS stay."""
        self._limits = limits
        keys = limits.all_keys
        self._keys = Keys(keys)
        self._needs_key = bool(keys)
        self._has_admin = any(key.admin for key in keys)
        self._has_limits = self._has_admin or any(key.routes is not None or key.has_budget for key in keys)
        self._open = OPEN_PATHS | {"/metrics"} if limits.public_metrics else OPEN_PATHS
        self._allowed: tuple[bytes, object] | None = None
        """The last Host header that was allowed, and the address that the client had called."""

    @property
    def needs_key(self) -> bool:
        return self._needs_key

    def key_of(self, digest: bytes) -> ApiKey | None:
        """Return the key of the server with this hash, None if there is none now."""
        return self._keys.of_digest(digest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_head(scope)
            if scope.get("extensions", {}).get(KEPT_EXTENSION) and scope["path"] not in OPEN_PATHS:
                raise Unavailable("all places for connections are taken, and no client makes way.", retry_after=1.0)
        except WhimbrelError as error:
            context_of(scope).closes = True  # the client and this server may disagree on where the request ends
            await send_error(error, scope, send)
        else:
            await self._inner(scope, receive, send)

    def _check_head(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        limits = self._limits
        if len(headers) > limits.max_headers:
            raise HeadersTooLarge(f"there are {len(headers)} headers; the limit is {limits.max_headers}.")
        size = len(scope["path"]) + len(scope["query_string"]) + sum(map(len, chain.from_iterable(headers)))
        if size > limits.max_header_bytes:
            raise HeadersTooLarge(f"path and headers have {size:,} bytes; the limit is {limits.max_header_bytes:,}.")
        codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            raise MalformedHTTP("Transfer-Encoding may be chunked and nothing else.")
        hosts = [value for name, value in headers if name == b"host"]
        if not hosts and scope["http_version"] == "1.0":
            return  # HTTP/1.0 has no Host header, and browsers do not use it
        if len(hosts) != 1:
            raise MalformedHTTP(f"there are {len(hosts)} Host headers; send one.")
        called = hosts[0], scope.get("server")
        if called != self._allowed:
            self._check_host(hosts[0].decode("latin-1"), scope)
            self._allowed = called

    def _check_host(self, host: str, scope: Scope) -> None:
        name, allowed, server = host_name(host), self._limits.hosts, scope.get("server")
        if name is None:
            raise MalformedHTTP(
                f"the Host header is {sanitize(host) or 'missing'}; send a name or an address, with or without a port."
            )
        if allowed is not None and not (name in allowed or _is_loopback(name) or (server and name == server[0])):
            raise Forbidden(
                f"this server does not answer to the host {sanitize(name)}; --set allowed_host={sanitize(name)} allows it."
            )

    async def _authorize(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            of_admin = is_admin_path(scope["path"])
            self._check_origin(scope, of_admin=of_admin and self._has_admin)
            if self._needs_key:
                self._check_key(scope, context)
            if of_admin and not self._has_admin:
                raise no_route(scope["path"])
        except WhimbrelError as error:
            await send_error(error, scope, send, body=await context.read_small_body(scope["path"]))
        else:
            await self._app(scope, receive, send)

    def _check_key(self, scope: Scope, context: RequestContext) -> None:
        """Note the key of a request. Raises Unauthorized and the errors of `admit`."""
        key = self._keys.find(scope["headers"])
        if key is None:
            if not self._is_open(scope):
                raise Unauthorized("the API key is missing or wrong; send it as `Authorization: Bearer KEY`.")
            return
        context.key, context.tenant = key, key.name
        context.is_operator = key.admin and _other_site(context.request_headers) is None
        if self._has_limits and not self._is_open(scope):
            self.admit(key, scope["path"], context)

    def admit(self, key: ApiKey, path: str, context: RequestContext) -> None:
        """Count a request of a key. Raises PermissionDenied, RateLimited and Unavailable."""
        is_admin = is_admin_route(path)
        route = path if is_admin else self._template(path)
        if route and not key.opens(self._free.get(route, route)) and (self._has_admin or not is_admin):
            raise PermissionDenied(f"the API key {key.name} may not use {sanitize(route)}; {_allowed_routes(key)}.")
        if (
            self._budgets is not None
            and route not in self._free
            and (usage := self._budgets.usage(key, yields=context.priority is not None)) is not None
        ):
            context.usage = usage
            usage.begin()

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        return path in self._open or (scope["method"] in ("GET", "HEAD") and (path in OPEN_PAGES or path in ASSET_PATHS))

    def _check_origin(self, scope: Scope, *, of_admin: bool) -> None:
        """Raise Forbidden if a page of another site lets a browser change something here. (CORS is about reading.)

        No page of another site may do so by an admin route.
        """
        headers, origins = context_of(scope).request_headers, () if of_admin else self._limits.origins
        if scope["method"] in _SAFE_METHODS or "*" in origins:
            return
        if (origin := _other_site(headers)) is not None and origin not in origins:
            hint = f"; --set cors_origin={sanitize(origin)} allows it" if origin_name(origin) and not of_admin else ""
            raise Forbidden(f"pages of {sanitize(origin)} may not call this server{hint}.")


def _other_site(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the origin of the page that sends a request, None if it is this server's or none."""
    if b"origin" not in headers:
        return None
    origin = headers[b"origin"].decode("latin-1")
    scheme, _, authority = origin.lower().partition("://")
    is_own = scheme in ("http", "https") and authority == headers.get(b"host", b"").decode("latin-1").lower()
    return None if is_own else origin  # the scheme may differ, since a proxy may have removed TLS


def no_route(path: str) -> NotFound:
    return NotFound(f"no route {sanitize(path)}; /docs lists them.")


def _allowed_routes(key: ApiKey) -> str:
    routes = [*(key.routes or ()), *([f"{ADMIN_PREFIX}...", *sorted(MIXED_ROUTES)] if key.admin else [])]
    return f"it may use {', '.join(routes)}" if routes else "it may use all but the admin's"


def _is_loopback(name: str) -> bool:
    """Return whether a host's name, as `host_name` gives it, stands for this machine only."""
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
