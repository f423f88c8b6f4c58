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
from typing import TypeAlias

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route as HTTPRoute

from whimbrel import __version__
from whimbrel.dialects import ROUTES, Route, openai
from whimbrel.errors import InvalidRequest, MethodNotAllowed, NotFound, Overloaded, Unavailable, WhimbrelError
from whimbrel.metrics import Metrics
from whimbrel.server.guards import guards as guards_of
from whimbrel.server.ledger import CLIENT_LEFT, Ledger, Notes, notes_of, shown
from whimbrel.server.openapi import docs_page, openapi_document
from whimbrel.server.options import DEFAULTS, GuardOptions
from whimbrel.server.served import InFlight, Served
from whimbrel.server.transfer import read_body
from whimbrel.trace import level, trace
from whimbrel.types import AsyncEmbedder, Result

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def create_app(served: Served, *, guards: GuardOptions = DEFAULTS) -> Starlette:
    """The app that serves some models to whom `guards` let in."""
    server = _Server(served)
    posts = [HTTPRoute(route.path, server.answer(route), methods=["POST"]) for route in ROUTES]
    gets: dict[str, Handler] = {
        "/v1/models": server.models,
        "/v1/models/{model:path}": server.model,
        "/health": server.ready,
        "/health/live": server.live,
        "/health/ready": server.ready,
        "/info": server.info,
        "/metrics": server.metrics,
        "/openapi.json": server.openapi,
        "/docs": server.docs,
    }
    routes = [*posts, *(HTTPRoute(path, handler, methods=["GET"]) for path, handler in gets.items())]
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

    def answer(self, route: Route) -> Handler:
        """The handler of a dialect's route."""

        async def handle(http: Request) -> Response:
            try:
                return await self._answer(route, http)
            except WhimbrelError as error:
                notes_of(http.scope).error = error.code
                response = _error_response(error, route.write_error)
                if self._served.draining:
                    response.headers["connection"] = "close"
                return response
            except ClientDisconnect:
                return Response(status_code=CLIENT_LEFT)

        return handle

    async def _answer(self, route: Route, http: Request) -> Response:
        if self._served.draining:
            raise Unavailable("the server is about to stop.", retry_after=5.0)
        notes = notes_of(http.scope)
        deadline = _deadline(http)
        with trace("receive", into=notes.stages):
            body = await read_body(http, route.media_types)
        with trace("read", into=notes.stages):
            sent, request = route.read_request(body)
        notes.num_texts = len(request.texts)
        embedder = self._find(sent.model, notes)
        result = await self._run_while_connected(
            http, embedder.run(replace(request, deadline=deadline, owner=http.state.owner))
        )
        notes.note_result(result)
        with trace("write", into=notes.stages):
            content = route.write_result(sent, result, embedder.plan.served_name)
        return Response(content, media_type="application/json")

    def _find(self, name: str | None, notes: Notes) -> AsyncEmbedder:
        notes.model = "other"
        embedder = self._served.find(name)
        notes.model = embedder.plan.served_name
        return embedder

    async def _run_while_connected(self, http: Request, running: Awaitable[Result]) -> Result:
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
        models = [{"card": embedder.card, "plan": embedder.plan, "status": embedder.status} for embedder in self._served]
        return _json(msgspec.json.encode({"version": __version__, "models": models}))

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


def _error_response(error: WhimbrelError, write: Callable[[WhimbrelError], bytes] = openai.write_error) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["retry-after"] = str(max(1, ceil(error.retry_after)))
    if error.retry is not None:
        headers["x-should-retry"] = str(error.retry).lower()
    return Response(write(error), status_code=error.status, media_type="application/json", headers=headers)


async def _whimbrel_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, WhimbrelError)
    notes_of(http.scope).error = error.code
    return _error_response(error)


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
