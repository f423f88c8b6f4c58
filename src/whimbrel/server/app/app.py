"""The ASGI app over any AsyncEmbedders. Routes come from the dialects' table; the few others are below.

Knows HTTP and the Embedder protocol; knows nothing of engines, models or tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from math import ceil, inf, nan
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse
from starlette.responses import Response as HTTPResponse
from starlette.routing import Route as HTTPRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from whimbrel import __version__
from whimbrel.dialects import GET_ROUTES, JSON, GetRoute, Response, Route, openai, tei
from whimbrel.dialects.common.responses import accepted_media_type
from whimbrel.dialects.common.route import EngineCall, ParseRequest
from whimbrel.errors import InvalidRequest, MethodNotAllowed, NotFound, Overloaded, Unavailable, WhimbrelError
from whimbrel.server.app.guards import guards as guards_of
from whimbrel.server.app.limits import DEFAULTS, ServerLimits
from whimbrel.server.app.openapi import docs_page, openapi_document
from whimbrel.server.app.request_context import context_of
from whimbrel.server.app.request_log import RequestLogMiddleware, sanitize
from whimbrel.server.app.routing import ROUTES_BY_PATH, PathRoutes, render_error
from whimbrel.server.app.served_models import AsyncEmbedder, ModelRegistry
from whimbrel.server.app.transfer import check_type, read_body, read_small_body, send_answer
from whimbrel.server.http.exchange import DISCONNECT_EXTENSION
from whimbrel.telemetry.metrics import Metrics
from whimbrel.telemetry.trace import Timer, gauge
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.result import Result

T = TypeVar("T")

Handler: TypeAlias = Callable[[HTTPRequest], Awaitable[HTTPResponse]]


class App:
    """An ASGI app: middleware around the dialects' routes, which are found at once, and the others, which Starlette finds."""

    def __init__(self, posts: Mapping[str, ASGIApp], routes: list[HTTPRoute], guards: ServerLimits) -> None:
        self.routes = routes
        """All of them."""
        handlers = {HTTPException: _http_error, WhimbrelError: _whimbrel_error}
        self._posts = posts
        self._others = ExceptionMiddleware(Router(routes, redirect_slashes=False), handlers)
        guarded: ASGIApp = self._answer
        for kind, args, kwargs in reversed(guards_of(guards)):
            guarded = kind(guarded, *args, **kwargs)
        self._app = RequestLogMiddleware(guarded, routes, guards)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app if scope["type"] == "http" else self._others  # of what other servers ask besides, Starlette knows
        await app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._posts.get(scope["path"]) if scope["method"] == "POST" else None
        if handler is None:
            await self._others({**scope, "app": self}, receive, send)  # then Starlette raises what it refuses
        else:
            await handler(scope, receive, send)


def create_app(served: ModelRegistry, *, guards: ServerLimits = DEFAULTS) -> App:
    """The app that serves some models to whom `guards` let in."""
    server = _Server(served)
    posts = {path: _PostEndpoint(served, ways) for path, ways in ROUTES_BY_PATH.items()}
    pages = [HTTPRoute(page.path, server.page(page), methods=["GET"]) for page in GET_ROUTES]
    gets: dict[str, Handler] = {
        "/v1/models": server.models,
        "/v1/models/{model:path}": server.model,
        "/health": server.ready,
        "/health/live": server.live,
        "/health/ready": server.ready,
        "/ping": server.ready,
        "/info": server.info,
        "/": server.ready,
        "/metrics": server.metrics,
        "/openapi.json": server.openapi,
        "/docs": server.docs,
    }
    asked = [HTTPRoute(path, handler, methods=["POST"]) for path, handler in posts.items()]
    got = [HTTPRoute(path, handler, methods=["GET"]) for path, handler in gets.items()]
    return App(posts, [*asked, *pages, *got], guards)


class _PostEndpoint:
    """An ASGI app: what is asked for at one path."""

    def __init__(self, served: ModelRegistry, ways: PathRoutes) -> None:
        self._served = served
        self._ways = ways
        self._media_types = ways.media_types

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._served.begin()
        try:
            await self._handle(scope, receive, send)
        finally:
            self._served.end()

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        route: Route | None = None
        try:
            if self._served.draining:
                raise Unavailable("the server is about to stop.", retry_after=5.0)
            context = context_of(scope)
            deadline = _deadline(context.request_headers)
            check_type(context.request_headers, self._media_types)
            route = self._ways.default  # until all of the body is there
            with Timer("receive", into=context.stages):
                body = await read_body(receive)
            route = self._ways.choose(body)
            answer = await self._answer(route, body, scope, receive, deadline)
        except WhimbrelError as error:
            context_of(scope).error = error.code
            route = route or self._ways.choose(await read_small_body(scope, receive))
            context_of(scope).closes = self._served.draining
            await _error_response(error, route.status(error), route.render_error(error))(scope, receive, send)
        else:
            await send_answer(answer, scope, send)

    async def _answer(self, route: Route, body: bytes, scope: Scope, receive: Receive, deadline: float) -> Response:
        context = context_of(scope)
        with Timer("read", into=context.stages):
            sent, asked = _reader(route, context.request_headers)(body)
            context.model = "other"
            embedder = self._served.find(sent.model)
            context.model = embedder.plan.served_name
            request = asked(embedder) if callable(asked) else asked
        result: Any = None
        if request is not None:
            if isinstance(request, Request):
                context.num_texts = len(request.texts)
                request = replace(request, tenant=scope["state"]["tenant"], deadline=deadline)
            result = await _run_while_connected(_run(embedder, request), scope, receive)
        if isinstance(result, Result):
            context.note_result(result)
        with Timer("write", into=context.stages):
            answer = route.render_response(sent, result, embedder)
        return Response([answer], size=len(answer)) if isinstance(answer, bytes) else answer


