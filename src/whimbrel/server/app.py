"""The ASGI app over any AsyncEmbedders. Routes come from the dialects' table; the few others are below.

Knows HTTP and the Embedder protocol; knows nothing of engines, models or tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from math import ceil, inf, nan
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route as HTTPRoute

from whimbrel import __version__
from whimbrel.dialects import JSON, PAGES, Answer, Page, Route, openai, tei
from whimbrel.dialects.formats import accepted
from whimbrel.dialects.route import Asked, Read
from whimbrel.errors import InvalidRequest, MethodNotAllowed, NotFound, Overloaded, Unavailable, WhimbrelError
from whimbrel.metrics import Metrics
from whimbrel.server.guards import guards as guards_of
from whimbrel.server.ledger import CLIENT_LEFT, Ledger, Notes, notes_of, shown
from whimbrel.server.openapi import docs_page, openapi_document
from whimbrel.server.options import DEFAULTS, GuardOptions
from whimbrel.server.served import InFlight, Served
from whimbrel.server.transfer import AnswerResponse, read_body
from whimbrel.server.ways import WAYS, Ways, render_error
from whimbrel.trace import level, trace
from whimbrel.types import AsyncEmbedder, Decode, Result, Tokenize

T = TypeVar("T")

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def create_app(served: Served, *, guards: GuardOptions = DEFAULTS) -> Starlette:
    """The app that serves some models to whom `guards` let in."""
    server = _Server(served)
    posts = [HTTPRoute(path, server.answer(ways), methods=["POST"]) for path, ways in WAYS.items()]
    pages = [HTTPRoute(page.path, server.page(page), methods=["GET"]) for page in PAGES]
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
    routes = [*posts, *pages, *(HTTPRoute(path, handler, methods=["GET"]) for path, handler in gets.items())]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Ledger, routes=routes), Middleware(InFlight, served=served), *guards_of(guards)],
        exception_handlers={HTTPException: _http_error, WhimbrelError: _whimbrel_error},
        lifespan=server.lifespan,
    )
    app.router.redirect_slashes = False
    return app


class _Server:
    """The handlers, and what they share."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._created = int(time.time())
        self._metrics = Metrics([embedder.plan.served_name for embedder in served])

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        yield
        self._metrics.close()

    def answer(self, ways: Ways) -> Handler:
        """The handler of a path."""

        async def handle(http: Request) -> Response:
            route = ways.default
            try:
                self._check_open()
                deadline = _deadline(http)
                with trace("receive", into=notes_of(http.scope).stages):
                    body = await read_body(http, ways.media_types)
                route = ways.choose(body)
                return await self._answer(route, body, http, deadline)
            except WhimbrelError as error:
                notes_of(http.scope).error = error.code
                response = _error_response(error, route.status(error), route.write_error(error))
                if self._served.draining:
                    response.headers["connection"] = "close"
                return response
            except ClientDisconnect:
                return Response(status_code=CLIENT_LEFT)

        return handle

    def page(self, page: Page) -> Handler:
        """The handler of what a dialect tells of the models."""

        async def handle(http: Request) -> Response:
            return _json(page.write(list(self._served)))

        return handle

    def _check_open(self) -> None:
        if self._served.draining:
            raise Unavailable("the server is about to stop.", retry_after=5.0)

    async def _answer(self, route: Route, body: bytes, http: Request, deadline: float) -> Response:
        notes = notes_of(http.scope)
        with trace("read", into=notes.stages):
            sent, asked = _reader(route, http)(body)
            embedder = self._find(sent.model, notes)
            request = asked(embedder) if callable(asked) else asked
        result: Any = None
        if request is not None:
            result = await self._run_while_connected(http, self._run(embedder, request, http, deadline))
        if isinstance(result, Result):
            notes.note_result(result)
        with trace("write", into=notes.stages):
            answer = route.write_result(sent, result, embedder)
        return _response(answer)

    def _run(self, embedder: AsyncEmbedder, asked: Asked, http: Request, deadline: float) -> Awaitable[Any]:
        if isinstance(asked, Tokenize):
            return embedder.tokenize(asked)
        if isinstance(asked, Decode):
            return embedder.decode(asked)
        notes_of(http.scope).num_texts = len(asked.texts)
        return embedder.run(replace(asked, deadline=deadline, owner=http.state.owner))

    def _find(self, name: str | None, notes: Notes) -> AsyncEmbedder:
        notes.model = "other"
        embedder = self._served.find(name)
        notes.model = embedder.plan.served_name
        return embedder

    async def _run_while_connected(self, http: Request, running: Awaitable[T]) -> T:
        """Await `running`; if the client leaves first, cancel it and raise ClientDisconnect."""
        work = asyncio.ensure_future(running)
        left = asyncio.ensure_future(http.receive())  # the body is read: what comes next is the end of the connection
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            return work.result()
        finally:
            work.cancel()
            left.cancel()

    async def models(self, http: Request) -> Response:
        return _json(openai.write_models([self._model(embedder) for embedder in self._served]))

    async def model(self, http: Request) -> Response:
        return _json(msgspec.json.encode(self._model(self._served.find(http.path_params["model"]))))

    def _model(self, embedder: AsyncEmbedder) -> openai.Model:
        plan = embedder.plan
        return openai.Model(id=plan.served_name, created=self._created, max_model_len=plan.max_length)

    async def live(self, http: Request) -> Response:
        return _json(b'{"status":"ok"}')

    async def ready(self, http: Request) -> Response:
        if not self._served.ready:
            raise Unavailable(f"{self._served.status}.")
        return _json(b'{"status":"ok"}')

    async def info(self, http: Request) -> Response:
        """Of one model, with the fields that TEI has there."""
        models = [{"card": embedder.card, "plan": embedder.plan, "status": embedder.status} for embedder in self._served]
        more = tei.describe(*self._served) if len(models) == 1 else {}
        return _json(msgspec.json.encode({"version": __version__, "models": models} | more))

    async def metrics(self, http: Request) -> Response:
        if not self._metrics.shared:  # the engines are in this process, and nobody else tells how they are
            for embedder in self._served:
                level("queue_tokens", embedder.queued_tokens, model=embedder.plan.served_name)
                level("engines_up", embedder.ready, model=embedder.plan.served_name)
        content, content_type = self._metrics.render(http.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    async def openapi(self, http: Request) -> Response:
        return _json(msgspec.json.encode(openapi_document()))

    async def docs(self, http: Request) -> Response:
        page = docs_page(openapi_document(), base_url=str(http.base_url).rstrip("/"))
        policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
        return HTMLResponse(page, headers={"content-security-policy": policy})


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _deadline(http: Request) -> float:
    """When X-Request-Timeout, in seconds from now, is over."""
    given = http.headers.get("x-request-timeout")
    if given is None:
        return inf
    try:
        seconds = nan if "_" in given else float(given)
    except ValueError:
        seconds = nan
    if not seconds >= 0:
        raise InvalidRequest(f"is {given[:40]!r}; it takes seconds, e.g. 2.5.", param="X-Request-Timeout")
    return time.perf_counter() + seconds


def _reader(route: Route, http: Request) -> Read:
    """How the body is read, by what the client accepts."""
    kind = accepted(http.headers.get("accept", ""), list(route.accepts)) if route.accepts else JSON
    return route.accepts.get(kind, route.read_request)


def _response(answer: bytes | Answer) -> Response:
    return _json(answer) if isinstance(answer, bytes) else AnswerResponse(answer)


def _error_response(error: WhimbrelError, status: int, content: bytes) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["retry-after"] = str(max(1, ceil(error.retry_after)))
    if error.retry is not None:
        headers["x-should-retry"] = str(error.retry).lower()
    return Response(content, status_code=status, media_type=JSON, headers=headers)


async def _whimbrel_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, WhimbrelError)
    notes_of(http.scope).error = error.code
    return _error_response(error, *render_error(http.scope["path"], error))


async def _http_error(http: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    path = shown(http.scope["path"])
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = await _whimbrel_error(http, MethodNotAllowed(f"{path} takes {allowed}, not {shown(http.method)}."))
        response.headers["allow"] = allowed
        return response
    return await _whimbrel_error(http, NotFound(f"no route {path}; /docs lists them."))
