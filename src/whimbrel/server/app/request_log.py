"""The outermost middleware: every HTTP request is entered when it comes and struck out once when it ends, whatever happens.

It gives a request its id, answers bugs, writes the headers that every answer has, and tells trace of Received and Finished.
Handlers and other middleware leave what they learn in the request's Notes. Knows ASGI; nothing of models or metrics.
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
from whimbrel.server.app.request_record import RequestContext
from whimbrel.server.app.routing import render_error
from whimbrel.server.app.transfer import MemoryBudget, MeteredTransfer
from whimbrel.telemetry import trace
from whimbrel.telemetry.trace import RequestFinished

_log = logging.getLogger("whimbrel")

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
_OTHER: Final = "other"
_MAX_PATH: Final = 256
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_TRACEPARENT: Final = re.compile(r"(?!ff|00.{53}.)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def sanitize(text: str, limit: int = 100) -> str:
    """What a client sent, fit for a message or a log: on one line, without control characters, and not long."""
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
        notes = RequestContext(request_id, time.perf_counter(), headers)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "notes": notes}
        route, received = self._route(scope["path"]), time.time()
        transfer = MeteredTransfer(receive, send, notes, self._options, self._held)
        trace.request_started(route)
        lost = True  # unless _run comes back: it lets nothing through but the end of this process
        try:
            await self._run(scope, transfer, notes)
            lost = False
        finally:
            status, outcome = transfer.end(lost=lost)
            trace.request_finished(
                RequestFinished(
                    request_id=notes.request_id,
                    method=scope["method"] if scope["method"] in _METHODS else _OTHER,
                    route=route,
                    path=scope["path"][:_MAX_PATH],
                    client=(scope.get("client") or ("",))[0],
                    status=status,
                    outcome=outcome,
                    error=notes.error or ("" if outcome == "ok" else outcome),
                    model=notes.model,
                    num_texts=notes.num_texts,
                    num_tokens=notes.num_tokens,
                    num_truncated=notes.num_truncated,
                    received=received,
                    seconds=(transfer.ended or time.perf_counter()) - notes.started,
                    stages=notes.stages,
                    traceparent=_valid_traceparent(headers.get(b"traceparent", b"")),
                )
            )

    async def _run(self, scope: Scope, transfer: MeteredTransfer, notes: RequestContext) -> None:
        """Run the app; what it raises is ours, not the caller's, and is logged and answered as such."""
        try:
            await self._app(scope, transfer.receive, transfer.send)
            if not transfer.status and not transfer.left:
                raise RuntimeError("nothing was answered")
        except ClientDisconnect:
            transfer.left = True
        except Exception as error:
            if not transfer.left:
                await self._answer_bug(error, scope, transfer, notes)

    async def _answer_bug(self, error: Exception, scope: Scope, transfer: MeteredTransfer, notes: RequestContext) -> None:
        """The log has the traceback, the answer only its kind."""
        fields = {"request_id": notes.request_id}
        _log.error("%s %s failed", sanitize(scope["method"]), sanitize(scope["path"]), exc_info=error, extra={"fields": fields})
        notes.error = WhimbrelError.code
        if transfer.status:
            return  # the server breaks off an answer that has begun
        answer = WhimbrelError(f"{type(error).__name__} in Whimbrel. This is a bug.")
        status, body = render_error(answer, scope["path"])
        with suppress(OSError):
            await transfer.send(
                {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
            )
            await transfer.send({"type": "http.response.body", "body": body})

    def _route(self, path: str) -> str:
        """The template that a path belongs to, whether or not the request gets that far."""
        if path in self._exact:
            return path
        return next((route.path_format for route in self._others if route.path_regex.match(path)), _OTHER)


def _valid_traceparent(given: bytes) -> str:
    text = given.decode("latin-1") if len(given) <= 512 else ""
    return text if _TRACEPARENT.fullmatch(text) else ""
