"""Request context: the identity, counts, times and outcome of one HTTP request, and the middleware that reports them.

Each request has one RequestStarted and exactly one RequestFinished event, on every code path. Bugs get status 500.
"""

import asyncio
import logging
import os
import re
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from math import ceil, inf
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whimbrel.dialects.common.bodies import MalformedBody
from whimbrel.dialects.common.route import Route as DialectRoute
from whimbrel.errors import (
    DeadlineExceeded,
    MalformedHTTP,
    Overloaded,
    RateLimited,
    TooLarge,
    Unauthorized,
    Unavailable,
    WhimbrelError,
)
from whimbrel.server.app.limits import DEFAULTS, ServerLimits
from whimbrel.server.app.request_memory import SMALL_BODY, RequestMemory
from whimbrel.server.app.routing import ROUTES_BY_PATH, render_error
from whimbrel.server.budgets import Usage
from whimbrel.server.keys import ApiKey
from whimbrel.telemetry import trace
from whimbrel.telemetry.trace import Outcome, RequestFinished, RequestStarted, Stage
from whimbrel.types.result import Result

_log = logging.getLogger("whimbrel")

_CLIENT_LEFT: Final = 499
"""Status in the log of a request whose client left before its answer."""
_LARGE_ANSWER: Final = 2**18
"""Size above which answers count as memory in use."""
_GZIP: Final = 16 + zlib.MAX_WBITS
"""The format of gzip, for zlib."""
_GZIP_STEP: Final = 2**16
_GZIP_PIECE: Final = 2**18
"""Bytes that are decompressed between two turns of the event loop: half a millisecond."""
_CLOSE: Final = (b"connection", b"close")
_NO_SNIFFING: Final = (b"x-content-type-options", b"nosniff")
_CLOSING_STATUSES: Final = frozenset({408, 413})
"""Answers to requests whose body is not read to its end, so that the connection cannot be used again."""
_OUTCOMES: Final[dict[int, Outcome]] = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "timeout",
    429: "overloaded",
    503: "unavailable",
    504: "timeout",
}
"""Outcome by the status of the error itself: dialects answer the same error with other statuses."""
_GIVEN_BACK: Final[frozenset[Outcome]] = frozenset({"error", "unavailable", "overloaded", "lost"})
"""Outcomes that are the server's fault, so that the tokens of the request go back to the budgets of its key."""
_PROBES: Final = frozenset({"/", "/health", "/health/ready", "/ping", "/v2/health/ready", "/v2/models/{model}/ready"})
"""Routes whose status 503 is the answer to a question, and no failure."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
_OTHER: Final = "other"
_MAX_PATH: Final = 256
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_TRACEPARENT: Final = re.compile(
    r"(?!ff|00.{53}.)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,456})?"
)


def sanitize(text: str, limit: int = 100) -> str:
    """Return text from a client in a form fit for a message or a log: short, on one line, without control characters."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return cut if cut.isprintable() else ascii(cut)


