"""Context of one HTTP request.

It carries what the head says and what middleware and handlers learn. `receive` and `send` are ASGI's: they limit and count
the bytes of the body and of the answer. In the end the context becomes the RequestFinished event. It knows nothing of routes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from whimbrel.errors import Overloaded, TooLarge
from whimbrel.server.app.limits import ServerLimits
from whimbrel.telemetry.trace import Outcome, Stage
from whimbrel.types.result import Result

_CLIENT_LEFT: Final = 499
"""The status of a request that nobody waits for the answer to."""
_LARGE: Final = 2**18
"""Answers above this size are counted among what is in memory."""
_CLOSE: Final = (b"connection", b"close")
_NO_SNIFFING: Final = (b"x-content-type-options", b"nosniff")
_LAST_ANSWERS: Final = frozenset({408, 413})
"""After them a connection is closed: what else is on its way is no request."""
_OUTCOMES: Final[dict[int, Outcome]] = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "timeout",
    429: "overloaded",
    503: "unavailable",
    504: "timeout",
}


class MemoryBudget:
    """Counts the bytes that requests hold in this process."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0

    def check(self, wanted: int) -> None:
        """Raise Overloaded if there is no room for so many more."""
        if self._count + wanted > self._limit:
            raise Overloaded("too many bytes of requests are in memory; try again later.", retry_after=1)

    def add(self, count: int) -> None:
        """So many more are held; or less, if negative."""
        self._count += count


class RequestContext:
    """Identity, counts, times and outcome of a request on its way."""

    def __init__(
        self,
        request_id: str,
        headers: Mapping[bytes, bytes],
        *,
        receive: Receive,
        send: Send,
        limits: ServerLimits,
        budget: MemoryBudget,
    ) -> None:
        self.request_id = request_id
        self.started = time.perf_counter()
        self.request_headers = headers
        """Headers of the request; the last one of each name."""
        self.model = ""
        """Served name of the model; "other" if the client asks for a model that is not served."""
        self.num_texts = 0
        self.answered = False
        """True if the engine gave a result. Without one, the token counts are unknown."""
        self.num_tokens = 0
        self.num_truncated = 0
        self.error = ""
        """Code of the error in the answer."""
        self.answer_bytes = 0
        """Memory of an answer that is sent in pieces."""
        self.closes = False
        """True if the connection ends with the answer."""
        self.stages: dict[Stage, float] = {}
        """Seconds per stage."""
        self.status = 0
        self.complete = False
        """True if the whole answer was handed to the server."""
        self.left = False
        """True if the client left, or its body broke off, before that."""
        self.ended = 0.0
        """Time at which the answer was complete (time.perf_counter). The app may still have to clear up after it."""
        self._receive = receive
        self._send = send
        self._max_body_bytes = limits.max_body_bytes
        self._held = budget
        self._announced = int(headers.get(b"content-length", b"0"))  # the HTTP parser has checked it
        self._body_ended = self._announced == 0 and b"transfer-encoding" not in headers
        self._body_size = 0
        self._answer_size = 0

    def note_result(self, result: Result) -> None:
        """Note what the engine said, but not the vectors, whose memory is wanted back."""
        timings = result.timings
        self.stages |= {"tokenize": timings.tokenize, "queue": timings.queue, "compute": timings.compute}
        self.answered, self.num_tokens, self.num_truncated = True, result.num_tokens, result.num_truncated

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The request's id, milliseconds per stage, and what the request amounted to."""
        total = time.perf_counter() - self.started
        timing = _timing(tuple(self.stages)) % tuple([seconds * 1e3 for seconds in (*self.stages.values(), total)])
        headers = [(b"x-request-id", self.request_id.encode()), (b"server-timing", timing)]
        if self.answered:
            headers.append((b"x-whimbrel-tokens", b"%d" % self.num_tokens))
            headers.append((b"x-whimbrel-truncated", b"%d" % self.num_truncated))
        return headers

    async def receive(self) -> Message:
        """The next piece of the body. Raises TooLarge, unread if the length is announced; Overloaded if memory is short."""
        if self._announced and not self._body_ended:
            self._check_size(self._announced)
            self._held.check(self._announced - self._body_size)
        message = await self._receive()
        if not self._body_ended:
            self._take(message)
        if message["type"] == "http.disconnect" and not self.complete:
            self.left = True
        return message

    def _take(self, message: Message) -> None:
        size = len(message.get("body", b""))
        self._held.check(size)
        self._held.add(size)
        self._body_size += size
        self._body_ended = not message.get("more_body", False) or 0 < self._announced <= self._body_size
        self._check_size(self._body_size)

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise TooLarge(f"the body has {size:,} bytes or more; the limit is {self._max_body_bytes:,}. Split the request.")

    async def send(self, message: Message) -> None:
        """Send; what every answer has is added. Raises OSError if nobody is there to take it."""
        is_start = message["type"] == "http.response.start"
        if is_start:
            self.status = status = message["status"]
            last = (_CLOSE,) if self.closes or status in _LAST_ANSWERS else ()
            message = {**message, "headers": [*message["headers"], *self.headers(), _NO_SNIFFING, *last]}
        elif not self._answer_size:
            size = max(len(message.get("body", b"")), self.answer_bytes)
            if size > _LARGE:
                self._answer_size = size
                self._held.add(size)
        try:
            await self._send(message)
        except OSError:
            self.left = True
            raise
        if not is_start and not message.get("more_body", False):
            self.complete = True
            self.ended = time.perf_counter()

    def end(self, *, lost: bool) -> tuple[int, Outcome]:
        """Status and outcome, now that nothing more will be sent."""
        self._held.add(-self._body_size - self._answer_size)
        if self.left:
            return self.status or _CLIENT_LEFT, "client_gone"
        if self.complete:
            return self.status, _outcome(self.status)
        if lost:
            return self.status, "lost"
        # An answer that was begun and not ended: after a bug, or because the client took it too slowly.
        return self.status, "error" if self.error else "client_gone"


def _outcome(status: int) -> Outcome:
    if status in _OUTCOMES:
        return _OUTCOMES[status]
    if status < 400:
        return "ok"
    return "invalid" if status < 500 else "error"


@lru_cache(maxsize=64)
def _timing(stages: tuple[Stage, ...]) -> bytes:
    """Return the format of the Server-Timing header for these stages and their total."""
    return b", ".join([f"{stage};dur=%.2f".encode() for stage in (*stages, "total")])


def context_of(scope: Scope) -> RequestContext:
    """Return the context of the request that this scope belongs to."""
    context: RequestContext = scope["state"]["context"]
    return context
