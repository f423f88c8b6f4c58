"""The ASGI app over any AsyncEmbedders: POST routes of the dialects, and GET routes for models, health and metrics.

Routes are looked up in dicts. The app knows no engines and no tensors.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, nan
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import RedirectResponse
from starlette.responses import Response as HTTPResponse
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from whimbrel import __version__
from whimbrel.dialects import GET_ROUTES, JSON, GetRoute, Response, Route, openai, tei
from whimbrel.dialects.common.operations import Pull
from whimbrel.dialects.common.responses import accepted_media_type, adapter_in, served_names
from whimbrel.dialects.common.route import Parse
from whimbrel.errors import InvalidRequest, MethodNotAllowed, Unavailable, UnsupportedMediaType, WhimbrelError
from whimbrel.server.app.admin import ADMIN_METHODS, AdminCommand, admin_template, check_body, run_admin
from whimbrel.server.app.batch_routes import BATCH_METHODS, OPENED_BY, BatchRoutes, batch_template
from whimbrel.server.app.guards import GuardMiddleware, no_route
from whimbrel.server.app.limits import DEFAULTS, ServerLimits
from whimbrel.server.app.openapi import ServerLoad, docs_file, openapi_json
from whimbrel.server.app.operations import answer_pull, keep_body
from whimbrel.server.app.own_requests import OwnRequests
from whimbrel.server.app.proxies import ProxyRules
from whimbrel.server.app.request_context import RequestMiddleware, context_of, sanitize, send_error
from whimbrel.server.app.routing import (
    DEPLOYMENT,
    ROUTES_BY_PATH,
    AsyncEmbedder,
    ModelRegistry,
    PathRoutes,
    canonical,
    check_version,
)
from whimbrel.server.budgets import Budgets
from whimbrel.server.http.exchange import DISCONNECT_EXTENSION
from whimbrel.server.pages.files import ASSET_PATHS, HTML, PLAYGROUND, PageFile, page_files
from whimbrel.telemetry.metrics import Metrics
from whimbrel.telemetry.prometheus_text import content_type
from whimbrel.telemetry.trace import Timer, gauge
from whimbrel.types.machine_limits import usable_memory
from whimbrel.types.request import Request, TokenizeRequest
from whimbrel.types.scheduling import Scheduling

_UNKNOWN_PATIENCE: Final = b"60"
"""Seconds that a client is thought to have waited in a try, if it does not say."""
_MOST_WAITED: Final = 3600.0
_OF_BROWSERS: Final = (b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest")
"""Headers of requests that pages make."""
_OK: Final = b'{"status":"ok"}'
_MODEL: Final = "/v1/models/{model}"


class App:
    """An ASGI app: the request log around the guards around the routes."""

    def __init__(
        self, served: ModelRegistry, limits: ServerLimits, budgets: Budgets | None, command: AdminCommand | None
    ) -> None:
        self._served = served
        pages = _Pages(served, limits)
        self._pages = pages.by_path
        self._command = command
        self._tasks: set[asyncio.Future[tuple[int, bytes]]] = set()
        self.methods: dict[str, tuple[str, ...]] = dict.fromkeys(self._pages, ("GET", "HEAD"))
        """Methods that each path takes, in order."""
        self.methods |= {path: (*self.methods.get(path, ()), "POST") for path in ROUTES_BY_PATH}
        if command is not None:  # the guards keep all but operators away
            self.methods |= ADMIN_METHODS
        guards = GuardMiddleware(self._route, limits, template=self.template, budgets=budgets, free=OPENED_BY)
        self._renewals = guards.renew, pages.renew
        self._app = RequestMiddleware(guards, self.template, limits)
        self.refuse_line = self._app.memory.refuse_line
        """Function that answers the requests that wait for memory, unread, with an error."""
        self._proxies = ProxyRules(limits)
        own = OwnRequests(guards, self._route, self.template, limits)
        self.ask = own.ask
        """Function that sends a body to a route of this app, for the lines of batch files."""
        self.batches = BatchRoutes(limits, own, served) if limits.batch_dir else None
        """Routes of files and batches, which are to be started; None where the server has no folder for them."""
        self.methods |= {} if self.batches is None else BATCH_METHODS

    def renew_limits(self, limits: ServerLimits) -> None:
        """Take other keys, hosts and limits of heads from now on. All else stays as it was at the start."""
        for renew in self._renewals:
            renew(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._app(canonical(self._proxies.apply(scope)), receive, send)
        else:
            await Router()(scope, receive, send)  # which answers the lifespan messages of other servers

    def template(self, path: str) -> str:
        """Return the template of the route that a path belongs to, a key of `methods`; empty if there is none."""
        if path in self.methods:
            return path
        if path.startswith("/v1/models/"):
            return _MODEL
        of_batches = batch_template(path) if self.batches is not None else ""
        return of_batches or (admin_template(path) if self._command is not None else "")

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if method == "POST" and path in ROUTES_BY_PATH:
            self._served.begin()
            try:
                await self._post(ROUTES_BY_PATH[path], scope, send)
            finally:
                self._served.end()
            return
        template, allow = self.template(path), ""
        try:
            if not template:
                raise no_route(path)
            if method not in self.methods[template]:
                allow = ", ".join(self.methods[template])
                raise MethodNotAllowed(f"{sanitize(path)} takes {allow}, not {sanitize(method)}.")
            if self.batches is not None and template in BATCH_METHODS:
                self._served.begin()
                try:
                    await self.batches.answer(template, scope, send)
                finally:
                    self._served.end()
                return
            if template in ADMIN_METHODS:
                self._served.begin()
                try:
                    response = await self._run_admin(scope)
                finally:
                    self._served.end()
            else:
                response = await self._pages[template](HTTPRequest(scope))
        except WhimbrelError as error:
            await send_error(error, scope, send, allow=allow)
        else:
            await response(scope, receive, send)

    async def _run_admin(self, scope: Scope) -> HTTPResponse:
        assert self._command is not None
        context, headers, body = context_of(scope), context_of(scope).request_headers, b""
        deadline = _deadline(headers)
        if scope["method"] == "POST":
            gzipped = _check_type(headers, (JSON,))
            check_body(int(headers.get(b"content-length", b"0")))
            body = await context.read_body(deadline=deadline, gzipped=gzipped)
            check_body(len(body))
        status, answer = await run_admin(self._command, scope["method"], scope["path"], body, _seconds_until(deadline))
        return HTTPResponse(answer, status_code=status, media_type=JSON)

    async def _post(self, routes: PathRoutes, scope: Scope, send: Send) -> None:
        context, body = context_of(scope), None
        try:
            if self._served.draining:
                raise Unavailable("the server is about to stop.", retry_after=5.0)
            deadline = _deadline(context.request_headers)
            gzipped = _check_type(context.request_headers, routes.media_types)
            body = b""  # until all of it is there
            with Timer("receive", into=context.stages):
                body = await context.read_body(deadline=deadline, gzipped=gzipped)
            context.route = routes.choose(body, context.request_headers)
            response = await self._respond(context.route, body, deadline, scope)
        except WhimbrelError as error:
            if body is None:
                body = await context.read_small_body(scope["path"])
            context.closes = self._served.draining
            await send_error(error, scope, send, body=body)
        else:
            if isinstance(response, Response):
                await send_response(response, scope, send)
                return
            assert self._command is not None
            answering = answer_pull(self._command, response, context, send, seconds=_seconds_until(deadline))
            await _run_while_connected(answering, scope, context.receive)

    async def _respond(self, route: Route, body: bytes, deadline: float, scope: Scope) -> Response | Pull:
        """Return the answer, or the download that is the answer to an operator."""
        context, operation = context_of(scope), None
        with Timer("read", into=context.stages):
            parsed = _parser(route, context.request_headers)(body)
            context.model = "other"
            if context.is_operator and self._command is not None:
                operation = route.operate(parsed.body)
            name = scope.get(DEPLOYMENT, parsed.body.model)
            if isinstance(operation, Pull):
                return operation
            embedder = self._served.find(name, route, parsed, key=context.key)
            check_version(scope, embedder)
            context.model, context.revision = embedder.plan.served_name, embedder.plan.revision
            request = parsed.request(embedder)
        result: Any = None
        if isinstance(request, Request):
            context.num_texts = len(request.texts)
            request = _with_named_adapter(request, name, embedder)
            stated: int | None = getattr(parsed.body, "priority", None)  # of the dialects that have it
            priority = (stated or 0) if context.priority is None else context.priority
            scheduling = Scheduling(priority, deadline, context.tenant, _seconds_waited(context.request_headers))
            charging: Any = {} if context.usage is None else {"charge": context.usage.charge}
            running = embedder.run(request, scheduling, **charging)
            result = await _run_while_connected(running, scope, context.receive)
            context.note_result(result)
        elif isinstance(request, TokenizeRequest):
            result = await _run_while_connected(embedder.tokenize(request), scope, context.receive)
        elif request is not None:
            result = await _run_while_connected(embedder.decode(request), scope, context.receive)
        if operation is not None:
            self._tell(keep_body(embedder.plan.served_name, operation))
        with Timer("write", into=context.stages):
            answer = route.render_response(parsed.body, result, embedder)
        return Response([answer], size=len(answer)) if isinstance(answer, bytes) else answer

    def _tell(self, body: bytes) -> None:
        """Have a model kept as an operator says, without waiting for it."""
        assert self._command is not None
        task = asyncio.ensure_future(self._command("keep", body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _with_named_adapter(request: Request, name: str | None, embedder: AsyncEmbedder) -> Request:
    """Return the request with the adapter that its model's name chooses. Raises InvalidRequest if it asks for another."""
    named = adapter_in(name, embedder.plan) if name and embedder.plan.adapters else None
    if named is None or named == request.adapter:
        return request
    if request.adapter is not None:
        raise InvalidRequest(f"is {request.adapter!r}, and model names {named!r}; give one of them.", param="adapter")
    return replace(request, adapter=named)