def _run(embedder: AsyncEmbedder, asked: EngineCall) -> Awaitable[Any]:
    if isinstance(asked, TokenizeRequest):
        return embedder.tokenize(asked)
    if isinstance(asked, DetokenizeRequest):
        return embedder.decode(asked)
    return embedder.run(asked)


async def _run_while_connected(running: Awaitable[T], scope: Scope, receive: Receive) -> T:
    """Await `running`; if the client leaves first, cancel it and raise ClientDisconnect."""
    task, left, done = asyncio.current_task(), False, False
    assert task is not None

    def leave(*_: object) -> None:
        nonlocal left
        if not done and not left:
            left = True
            task.cancel()

    waiting: asyncio.Future[Any] | None = None
    if (when_gone := scope.get("extensions", {}).get(DISCONNECT_EXTENSION)) is not None:
        when_gone(leave)
    else:  # on another server: the body is read, and what comes next is the end of the connection
        waiting = asyncio.ensure_future(receive())
        waiting.add_done_callback(leave)
    try:
        return await running
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        done = True
        if waiting is not None:
            waiting.cancel()


class _Server:
    """The handlers, and what they share."""

    def __init__(self, served: ModelRegistry) -> None:
        self._served = served
        self._created = int(time.time())
        self._metrics = Metrics([embedder.plan.served_name for embedder in served])

    def page(self, page: GetRoute) -> Handler:
        """The handler of what a dialect tells of the models."""

        async def handle(http: HTTPRequest) -> HTTPResponse:
            return _json(page.render_response(list(self._served)))

        return handle

    async def models(self, http: HTTPRequest) -> HTTPResponse:
        return _json(openai.render_models([self._model(embedder) for embedder in self._served]))

    async def model(self, http: HTTPRequest) -> HTTPResponse:
        return _json(msgspec.json.encode(self._model(self._served.find(http.path_params["model"]))))

    def _model(self, embedder: AsyncEmbedder) -> openai.Model:
        plan = embedder.plan
        return openai.Model(id=plan.served_name, created=self._created, max_model_len=plan.max_length)

    async def live(self, http: HTTPRequest) -> HTTPResponse:
        return _json(b'{"status":"ok"}')

    async def ready(self, http: HTTPRequest) -> HTTPResponse:
        if not self._served.ready:
            raise Unavailable(f"{self._served.status}.")
        return _json(b'{"status":"ok"}')

    async def info(self, http: HTTPRequest) -> HTTPResponse:
        """Describe one model, with the fields that TEI has there."""
        models = [{"card": embedder.card, "plan": embedder.plan, "status": embedder.status} for embedder in self._served]
        more = tei.describe(*self._served) if len(models) == 1 else {}
        return _json(msgspec.json.encode({"version": __version__, "models": models} | more))

    async def metrics(self, http: HTTPRequest) -> HTTPResponse:
        if not self._metrics.shared:  # the engines are in this process, and nobody else tells how they are
            for embedder in self._served:
                gauge("queue_tokens", embedder.queued_tokens, model=embedder.plan.served_name)
                gauge("engines_up", embedder.ready, model=embedder.plan.served_name)
        content, content_type = self._metrics.render(http.headers.get("accept", ""))
        return HTTPResponse(content, headers={"content-type": content_type})

    async def openapi(self, http: HTTPRequest) -> HTTPResponse:
        return _json(msgspec.json.encode(openapi_document()))

    async def docs(self, http: HTTPRequest) -> HTTPResponse:
        page = docs_page(openapi_document(), base_url=str(http.base_url).rstrip("/"))
        policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
        return HTMLResponse(page, headers={"content-security-policy": policy})


def _json(content: bytes) -> HTTPResponse:
    return HTTPResponse(content, media_type="application/json")


def _deadline(headers: Mapping[bytes, bytes]) -> float:
    """Return the deadline that X-Request-Timeout, in seconds from now, sets."""
    if b"x-request-timeout" not in headers:
        return inf
    given = headers[b"x-request-timeout"].decode("latin-1")
    try:
        seconds = nan if "_" in given else float(given)
    except ValueError:
        seconds = nan
    if not seconds >= 0:
        raise InvalidRequest(f"is {given[:40]!r}; it takes seconds, e.g. 2.5.", param="X-Request-Timeout")
    return time.perf_counter() + seconds


def _reader(route: Route, headers: Mapping[bytes, bytes]) -> ParseRequest:
    """Return the parser of the body, by the media type that the client accepts."""
    given = headers.get(b"accept", b"*/*")
    if given == b"*/*" or not route.accepts:
        return route.parse_request
    kind = accepted_media_type(given.decode("latin-1"), list(route.accepts))
    return route.accepts.get(kind, route.parse_request)


def _error_response(error: WhimbrelError, status: int, content: bytes) -> HTTPResponse:
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["retry-after"] = str(max(1, ceil(error.retry_after)))
    if error.retry is not None:
        headers["x-should-retry"] = str(error.retry).lower()
    return HTTPResponse(content, status_code=status, media_type=JSON, headers=headers)


async def _whimbrel_error(http: HTTPRequest, error: Exception) -> HTTPResponse:
    assert isinstance(error, WhimbrelError)
    context_of(http.scope).error = error.code
    return _error_response(error, *render_error(error, http.scope["path"]))


async def _http_error(http: HTTPRequest, error: Exception) -> HTTPResponse:
    """Starlette's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    path = sanitize(http.scope["path"])
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = await _whimbrel_error(http, MethodNotAllowed(f"{path} takes {allowed}, not {sanitize(http.method)}."))
        response.headers["allow"] = allowed
        return response
    return await _whimbrel_error(http, NotFound(f"no route {path}; /docs lists them."))
