"""The ASGI app over any AsyncEmbedder. Routes come from the dialects' table; the few others are below.

Knows HTTP and the Embedder protocol; knows nothing of engines, models or tensors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final, TypeAlias

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route as HTTPRoute

from whimbrel import __version__
from whimbrel.dialects import ROUTES, Route, openai
from whimbrel.errors import MethodNotAllowed, ModelNotFound, NotFound, Overloaded, Unavailable, WhimbrelError
from whimbrel.server.guards import guards as guards_of
from whimbrel.server.guards import shown
from whimbrel.server.metrics import Metrics
from whimbrel.server.openapi import docs_page, openapi_document
from whimbrel.server.options import DEFAULTS, GuardOptions
from whimbrel.server.transfer import read_body
from whimbrel.trace import trace
from whimbrel.types import AsyncEmbedder, Result

_log = logging.getLogger("whimbrel")

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

_CLIENT_LEFT: Final = 499


def create_app(embedder: AsyncEmbedder, *, guards: GuardOptions = DEFAULTS) -> Starlette:
    """The app that serves `embedder` to whom `guards` let in."""
    server = _Server(embedder)
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
    app = Starlette(
        routes=[*posts, *(HTTPRoute(path, handler, methods=["GET"]) for path, handler in gets.items())],
        middleware=guards_of(guards),
        exception_handlers={HTTPException: _http_error, WhimbrelError: _whimbrel_error, Exception: _bug},
        lifespan=server.lifespan,
    )
    app.router.redirect_slashes = False
    return app


class _Server:
    """The handlers, and what they share."""

    def __init__(self, embedder: AsyncEmbedder) -> None:
        self._embedder = embedder
        self._name = embedder.plan.served_name
        self._created = int(time.time())
        self._metrics = Metrics(lambda: embedder.queued_tokens)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        yield
        self._metrics.close()

    def answer(self, route: Route) -> Handler:
        """The handler of a dialect's route."""

        async def handle(http: Request) -> Response:
            started = time.perf_counter()
            try:
                response = await self._answer(route, http)
            except WhimbrelError as error:
                response = _error_response(error, route.write_error)
            except ClientDisconnect:
                response = Response(status_code=_CLIENT_LEFT)
            except Exception as error:  # ours, not the caller's: it is logged, answered and counted
                response = await _bug(http, error)
            self._metrics.request(route.path, response.status_code, time.perf_counter() - started)
            return response

        return handle

    async def _answer(self, route: Route, http: Request) -> Response:
        body = await read_body(http)
        with trace("read"):
            sent, request = route.read_request(body)
        if sent.model is not None and sent.model != self._name:
            raise ModelNotFound(f"no model {sent.model!r} here; this server serves {self._name!r}.", param="model")
        result = await self._run_while_connected(http, self._embedder.run(replace(request, owner=http.state.owner)))
        with trace("write"):
            content = route.write_result(sent, result, self._name)
        self._metrics.result(result)
        return Response(content, media_type="application/json", headers=_timing_headers(result))

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
        return _json(openai.write_models([self._model()]))

    async def model(self, http: Request) -> Response:
        asked = http.path_params["model"]
        if asked != self._name:
            raise ModelNotFound(f"no model {asked!r} here; this server serves {self._name!r}.", param="model")
        return _json(msgspec.json.encode(self._model()))

    def _model(self) -> openai.Model:
        return openai.Model(id=self._name, created=self._created, max_model_len=self._embedder.plan.max_length)

    async def live(self, http: Request) -> Response:
        return _json(b'{"status":"ok"}')

    async def ready(self, http: Request) -> Response:
        if not self._embedder.ready:
            raise Unavailable("the engine is not running.")
        return _json(b'{"status":"ok"}')

    async def info(self, http: Request) -> Response:
        parts = {"version": __version__, "card": self._embedder.card, "plan": self._embedder.plan}
        return _json(msgspec.json.encode(parts))

    async def metrics(self, http: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, http: Request) -> Response:
        return _json(msgspec.json.encode(openapi_document()))

    async def docs(self, http: Request) -> Response:
        page = docs_page(openapi_document(), base_url=str(http.base_url).rstrip("/"))
        policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
        return HTMLResponse(page, headers={"content-security-policy": policy})


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _timing_headers(result: Result) -> dict[str, str]:
    """Milliseconds per stage, and what the request amounted to."""
    timings = result.timings
    stages = {"tokenize": timings.tokenize, "queue": timings.queue, "compute": timings.compute, "total": timings.total}
    return {
        "server-timing": ", ".join(f"{stage};dur={seconds * 1e3:.2f}" for stage, seconds in stages.items()),
        "x-whimbrel-tokens": str(result.num_tokens),
        "x-whimbrel-truncated": str(result.num_truncated),
    }


def _error_response(error: WhimbrelError, write: Callable[[WhimbrelError], bytes] = openai.write_error) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if error.retry is not None:
        headers["x-should-retry"] = str(error.retry).lower()
    return Response(write(error), status_code=error.status, media_type="application/json", headers=headers)


async def _whimbrel_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, WhimbrelError)
    return _error_response(error)


async def _http_error(http: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    path = shown(http.scope["path"])
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = _error_response(MethodNotAllowed(f"{path} takes {allowed}, not {shown(http.method)}."))
        response.headers["allow"] = allowed
        return response
    return _error_response(NotFound(f"no route {path}; /docs lists them."))


async def _bug(http: Request, error: Exception) -> Response:
    """Ours, not the caller's: the log has the traceback, the answer only its kind."""
    _log.error("%s %s failed", shown(http.method), shown(http.scope["path"]), exc_info=error)
    response = _error_response(WhimbrelError(f"{type(error).__name__} in Whimbrel. This is a bug."))
    response.headers["x-request-id"] = http.state.request_id
    return response
