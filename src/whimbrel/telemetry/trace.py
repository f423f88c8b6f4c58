"""The only instrumentation: the stages of a request's life say what they do, and who subscribed hears it.

Metrics, logs and spans are subscribers; stages know of none. Nothing happens, and nothing is kept, where nobody listens.
Every name below is one of a fixed set, and a model is one that is served, so what subscribers keep by name is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar

import msgspec

_log = logging.getLogger("whimbrel")

Stage: TypeAlias = Literal["receive", "read", "tokenize", "queue", "pack", "compute", "collect", "write"]
"""The stages of a request's life, in order. `receive` is the body's way in."""

Size: TypeAlias = Literal["batch_tokens", "batch_seqs"]
"""What is measured of a batch."""

Count: TypeAlias = Literal[
    "retries",
    "halvings",
    "non_finite",
    "out_of_memory",
    "engine_restarts",
    "worker_restarts",
    "dropped",
    "document_cache_hits",
    "document_cache_misses",
]
"""What is counted: requests sent again after an engine died; batches cut in halves after a failure; rows run again in
float32; batches that did not fit into memory; processes started again; requests that nobody waited for any more."""

GaugeName: TypeAlias = Literal["queue_tokens", "queue_small_tokens", "engines_up"]
"""What rises and falls: tokens that wait, those of them that belong to small requests, engines that answer."""

Outcome: TypeAlias = Literal[
    "ok",
    "invalid",
    "unauthorized",
    "forbidden",
    "not_found",
    "overloaded",
    "unavailable",
    "timeout",
    "client_gone",
    "error",
    "lost",
]
"""How a request ended, from outside; every request has exactly one. `lost`: its worker was stopped or died meanwhile."""


class HistogramEvent(msgspec.Struct, frozen=True, gc=False):
    """A stage took so many seconds, or a batch of a model has such a size."""

    name: Stage | Size
    value: float
    model: str = ""


class CounterEvent(msgspec.Struct, frozen=True, gc=False):
    """Something happened, `amount` times."""

    name: Count
    amount: int = 1
    model: str = ""


class GaugeEvent(msgspec.Struct, frozen=True, gc=False):
    """Something stands at `value` now."""

    name: GaugeName
    value: float
    model: str = ""


class RequestStarted(msgspec.Struct, frozen=True, gc=False):
    """An HTTP request came. A Finished with the same route follows, whatever happens."""

    route: str


class RequestFinished(msgspec.Struct, frozen=True):
    """An HTTP request ended. Holds no text, no key and no header but those named."""

    request_id: str
    method: str
    """One of HTTP's, or "other"."""
    route: str
    """The template of the route, or "other"."""
    path: str
    """As the client sent it, shortened. For logs only."""
    client: str
    """The peer's address, or "". For logs only."""
    status: int
    """What was answered; 499 if the client had left, 0 if nothing was."""
    outcome: Outcome
    error: str = ""
    """The error's code; empty if there was none."""
    model: str = ""
    """The served name, "other" if it is not served, empty if the route has none or none was read."""
    num_texts: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    received: float = 0.0
    """Unix time."""
    seconds: float = 0.0
    stages: Mapping[Stage, float] = msgspec.field(default_factory=dict[Stage, float])
    """Seconds in each stage, in order."""
    traceparent: str = ""
    """The client's, if it is valid (W3C Trace Context)."""


Event: TypeAlias = HistogramEvent | CounterEvent | GaugeEvent | RequestStarted | RequestFinished
E = TypeVar("E", HistogramEvent, CounterEvent, GaugeEvent, RequestStarted, RequestFinished)

_subscribers: dict[type[Event], tuple[Callable[[Any], None], ...]] = {}


def subscribe(kind: type[E], subscriber: Callable[[E], None]) -> Callable[[], None]:
    """Tell `subscriber` of every event of this kind from now on. Returns the function that ends it.

    It is called in the thread where the event happens, so it must be quick. What it raises is logged and goes no further.
    """
    _subscribers[kind] = (*_subscribers.get(kind, ()), subscriber)

    def end() -> None:
        left = list(_subscribers[kind])
        left.remove(subscriber)
        _subscribers[kind] = tuple(left)

    return end


def observe(name: Stage | Size, value: float, *, model: str = "") -> None:
    """Report a stage that was timed elsewhere (seconds), or the size of a batch."""
    if subscribers := _subscribers.get(HistogramEvent):
        _tell(subscribers, HistogramEvent(name, value, model))


def count(name: Count, amount: int = 1, *, model: str = "") -> None:
    """Report that something happened."""
    if subscribers := _subscribers.get(CounterEvent):
        _tell(subscribers, CounterEvent(name, amount, model))


def gauge(name: GaugeName, value: float, *, model: str = "") -> None:
    """Report where something stands now."""
    if subscribers := _subscribers.get(GaugeEvent):
        _tell(subscribers, GaugeEvent(name, value, model))


def request_started(route: str) -> None:
    """Report that an HTTP request came."""
    if subscribers := _subscribers.get(RequestStarted):
        _tell(subscribers, RequestStarted(route))


def request_finished(record: RequestFinished) -> None:
    """Report that an HTTP request ended."""
    if subscribers := _subscribers.get(RequestFinished):
        _tell(subscribers, record)


def _tell(subscribers: tuple[Callable[[Any], None], ...], event: Event) -> None:
    for subscriber in subscribers:
        try:
            subscriber(event)
        except Exception:  # a request must not fail because it could not be counted
            _log.exception("a subscriber failed. This is a bug.")


class Timer:
    """Context manager around one stage; `seconds` holds its duration afterwards. It is observed, or, if the stage is of one
    HTTP request, put `into` the stages of its Finished, by its name."""

    __slots__ = ("_into", "_stage", "_start", "seconds")

    def __init__(self, stage: Stage, *, into: MutableMapping[Stage, float] | None = None) -> None:
        self._stage: Stage = stage
        self._into = into
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._start = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.seconds = perf_counter() - self._start
        if self._into is None:
            observe(self._stage, self.seconds)
        else:
            self._into[self._stage] = self.seconds
