"""Events of requests and batches, and their subscribers.

This is the only instrumentation of the server. Metrics, logs and spans subscribe, and the code that reports an event knows none
of them. All names come from fixed sets, and models are served ones, so what a subscriber keeps by name is bounded.
"""

import logging
from collections.abc import Callable, Mapping, MutableMapping
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar

import msgspec

_log = logging.getLogger("whimbrel")

Stage: TypeAlias = Literal["receive", "read", "tokenize", "queue", "pack", "compute", "collect", "write"]
"""Stages of a request, in order. `receive` is the transfer of its body."""

Size: TypeAlias = Literal["batch_tokens", "batch_seqs"]
Count: TypeAlias = Literal[
    "retries", "halvings", "non_finite", "out_of_memory", "engine_restarts", "worker_restarts", "dropped",
    "document_cache_hits", "document_cache_misses", "prefix_cache_hits", "prefix_cache_misses",
    "connection_limit", "idle_connections_closed",
]  # fmt: skip
"""Counts, each explained in `telemetry/metrics.py`."""
GaugeName: TypeAlias = Literal[
    "queue_tokens", "queue_small_tokens", "engines_up", "connections", "prefix_cache_bytes", "max_batch_tokens",
    "memory_limit_bytes",
]  # fmt: skip

Outcome: TypeAlias = Literal[
    "ok", "invalid", "unauthorized", "forbidden", "not_found", "overloaded", "rate_limited", "unavailable", "timeout",
    "client_gone", "error", "lost",
]  # fmt: skip
"""The end of a request as its client sees it. Every request has exactly one. lost: its worker stopped or died."""


class HistogramEvent(msgspec.Struct, frozen=True, gc=False):
    """Duration of a stage in seconds, or a size of a batch."""

    name: Stage | Size
    value: float
    model: str = ""


class CounterEvent(msgspec.Struct, frozen=True, gc=False):
    name: Count
    amount: int = 1
    model: str = ""


class GaugeEvent(msgspec.Struct, frozen=True, gc=False):
    name: GaugeName
    value: float
    model: str = ""


class RequestStarted(msgspec.Struct, frozen=True, gc=False):
    """The arrival of an HTTP request. A RequestFinished with the same route always follows."""

    route: str


class RequestFinished(msgspec.Struct, frozen=True):
    """The end of an HTTP request. It holds no input text, no key and no header except those in its fields."""

    request_id: str
    method: str
    """An HTTP method, or "other"."""
    route: str
    """The route's template, or "other"."""
    path: str
    """The client's path, shortened. For logs only."""
    client: str
    """The peer's address, or "". For logs only."""
    status: int
    """HTTP status of the response. 499 if the client had left, 0 without a response."""
    outcome: Outcome
    error: str = ""
    model: str = ""
    """The served name, "other" if no model has that name, "" if the request names none."""
    tenant: str = ""
    """The API key's name, such as "key1"; "" for a request without a valid key."""
    num_texts: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    received: float = 0.0
    seconds: float = 0.0
    stages: Mapping[Stage, float] = msgspec.field(default_factory=dict[Stage, float])
    """Seconds in each stage, in order."""
    traceparent: str = ""
    """The client's `traceparent` header (W3C Trace Context) if it is valid, or ""."""
    is_probe: bool = False
    """True if the route asks whether the server is ready, so that "unavailable" is an answer."""
    yields: bool = False
    """True for a line of a batch file. It runs after all other requests, so its time tells nothing of theirs."""

    @property
    def is_server_error(self) -> bool:
        """True if it failed on the server's side. A full queue is no failure, whatever its status in the dialect."""
        expected = self.outcome == "overloaded" or (self.is_probe and self.outcome == "unavailable")
        return self.outcome == "error" or (self.status >= 500 and not expected)


Event: TypeAlias = HistogramEvent | CounterEvent | GaugeEvent | RequestStarted | RequestFinished
E = TypeVar("E", HistogramEvent, CounterEvent, GaugeEvent, RequestStarted, RequestFinished)

_subscribers: dict[type[Event], tuple[Callable[[Any], None], ...]] = {}


def subscribe(kind: type[E], subscriber: Callable[[E], None]) -> Callable[[], None]:
    """Call `subscriber` for every event of this kind from now on. Return a function that ends the subscription.

    The call is made in the thread of the event, so it must be quick. Its exceptions are logged and not raised.
    """
    _subscribers[kind] = (*_subscribers.get(kind, ()), subscriber)

    def end() -> None:
        remaining = list(_subscribers[kind])
        remaining.remove(subscriber)
        _subscribers[kind] = tuple(remaining)

    return end


def observe(name: Stage | Size, value: float, *, model: str = "") -> None:
    """Report the duration of a stage in seconds, or a size of a batch."""
    report(HistogramEvent(name, value, model))


def count(name: Count, amount: int = 1, *, model: str = "") -> None:
    report(CounterEvent(name, amount, model))


def gauge(name: GaugeName, value: float, *, model: str = "") -> None:
    report(GaugeEvent(name, value, model))


def report(event: Event) -> None:
    for subscriber in _subscribers.get(type(event), ()):
        try:
            subscriber(event)
        except Exception:  # a request must not fail because it could not be counted
            _log.exception("a subscriber failed. This is a bug.")


class Timer:
    """Context manager that times a stage. Afterwards, `seconds` is its duration.

    It reports the stage of a `model`, or stores it in `into` by name: the stages of one HTTP request's RequestFinished.
    """

    __slots__ = ("_into", "_model", "_stage", "_start", "seconds")

    def __init__(self, stage: Stage, *, model: str = "", into: MutableMapping[Stage, float] | None = None) -> None:
        self._stage: Stage = stage
        self._model = model
        self._into = into
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._start = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.seconds = perf_counter() - self._start
        if self._into is None:
            observe(self._stage, self.seconds, model=self._model)
        else:
            self._into[self._stage] = self.seconds
