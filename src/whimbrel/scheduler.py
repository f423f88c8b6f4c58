"""Decides which seqs run next. Pure: no threads, no clock, no tensors; it knows jobs by identity and seqs by length.

Theory of operation. Each job (a request) keeps its waiting seqs, longest first. `take` goes round the jobs, one seq from
each in turn, until the batch's token budget is full; so a query beside a request of 2,048 texts is in the next batch.
Longest first keeps seqs of similar length together and leaves the small ones to fill the end, so that lanes finish a
request together.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from whimbrel.types import Seq

K = TypeVar("K", bound=Hashable)

_MIN_SHARE = 128
"""Tokens below which splitting work over idle lanes gains nothing."""


class Scheduler(Generic[K]):
    """Waiting seqs of all jobs. Not thread-safe: the engine holds its lock around every call."""

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._waiting: OrderedDict[K, deque[Seq]] = OrderedDict()  # in the order of the round
        self.queued_tokens = 0

    def add(self, job: K, seqs: Sequence[Seq]) -> None:
        """Queue the seqs of one job."""
        self._waiting[job] = deque(sorted(seqs, key=lambda seq: -seq.ids.size))
        self.queued_tokens += sum(seq.ids.size for seq in seqs)

    def cancel(self, job: K) -> None:
        """Forget what has not been taken of a job; no error if there is nothing."""
        self.queued_tokens -= sum(seq.ids.size for seq in self._waiting.pop(job, ()))

    def take(self, idle_lanes: int = 1) -> list[tuple[K, Seq]]:
        """The next batch, as (job, seq); empty when nothing waits.

        A text longer than the budget is a batch of its own. With several idle lanes little work is shared between them.
        """
        share = max(_MIN_SHARE, -(-self.queued_tokens // max(idle_lanes, 1)))
        budget = min(self._max_batch_tokens, share)
        batch: list[tuple[K, Seq]] = []
        tokens = 0
        while self._waiting:
            job, waiting = next(iter(self._waiting.items()))
            size = waiting[0].ids.size
            if batch and tokens + size > budget:
                break
            batch.append((job, waiting.popleft()))
            tokens += size
            if waiting:
                self._waiting.move_to_end(job)
            else:
                del self._waiting[job]
        self.queued_tokens -= tokens
        return batch
