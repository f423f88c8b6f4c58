"""The only instrumentation: `with trace("compute"):` around a stage tells its duration to whoever subscribed.

Nothing happens, and nothing is kept, where nobody listens. Metrics, logs and spans are subscribers; stages know of none.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Literal, Self, TypeAlias

Stage: TypeAlias = Literal["read", "tokenize", "queue", "pack", "compute", "collect", "write"]
"""The stages of a request's life, in order."""

Subscriber: TypeAlias = Callable[[Stage, float], None]
"""Called with a stage and the seconds it took, in the thread where it ran; must be quick and must not raise."""

_subscribers: list[Subscriber] = []


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Tell `subscriber` of every stage from now on. Returns the function that ends it."""
    _subscribers.append(subscriber)
    return lambda: _subscribers.remove(subscriber)


def observe(stage: Stage, seconds: float) -> None:
    """Report a stage that was timed elsewhere."""
    for subscriber in _subscribers:
        subscriber(stage, seconds)


class trace:
    """Context manager around one stage; `seconds` holds its duration afterwards."""

    __slots__ = ("_stage", "_start", "seconds")

    def __init__(self, stage: Stage) -> None:
        self._stage: Stage = stage
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._start = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.seconds = perf_counter() - self._start
        observe(self._stage, self.seconds)