class RequestContext:
    """State of one request. `receive` and `send` are ASGI's, with the limits of size and memory and with common headers."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: ServerLimits, memory: RequestMemory) -> None:
        self.started = time.perf_counter()
        self.request_headers: dict[bytes, bytes] = dict(scope["headers"])
        """The last header of each name."""
        request_id = self.request_headers.get(b"x-request-id", b"").decode("latin-1")
        self.request_id = request_id if _REQUEST_ID.fullmatch(request_id) else os.urandom(16).hex()
        self.tenant = ""
        """The name of the API key; "" if there is none."""
        self.key: ApiKey | None = None
        self.usage: Usage | None = None
        """The account of a request whose key has budgets."""
        self.model = ""
        """Served name of the model; "other" if the client asks for a model that is not served."""
        self.revision = ""
        """Revision of the model that answers, as its plan has it."""
        self.is_operator = False
        """True if the key has `admin`, and no page of another site brings it."""
        self.priority: int | None = None
        """Priority of the request in place of that in its body."""
        self.route: DialectRoute | None = None
        """The dialect's route, once the body has chosen it."""
        self.num_texts = 0
        self.num_tokens = 0
        self.num_truncated = 0
        self._counts: list[tuple[bytes, bytes]] = []
        """Headers with the counts of the engine's result."""
        self.error = ""
        self.error_outcome: Outcome | None = None
        """Outcome of the error that was answered."""
        self.closes = False
        """True if the connection ends with the answer."""
        self.stages: dict[Stage, float] = {}
        self.status = 0
        self.left = False
        """True if the client left, or its body broke off, before the answer was complete."""
        self.ended = 0.0
        """Time at which the whole answer was handed to the server (time.perf_counter); 0 before."""
        self._receive = receive
        self._send = send
        self.max_body_bytes = limits.max_body_bytes
        """Limit of the body. A route may change it before it reads."""
        self._memory = memory
        self._announced = int(self.request_headers.get(b"content-length", b"0"))  # the HTTP parser has checked it
        self._body_ended = self._announced == 0 and b"transfer-encoding" not in self.request_headers
        self._body_size = 0
        self._held = 0
        """Bytes of memory that the body, and a large answer, hold."""
        self._passed = False
        """True if they have passed the line of those that wait for memory."""

    def note_result(self, result: Result) -> None:
        """Copy times and counts. A reference to the result would keep its vectors in memory."""
        timings = result.timings
        self.stages |= {"tokenize": timings.tokenize, "queue": timings.queue, "compute": timings.compute}
        self.num_tokens, self.num_truncated = result.num_tokens, result.num_truncated
        self._counts = [(b"x-whimbrel-tokens", b"%d" % self.num_tokens), (b"x-whimbrel-truncated", b"%d" % self.num_truncated)]
        if result.listwise:  # the scores depend on all documents of the request
            self._counts.append((b"x-whimbrel-listwise", b"true"))

    async def receive(self) -> Message:
        """Return the next piece of the body. Raises TooLarge, before reading if the length is announced."""
        if self._announced and not self._body_ended:
            self._check_size(self._announced)
        message = await self._receive()
        if not self._body_ended:
            self._body_size += len(message.get("body", b""))
            self._body_ended = not message.get("more_body", False) or 0 < self._announced <= self._body_size
            self._check_size(self._body_size)
        if message["type"] == "http.disconnect" and not self.ended:
            self.left = True
        return message

    def _check_size(self, size: int) -> None:
        if size > self.max_body_bytes:
            raise TooLarge(f"the body has {size:,} bytes or more; the limit is {self.max_body_bytes:,}. Split the request.")

    async def read_body(self, *, deadline: float = inf, gzipped: bool = False) -> bytes:
        """Return the whole body, decompressed if it is `gzipped`. It is read once there is memory for it.

        Raises MalformedHTTP if it ends early, MalformedBody, DeadlineExceeded, and the errors of `receive`.
        """
        try:
            async with asyncio.timeout(None if deadline == inf else max(0.0, deadline - time.perf_counter())):
                await self._hold_body(gzipped=gzipped)
                body = await self._read_pieces()
                body = await self._decompress(body) if gzipped else body
        except TimeoutError:
            raise DeadlineExceeded("the time that this request had is over, and its body has not been read.") from None
        self._hold(self._body_size)
        return body

    async def _hold_body(self, *, gzipped: bool) -> None:
        """Wait for the memory that a body may take: as much as it announces, else as much as it may have."""
        unknown = gzipped or (not self._announced and not self._body_ended)
        size = self._announced + (self.max_body_bytes if unknown else 0)
        self._check_size(self._announced)
        self._passed = await self._memory.take(size, self.tenant)
        self._held = size

    def _hold(self, size: int) -> None:
        """Hold `size` bytes in place of those held until now."""
        held, self._held = self._held, size
        self._memory.give(held - size, passed=self._passed)

    async def _read_pieces(self) -> bytes:
        pieces: list[bytes] = []
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":  # or its chunks cannot be parsed, and the client waits for an answer
                raise MalformedHTTP("the body ended early.")
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _decompress(self, body: bytes) -> bytes:
        """Return a gzipped body as it was, with pauses for other requests. Raises MalformedBody, and TooLarge as `receive`."""
        stream, pieces, size = zlib.decompressobj(_GZIP), list[bytes](), 0
        for start in range(0, len(body), _GZIP_STEP):
            data, more = body[start : start + _GZIP_STEP], True
            while more and not stream.eof:
                try:
                    pieces.append(piece := stream.decompress(data, _GZIP_PIECE))
                except zlib.error as error:
                    raise MalformedBody(f"the body is not valid gzip: {error}.") from None
                self._body_size += len(piece)
                self._check_size(size := size + len(piece))
                data, more = stream.unconsumed_tail, bool(stream.unconsumed_tail) or len(piece) == _GZIP_PIECE
                await asyncio.sleep(0)
            if stream.eof:
                if stream.unused_data or start + _GZIP_STEP < len(body):
                    raise MalformedBody("there are bytes after the gzipped body.")
                return b"".join(pieces)
        raise MalformedBody("the gzipped body ended early.")

    async def read_small_body(self, path: str) -> bytes:
        """Return the body of a request that is refused unread, where the dialect of the refusal depends on it; otherwise b"".

        Bodies that are large or that wait for "100 Continue" are not read.
        """
        shared = path in ROUTES_BY_PATH and len(ROUTES_BY_PATH[path].routes) > 1
        if not shared or not 0 < self._announced <= SMALL_BODY or b"expect" in self.request_headers:
            return b""
        try:
            return await self.read_body()
        except WhimbrelError:  # it comes too slowly or incomplete
            return b""

    async def send(self, message: Message) -> None:
        """Send a message with the headers of every answer. Raises OSError if the client has left."""
        is_start = message["type"] == "http.response.start"
        if is_start:
            self.status = status = message["status"]
            close = (_CLOSE,) if self.closes or status in _CLOSING_STATUSES else ()
            message = {**message, "headers": [*message["headers"], *self._report(), _NO_SNIFFING, *close]}
        elif self._held <= self._body_size:
            self.hold_answer(len(message.get("body", b"")))
        try:
            await self._send(message)
        except OSError:
            self.left = True
            raise
        if not is_start and not message.get("more_body", False):
            self.ended = time.perf_counter()

    def hold_answer(self, size: int) -> None:
        if size > _LARGE_ANSWER:
            self._hold(self._body_size + size)

    def _report(self) -> list[tuple[bytes, bytes]]:
        """Return headers: the id, milliseconds per stage, and the counts."""
        total = time.perf_counter() - self.started
        timing = _timing(tuple(self.stages)) % tuple([seconds * 1e3 for seconds in (*self.stages.values(), total)])
        revision = ((b"x-whimbrel-revision", self.revision.encode()),) if self.revision else ()
        budgets = () if self.usage is None else self.usage.headers()
        return [(b"x-request-id", self.request_id.encode()), (b"server-timing", timing), *self._counts, *revision, *budgets]

    def end(self, *, lost: bool) -> tuple[int, Outcome]:
        """Release the memory and return status and outcome. `lost` means that the process ends."""
        self._hold(0)
        if self.left:
            return self.status or _CLIENT_LEFT, "client_gone"
        if self.ended:
            return self.status, self.error_outcome or _outcome(self.status)
        if lost:
            return self.status, "lost"
        # An answer that was begun and not ended: after a bug, or because the client took it too slowly.
        return self.status, "error" if self.error else "client_gone"


