"""What is known of a request on its way: what its head says, and what handlers and middleware learn of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from starlette.types import Scope

from whimbrel.telemetry.trace import Stage
from whimbrel.types.result import Result


@dataclass(slots=True)
class RequestContext:
    """In the end it becomes the request's Finished record."""

    request_id: str
    started: float
    """time.perf_counter"""
    request_headers: Mapping[bytes, bytes]
    """The headers of the request; of several of one name the last."""
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
    closes: bool = False
    """Whether the connection ends with the answer."""
    stages: dict[Stage, float] = field(default_factory=dict)

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


@lru_cache(maxsize=64)
def _timing(stages: tuple[Stage, ...]) -> bytes:
    """What their milliseconds and those of all are put into."""
    return b", ".join([f"{stage};dur=%.2f".encode() for stage in (*stages, "total")])


def context_of(scope: Scope) -> RequestContext:
    """The notes of the request that this scope is of."""
    notes: RequestContext = scope["state"]["notes"]
    return notes