def create_app(
    served: ModelRegistry,
    *,
    guards: ServerLimits = DEFAULTS,
    budgets: Budgets | None = None,
    command: AdminCommand | None = None,
) -> App:
    """Return the app that serves the models of a registry within the limits `guards`.

    `budgets` are those of its keys over all processes; by default this process counts alone. `command` carries out an
    operator's commands; without it there are no admin routes.
    """
    return App(served, guards, budgets or Budgets.of_one_process(guards.keys), command)


def _deadline(headers: Mapping[bytes, bytes]) -> float:
    """Return the deadline that X-Request-Timeout, in seconds from now, sets."""
    if b"x-request-timeout" not in headers:
        return inf
    text = headers[b"x-request-timeout"].decode("latin-1")
    try:
        seconds = nan if "_" in text else float(text)
    except ValueError:
        seconds = nan
    if not seconds >= 0:
        raise InvalidRequest(f"is {text[:40]!r}; it takes seconds, e.g. 2.5.", param="X-Request-Timeout")
    return time.perf_counter() + seconds


def _seconds_until(deadline: float) -> float | None:
    return None if deadline == inf else max(0.0, deadline - time.perf_counter())


def _seconds_waited(headers: Mapping[bytes, bytes]) -> float:
    """Return the seconds that the caller has waited in earlier tries, as far as OpenAI's clients and ours say it."""
    try:
        tries = int(headers.get(b"x-stainless-retry-count", b"0"))
        patience = float(headers.get(b"x-stainless-read-timeout", _UNKNOWN_PATIENCE))
    except ValueError:
        return 0.0
    return min(min(tries, _MOST_WAITED) * patience, _MOST_WAITED) if tries > 0 and patience > 0 else 0.0