def _outcome(status: int) -> Outcome:
    by_class: Outcome = "ok" if status < 400 else "invalid" if status < 500 else "error"
    return _OUTCOMES.get(status, by_class)


@lru_cache(maxsize=64)
def _timing(stages: tuple[Stage, ...]) -> bytes:
    """Return the format of the Server-Timing header for these stages and their total."""
    return b", ".join([f"{stage};dur=%.2f".encode() for stage in (*stages, "total")])


def context_of(scope: Scope) -> RequestContext:
    context: RequestContext = scope["state"]["context"]
    return context


async def send_error(error: WhimbrelError, scope: Scope, send: Send, *, body: bytes = b"", allow: str = "") -> None:
    """Answer with an error in the shape of the dialect of the chosen route, else of that which path and `body` belong to."""
    context = context_of(scope)
    context.error = error.code
    context.error_outcome = "rate_limited" if isinstance(error, RateLimited) else _outcome(error.status)
    status, content = render_error(error, scope["path"], body, context.route)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    if isinstance(error, Overloaded | Unavailable):
        headers.append((b"retry-after", b"%d" % max(1, ceil(error.retry_after))))
    if error.retry is not None:
        headers.append((b"x-should-retry", str(error.retry).lower().encode()))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if allow:
        headers.append((b"allow", allow.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


class RequestMiddleware:
    """Outermost ASGI middleware. Requests are counted by the `template` of their path, "other" where it is empty."""

    def __init__(self, app: ASGIApp, template: Callable[[str], str], limits: ServerLimits = DEFAULTS) -> None:
        self._app = app
        self._template = template
        self._limits = limits
        self.memory = RequestMemory(limits.max_inflight_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext(scope, receive, send, self._limits, self.memory)
        scope["state"] = {**scope.get("state", {}), "request_id": context.request_id, "context": context}
        route, received = self._template(scope["path"]) or _OTHER, time.time()
        trace.report(RequestStarted(route))
        lost = True  # unless _run returns: it handles every exception except those that end the process
        try:
            await self._run(scope, context)
            lost = False
        finally:
            status, outcome = context.end(lost=lost)
            if context.usage is not None:
                context.usage.end(give_back=outcome in _GIVEN_BACK)
            traceparent = context.request_headers.get(b"traceparent", b"").decode("latin-1")
            trace.report(
                RequestFinished(
                    request_id=context.request_id,
                    method=scope["method"] if scope["method"] in _METHODS else _OTHER,
                    route=route,
                    path=scope["path"][:_MAX_PATH],
                    client=(scope.get("client") or ("",))[0],
                    status=status,
                    outcome=outcome,
                    error=context.error or ("" if outcome == "ok" else outcome),
                    model=context.model,
                    tenant=context.tenant,
                    num_texts=context.num_texts,
                    num_tokens=context.num_tokens,
                    num_truncated=context.num_truncated,
                    received=received,
                    seconds=(context.ended or time.perf_counter()) - context.started,
                    stages=context.stages,
                    traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
                    is_probe=route in _PROBES,
                    yields=context.priority is not None,
                )
            )

    async def _run(self, scope: Scope, context: RequestContext) -> None:
        try:
            await self._app(scope, context.receive, context.send)
            if not context.status and not context.left:
                raise RuntimeError("nothing was answered")
        except ClientDisconnect:
            context.left = True
        except Exception as error:
            if not context.left:
                await self._answer_bug(error, scope, context)

    async def _answer_bug(self, error: Exception, scope: Scope, context: RequestContext) -> None:
        """Log the traceback. The answer names only the exception's class."""
        extra = {"fields": {"request_id": context.request_id}}
        _log.error("%s %s failed", sanitize(scope["method"]), sanitize(scope["path"]), exc_info=error, extra=extra)
        context.error = WhimbrelError.code
        if not context.status:  # otherwise the server breaks off the answer
            with suppress(OSError):
                answer = WhimbrelError(f"{type(error).__name__} in Whimbrel. This is a bug.")
                await send_error(answer, scope, context.send)
