"""Outermost middleware: request ids, bugs and the request log.

It emits one RequestStarted and exactly one RequestFinished event per request, on every code path. It gives each request its id
and answers bugs with status 500. Handlers and other middleware leave what they learn in the request's `RequestContext`.
It knows ASGI, and nothing of models or metrics.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from whimbrel.errors import WhimbrelError
from whimbrel.server.app.limits import DEFAULTS, ServerLimits
from whimbrel.server.app.request_context import MemoryBudget, RequestContext
from whimbrel.server.app.routing import render_error
from whimbrel.telemetry import trace
from whimbrel.telemetry.trace import RequestFinished

_log = logging.getLogger("whimbrel")

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
_OTHER: Final = "other"
_MAX_PATH: Final = 256
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_TRACEPARENT: Final = re.compile(r"(?!ff|00.{53}.)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def sanitize(text: str, limit: int = 100) -> str:
    """Return text from a client in a form fit for a message or a log: on one line, without control characters, and not long."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return ascii(cut) if not cut.isprintable() else cut


class RequestLogMiddleware:
    """ASGI middleware. `routes` are those of the app: their templates are the names that requests are counted by. `options`
    say how large bodies may be, and how much of them may be in memory."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route], options: ServerLimits = DEFAULTS) -> None:
        self._app = app
        self._options = options
        self._held = MemoryBudget(options.max_inflight_bytes)
        self._exact = frozenset(route.path for route in routes if not route.param_convertors)
        self._others = [route for route in routes if route.param_convertors]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()
        context = RequestContext(request_id, headers, receive=receive, send=send, limits=self._options, budget=self._held)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "context": context}
        route, received = self._route(scope["path"]), time.time()
        trace.request_started(route)
        lost = True  # unless _run comes back: it lets nothing through but the end of this process
        try:
            await self._run(scope, context)
            lost = False
        finally:
            status, outcome = context.end(lost=lost)
            trace.request_finished(
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
                    num_texts=context.num_texts,
                    num_tokens=context.num_tokens,
                    num_truncated=context.num_truncated,
                    received=received,
                    seconds=(context.ended or time.perf_counter()) - context.started,
                    stages=context.stages,
                    traceparent=_valid_traceparent(headers.get(b"traceparent", b"")),
                )
            )

    async def _run(self, scope: Scope, context: RequestContext) -> None:
        """Run the app; what it raises is ours, not the caller's, and is logged and answered as such."""
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
        """The log has the traceback, the answer only its kind."""
        fields = {"request_id": context.request_id}
        _log.error("%s %s failed", sanitize(scope["method"]), sanitize(scope["path"]), exc_info=error, extra={"fields": fields})
        context.error = WhimbrelError.code
        if context.status:
            return  # the server breaks off an answer that has begun
        answer = WhimbrelError(f"{type(error).__name__} in Whimbrel. This is a bug.")
        status, body = render_error(answer, scope["path"])
        with suppress(OSError):
            await context.send(
                {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
            )
            await context.send({"type": "http.response.body", "body": body})

    def _route(self, path: str) -> str:
        """The template that a path belongs to, whether or not the request gets that far."""
        if path in self._exact:
            return path
        return next((route.path_format for route in self._others if route.path_regex.match(path)), _OTHER)


def _valid_traceparent(given: bytes) -> str:
    text = given.decode("latin-1") if len(given) <= 512 else ""
    return text if _TRACEPARENT.fullmatch(text) else ""