def _check_type(headers: Mapping[bytes, bytes], media_types: Sequence[str]) -> bool:
    """Return whether the body is gzipped. Raises UnsupportedMediaType for a type or a coding that the route does not take.

    A body of no type, or of an empty one, is JSON, unless a browser sent it: pages may post bodies of no type to any site, but
    no JSON.
    """
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    typed = kind != "" or any(name in headers for name in _OF_BROWSERS)
    if media_types and kind not in media_types and (typed or JSON not in media_types):
        raise UnsupportedMediaType(f"Content-Type is {kind[:100] or 'missing'}; send {' or '.join(media_types)}.")
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding not in (b"identity", b"gzip", b"x-gzip"):
        name = sanitize(coding.decode("latin-1"))
        raise UnsupportedMediaType(f"Content-Encoding is {name or 'empty'}; send gzip, or the body as it is.")
    return coding != b"identity"


def _parser(route: Route, headers: Mapping[bytes, bytes]) -> Parse:
    """Return the parser of the body, by its headers or by the media type that the client accepts."""
    if route.parse_by is not None:
        return route.parse_by(headers)
    accept = headers.get(b"accept", b"*/*")
    if accept == b"*/*" or not route.accepts:
        return route.parse
    kind = accepted_media_type(accept.decode("latin-1"), list(route.accepts))
    return route.accepts.get(kind, route.parse)


