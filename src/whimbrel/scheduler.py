"""Decides which seqs run next. Pure: no threads, no clock, no tensors; it knows requests by number and seqs by length.

Theory of operation. Each request keeps its waiting seqs, longest first. `take` goes round the requests, one seq from
each in turn, until the batch's token budget is full; so a query beside a request of 2,048 texts is in the next batch.
Longest first keeps seqs of similar length together and leaves the small ones to fill the end, so that lanes finish a
request together.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from whimbrel.types import Seq

_MIN_SHARE = 128
"""Tokens below which splitting work over idle lanes gains nothing."""


class Scheduler:
    """Waiting seqs of all requests. Not thread-safe: the engine holds its lock around every call."""

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._waiting: OrderedDict[int, deque[Seq]] = OrderedDict()  # in the order of the round
        self.queued_tokens = 0

    def add(self, request_id: int, seqs: Sequence[Seq]) -> None:
        """Queue the seqs of one request."""
        self._waiting[request_id] = deque(sorted(seqs, key=lambda seq: -seq.ids.size))
        self.queued_tokens += sum(seq.ids.size for seq in seqs)

    def cancel(self, request_id: int) -> None:
        """Forget what has not been taken of a request; no error if there is nothing."""
        self.queued_tokens -= sum(seq.ids.size for seq in self._waiting.pop(request_id, ()))

    def take(self, idle_lanes: int = 1) -> list[tuple[int, Seq]]:
        """The next batch, as (request id, seq); empty when nothing waits.

        A text longer than the budget is a batch of its own. With several idle lanes little work is shared between them.
        """
        share = max(_MIN_SHARE, -(-self.queued_tokens // max(idle_lanes, 1)))
        budget = min(self._max_batch_tokens, share)
        batch: list[tuple[int, Seq]] = []
        tokens = 0
        while self._waiting:
            request_id, waiting = next(iter(self._waiting.items()))
            size = waiting[0].ids.size
            if batch and tokens + size > budget:
                break
            batch.append((request_id, waiting.popleft()))
            tokens += size
            if waiting:
                self._waiting.move_to_end(request_id)
            else:
                del self._waiting[request_id]
        self.queued_tokens -= tokens
        return batch
