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
from dataclasses import dataclass, field
from typing import Final

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whimbrel import trace
from whimbrel.errors import WhimbrelError
from whimbrel.server.ways import render_error
from whimbrel.trace import Finished, Outcome, Stage
from whimbrel.types import Result

_log = logging.getLogger("whimbrel")

CLIENT_LEFT: Final = 499
"""The status of an answer to nobody."""

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
_OTHER: Final = "other"
_MAX_PATH: Final = 256
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_TRACEPARENT: Final = re.compile(r"(?!ff|00.{53}.)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_OUTCOMES: Final[dict[int, Outcome]] = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "timeout",
    429: "overloaded",
    499: "client_gone",
    503: "unavailable",
    504: "timeout",
}


@dataclass(slots=True)
class Notes:
    """What is learnt of a request on its way; in the end it becomes its Finished record."""

    request_id: str
    started: float
    """time.perf_counter"""
    model: str = ""
    """The served name; "other" where the client asks for one that is not served."""
    num_texts: int = 0
    answered: bool = False
    """Whether the engine gave a result; without one, it has no tokens."""
    num_tokens: int = 0
    num_truncated: int = 0
    error: str = ""
    """The code of the error that it is answered with."""
    held: int = 0
    """Bytes of what an answer in pieces is made of."""
    stages: dict[Stage, float] = field(default_factory=dict[Stage, float])

    def note_result(self, result: Result) -> None:
        """Note what the engine said, but not the vectors, whose memory is wanted back."""
        timings = result.timings
        self.stages |= {"tokenize": timings.tokenize, "queue": timings.queue, "compute": timings.compute}
        self.answered, self.num_tokens, self.num_truncated = True, result.num_tokens, result.num_truncated

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The request's id, milliseconds per stage, and what the request amounted to."""
        stages = {**self.stages, "total": time.perf_counter() - self.started}
        timing = ", ".join(f"{stage};dur={seconds * 1e3:.2f}" for stage, seconds in stages.items())
        headers = {"x-request-id": self.request_id, "server-timing": timing}
        if self.answered:
            headers["x-whimbrel-tokens"] = str(self.num_tokens)
            headers["x-whimbrel-truncated"] = str(self.num_truncated)
        return [(name.encode(), value.encode()) for name, value in headers.items()]


def notes_of(scope: Scope) -> Notes:
    """The notes of the request that this scope is of."""
    notes: Notes = scope["state"]["notes"]
    return notes


def shown(text: str, limit: int = 100) -> str:
    """What a client sent, fit for a message or a log: on one line, without control characters, and not long."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return ascii(cut) if not cut.isprintable() else cut


class Ledger:
    """ASGI middleware. `routes` are those of the app: their templates are the names that requests are counted by."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._exact = frozenset(route.path for route in routes if not route.param_convertors)
        self._others = [route for route in routes if route.param_convertors]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _headers(scope, b"x-request-id", b"traceparent")
        given = headers.get(b"x-request-id", "")
        notes = Notes(given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex(), time.perf_counter())
        scope["state"] = {**scope.get("state", {}), "request_id": notes.request_id, "notes": notes}
        route, received = self._route(scope["path"]), time.time()
        exchange = _Exchange(receive, send, notes)
        trace.received(route)
        lost = True  # unless _run comes back: it lets nothing through but the end of this process
        try:
            await self._run(scope, exchange, notes)
            lost = False
        finally:
            status, outcome = exchange.end(lost=lost)
            trace.finished(
                Finished(
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
                    seconds=(exchange.ended or time.perf_counter()) - notes.started,
                    stages=notes.stages,
                    traceparent=_valid_traceparent(headers.get(b"traceparent", "")),
                )
            )

    async def _run(self, scope: Scope, exchange: _Exchange, notes: Notes) -> None:
        """Run the app; what it raises is ours, not the caller's, and is logged and answered as such."""
        try:
            await self._app(scope, exchange.receive, exchange.send)
            if not exchange.status and not exchange.left:
                raise RuntimeError("nothing was answered")
        except Exception as error:
            if not exchange.left:
                await self._answer_bug(error, scope, exchange, notes)

    async def _answer_bug(self, error: Exception, scope: Scope, exchange: _Exchange, notes: Notes) -> None:
        """The log has the traceback, the answer only its kind."""
        fields = {"request_id": notes.request_id}
        _log.error("%s %s failed", shown(scope["method"]), shown(scope["path"]), exc_info=error, extra={"fields": fields})
        notes.error = WhimbrelError.code
        if exchange.status:
            return  # the server breaks off an answer that has begun
        answer = WhimbrelError(f"{type(error).__name__} in Whimbrel. This is a bug.")
        status, body = render_error(scope["path"], answer)
        with suppress(OSError):
            await exchange.send(
                {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
            )
            await exchange.send({"type": "http.response.body", "body": body})

    def _route(self, path: str) -> str:
        """The template that a path belongs to, whether or not the request gets that far."""
        if path in self._exact:
            return path
        return next((route.path_format for route in self._others if route.path_regex.match(path)), _OTHER)


class _Exchange:
    """What goes between a client and the app, watched."""

    def __init__(self, receive: Receive, send: Send, notes: Notes) -> None:
        self._receive = receive
        self._send = send
        self._notes = notes
        self.status = 0
        self.complete = False
        """Whether the whole answer was handed to the server."""
        self.left = False
        """Whether the client left, or its body broke off, before that."""
        self.ended = 0.0
        """When the answer was complete (time.perf_counter); middleware may still have to clear up after it."""

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.complete:
            self.left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ours = self._notes.headers()
            names = {name for name, _ in ours}
            message = {**message, "headers": [*(pair for pair in message["headers"] if pair[0].lower() not in names), *ours]}
        try:
            await self._send(message)
        except OSError:  # nobody is there to take it
            self.left = True
            raise
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
            self.ended = time.perf_counter()

    def end(self, *, lost: bool) -> tuple[int, Outcome]:
        """Status and outcome, now that nothing more will be sent."""
        if self.left:
            return self.status or CLIENT_LEFT, "client_gone"
        if self.complete:
            return self.status, _outcome(self.status)
        if lost:
            return self.status, "lost"
        # An answer that was begun and not ended: after a bug, or because the client took it too slowly.
        return self.status, "error" if self._notes.error else "client_gone"


def _outcome(status: int) -> Outcome:
    if status in _OUTCOMES:
        return _OUTCOMES[status]
    if status < 400:
        return "ok"
    return "invalid" if status < 500 else "error"


def _headers(scope: Scope, *names: bytes) -> dict[bytes, str]:
    """The values of some headers, decoded."""
    pairs: list[tuple[bytes, bytes]] = scope["headers"]
    return {name: value.decode("latin-1") for name, value in pairs if name in names}


def _valid_traceparent(given: str) -> str:
    return given if len(given) <= 512 and _TRACEPARENT.fullmatch(given) else ""