async def _run_while_connected(running: Awaitable[Any], scope: Scope, receive: Receive) -> Any:
    """Await `running`. If the client leaves first, cancel it and raise ClientDisconnect."""
    task, left, done = asyncio.current_task(), False, False
    assert task is not None

    def leave(*_: object) -> None:
        nonlocal left
        if not done and not left:
            left = True
            task.cancel()

    waiting: asyncio.Future[Any] | None = None
    if (on_disconnect := scope.get("extensions", {}).get(DISCONNECT_EXTENSION)) is not None:
        on_disconnect(leave)
    else:  # another server: after the body, its next message is the end of the connection
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


async def send_response(response: Response, scope: Scope, send: Send) -> None:
    """Send a response. Each chunk is made when the one before is handed over and other tasks have run."""
    headers = [(b"content-type", response.media_type.encode())]
    headers += [(name.lower().encode(), text.encode()) for name, text in response.headers.items()]
    if response.size is not None:
        headers.append((b"content-length", b"%d" % response.size))
    context_of(scope).hold_answer(response.memory_bytes if response.size is None else response.size)
    chunks = iter(response.chunks)
    chunk = next(chunks, b"")  # an error in the first chunk still gets an answer of its own
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for following in chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await asyncio.sleep(0)
        chunk = following
    await send({"type": "http.response.body", "body": chunk})


