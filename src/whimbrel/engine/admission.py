"""Admission control: the bounds of the queue, and the measured throughput. Pure: time and jitter are arguments."""

from dataclasses import dataclass
from typing import Final

from whimbrel.errors import Overloaded
from whimbrel.types.plan import Plan

_KEEP: Final = 0.5 ** (1 / 64)
"""Factor that the weight of earlier batches decays by with each batch: half remains after 64."""
_UNKNOWN_RATE: Final = 10_000.0
_MIN_WAIT: Final = 1.0
_MAX_WAIT: Final = 40.0
"""Seconds. With jitter at most a minute: some clients take a longer Retry-After for a reason not to retry."""
_HARD_LIMIT_FACTOR: Final = 2
"""No request is admitted beyond the bounds times this factor."""


class ThroughputEstimate:
    """Tokens per second of the whole engine while it has work, as an exponentially weighted mean."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._running = 0
        self._since = 0.0

    @property
    def value(self) -> float:
        """Tokens per second; 0 before anything was measured."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def begin(self, now: float) -> None:
        if not self._running:
            self._since = now
        self._running += 1

    def end(self, now: float, tokens: int) -> None:
        self._running -= 1
        self._tokens = self._tokens * _KEEP + tokens
        self._seconds = self._seconds * _KEEP + now - self._since
        self._since = now

    def reset(self) -> None:
        self._tokens = self._seconds = 0.0


@dataclass(frozen=True, slots=True)
class QueueState:
    tokens: int
    ahead: int
    """Tokens that run until the new request would be done, its own included."""
    num_bytes: int
    """Memory of all unanswered requests, in bytes."""
    rate: float


def admit_any(plan: Plan, queued: int, *, tokens: int, rate: float, jitter: float) -> None:
    """Raise Overloaded only if no tenant would be admitted, however little of the queue is its own."""
    if queued and queued + tokens > _HARD_LIMIT_FACTOR * plan.max_queue_tokens:
        raise _overloaded(f"the queue takes {plan.max_queue_tokens:,}", QueueState(queued, queued, 0, rate), jitter)


def admit(
    plan: Plan, queue: QueueState, *, tokens: int, num_bytes: int, small: bool, returns: bool = False, jitter: float
) -> None:
    """Raise Overloaded if a request of `tokens` tokens and `num_bytes` bytes must not wait too. `jitter` is from 0 to 1.

    An empty queue admits everything. A small request is measured by the tokens ahead of it, which are few while only bulk
    waits, and by twice the other bounds. One that `returns`, after it was refused, is measured by twice all bounds: the retries
    of a client succeed while others keep the queue full.
    """
    if not queue.tokens:
        return
    factor = _HARD_LIMIT_FACTOR if returns else 1
    byte_factor = _HARD_LIMIT_FACTOR if small else factor
    if queue.ahead > factor * plan.max_queue_tokens or queue.tokens + tokens > _HARD_LIMIT_FACTOR * plan.max_queue_tokens:
        full = f"the queue takes {plan.max_queue_tokens:,}"
    elif queue.rate and (seconds := (queue.ahead - tokens) / queue.rate) > factor * plan.max_queue_seconds:
        full = f"this would wait for about {seconds:,.0f} s, the limit is {plan.max_queue_seconds:g} s"
    elif queue.num_bytes + num_bytes > byte_factor * plan.max_queue_bytes:
        full = f"the requests hold {queue.num_bytes:,} bytes, the limit is {plan.max_queue_bytes:,}"
    else:
        return
    raise _overloaded(full, queue, jitter)


def _overloaded(full: str, queue: QueueState, jitter: float) -> Overloaded:
    wait = min(max(queue.ahead / (queue.rate or _UNKNOWN_RATE), _MIN_WAIT), _MAX_WAIT)
    return Overloaded(f"{queue.tokens:,} tokens wait already; {full}. Try again later.", retry_after=wait * (1 + jitter / 2))