class _Pages:
    """Answers to GET: health, models, metrics and documentation."""

    def __init__(self, served: ModelRegistry, limits: ServerLimits) -> None:
        self._served = served
        self._playground = limits.playground
        self._created = int(time.time())
        self._metrics = Metrics([embedder.plan.served_name for embedder in served])
        self.renew(limits)
        self._renderings: dict[str, asyncio.Future[tuple[bytes, str]]] = {}
        """Pages of metrics that a thread is rendering, by content type."""
        batches = bool(limits.batch_dir)
        openapi_json(batches=batches)  # made here, not while requests wait
        as_json: dict[str, Callable[[HTTPRequest], bytes]] = {
            **{page.path: partial(self._page, page) for page in GET_ROUTES},
            "/v1/models": self._list_models,
            _MODEL: self._show_model,
            "/health": self._check_ready,
            "/health/live": lambda _: _OK,
            "/health/ready": self._check_ready,
            "/ping": self._check_ready,
            "/info": self._info,
            "/openapi.json": lambda http: openapi_json(http.scope.get("root_path", ""), batches=batches),
        }
        self.by_path: dict[str, Callable[[HTTPRequest], Awaitable[HTTPResponse]]] = {
            **{path: partial(_send_json, render) for path, render in as_json.items()},
            **{path: partial(_send_page, page_files()[name]) for path, name in ASSET_PATHS.items()},
            "/": self._root,
            "/load": self._load,
            "/metrics": self._render_metrics,
            "/docs": self._docs,
        }

    def renew(self, limits: ServerLimits) -> None:
        """Take other keys from now on."""
        self._docs_file = partial(docs_file, needs_key=limits.needs_key, playground=self._playground)
        self._metrics.name_keys([key.name for key in limits.all_keys])

    def _page(self, page: GetRoute, http: HTTPRequest) -> bytes:
        if "{model}" not in page.path:
            models, ready, status = self._models_of(http), self._served.ready, self._served.status
        else:
            embedder = self._served.find(http.scope.get(DEPLOYMENT), key=context_of(http.scope).key)
            check_version(http.scope, embedder)
            models, ready, status = [embedder], embedder.ready, embedder.status
        if page.if_ready and not ready:
            raise Unavailable(f"{status}.")
        return page.render_response(models)

    def _models_of(self, http: HTTPRequest) -> list[AsyncEmbedder]:
        """Return the models that the key of a request may use."""
        return self._served.of_key(context_of(http.scope).key)

    def _list_models(self, http: HTTPRequest) -> bytes:
        named = [(name, embedder) for embedder in self._models_of(http) for name in served_names(embedder.plan)]
        return openai.render_models([openai.describe_model(*each, self._created) for each in named])

    def _show_model(self, http: HTTPRequest) -> bytes:
        name = http.scope["path"].removeprefix("/v1/models/")
        return msgspec.json.encode(
            openai.describe_model(name, self._served.find(name, key=context_of(http.scope).key), self._created)
        )

    def _check_ready(self, http: HTTPRequest) -> bytes:
        if not self._served.ready:
            raise Unavailable(f"{self._served.status}.")
        return _OK

    def _info(self, http: HTTPRequest) -> bytes:
        served = self._models_of(http)
        models = [{"card": embedder.card, "plan": embedder.plan, "status": embedder.status} for embedder in served]
        of_tei = tei.describe(served) if models else {}
        return msgspec.json.encode({"version": __version__, "models": models} | of_tei)

    async def _root(self, http: HTTPRequest) -> HTTPResponse:
        if self._playground and accepted_media_type(http.headers.get("accept", ""), [HTML]) == HTML:
            prefix = http.scope.get("root_path", "")
            if prefix and http.scope.get("raw_path") == prefix.encode():  # from there, the page's relative URLs lead elsewhere
                return RedirectResponse(f"{prefix}/")
            return await _send_page(page_files()[PLAYGROUND], http)
        return await _send_json(self._check_ready, http)

    async def _load(self, http: HTTPRequest) -> HTTPResponse:
        count = await asyncio.to_thread(self._metrics.num_in_flight, ROUTES_BY_PATH)
        return HTTPResponse(msgspec.json.encode(ServerLoad(count)), media_type=JSON)

    async def _render_metrics(self, http: HTTPRequest) -> HTTPResponse:
        if not self._metrics.shared:  # the engines run in this process, and nothing else reports their gauges
            for embedder in self._served:
                gauge("queue_tokens", embedder.queued_tokens, model=embedder.plan.served_name)
                gauge("engines_up", embedder.ready, model=embedder.plan.served_name)
                gauge("max_batch_tokens", embedder.plan.max_batch_tokens, model=embedder.plan.served_name)
            gauge("memory_limit_bytes", usable_memory())
        accept = http.headers.get("accept", "")
        kind = content_type(accept)
        rendering = self._renderings.get(kind)
        if rendering is None:  # requests that come meanwhile get the same page
            rendering = asyncio.ensure_future(asyncio.to_thread(self._metrics.render, accept))
            self._renderings[kind] = rendering
            rendering.add_done_callback(lambda _: self._renderings.pop(kind))
        content, _ = await asyncio.shield(rendering)
        return HTTPResponse(content, headers={"content-type": kind})

    async def _docs(self, http: HTTPRequest) -> HTTPResponse:
        if http.scope.get("raw_path", b"").endswith(b"/"):  # relative URLs would lead below /docs
            return HTTPResponse(status_code=308, headers={"location": "../docs"})
        file = await asyncio.to_thread(self._docs_file, str(http.base_url).rstrip("/"))  # the first one takes a while
        return await _send_page(file, http)


async def _send_json(render: Callable[[HTTPRequest], bytes], http: HTTPRequest) -> HTTPResponse:
    return HTTPResponse(render(http), media_type=JSON)


async def _send_page(file: PageFile, http: HTTPRequest) -> HTTPResponse:
    """Return a page, or status 304 where the browser has it."""
    headers = file.headers | {"vary": "accept"}
    known = ",".join(http.headers.getlist("if-none-match"))
    if file.headers["etag"] in known or known.strip() == "*":
        return HTTPResponse(status_code=304, headers=headers)
    return HTTPResponse(file.content, headers=headers)
