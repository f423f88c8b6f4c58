"""Decides which seqs run next. Pure: no threads, no clock, no tensors; it knows jobs by identity and seqs by length.

Theory of operation. A job (a request) waits at its priority; of those that wait, only the most urgent priority is served, lower
numbers first. Within a priority there are three rounds, and a batch holds seqs of one of them:

- *suspects*, which were on the device when an engine died: first, and few at a time;
- *small* jobs, those that together fill no more than a quarter of a batch: single queries;
- *bulk*, everything else.

Small and bulk batches alternate while both wait, so neither starves, and a small batch is never filled up with bulk: it is
over soon. `take_small` gives such a batch to a lane that has reached a boundary between two layers of a bulk batch.

A round gives every tenant one seq in turn, and a tenant's turns go to the job that an even share between its jobs would finish
first (rounds.py); so nobody waits longer for others sending more, and jobs are finished one after another. Within a job the
longest seqs come first: that keeps seqs of similar length together and leaves the short ones to fill the end, so that lanes
finish a request together.

A job whose deadline has passed is never taken from again; `expire` tells of it. After the device ran out of memory batches
are held to fewer tokens, and slowly to more again.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from whimbrel.engine.fair_queue import FairQueue
from whimbrel.types.seq import Seq

K = TypeVar("K", bound=Hashable)

Kind: TypeAlias = Literal["suspect", "small", "bulk"]

_MIN_SHARE: Final = 128
"""Tokens below which splitting work over idle lanes gains nothing."""
_SMALL_PART: Final = 4
"""A job of at most this part of a batch is small."""
_MIN_BUDGET: Final = 16
_RECOVERY_BATCHES: Final = 32
_RECOVERY_PART: Final = 8
_NOTHING: Final[Mapping[int, int]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch(Generic[K]):
    """The seqs of one batch, each with its job."""

    items: list[tuple[K, Seq]]
    kind: Kind
    priority: int


class Scheduler(Generic[K]):
    """Waiting seqs of all jobs. Not thread-safe: the lanes hold their lock around every call; reading a property needs none."""

    def __init__(self, max_batch_tokens: int) -> None:
        self.token_budget = max_batch_tokens
        """Tokens in a batch at present."""
        self.queued_tokens = 0
        self.small_tokens = 0
        """Those of them that belong to small jobs."""
        self._max_batch_tokens = max_batch_tokens
        self._good_batches = 0
        self._levels: dict[int, _PriorityLevel[K]] = {}
        self._priorities: list[int] = []  # the keys of _levels, sorted
        self._entries: dict[K, _JobState] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; those of jobs that are gone stay a while
        self._expiring: dict[int, K] = {}  # by number
        self._numbers = count()
        self._expired: list[K] = []

    def add(
        self,
        job: K,
        seqs: Sequence[Seq],
        *,
        priority: int = 0,
        deadline: float = inf,
        tenant: str = "",
        suspects: Mapping[int, int] = _NOTHING,
        first: Container[int] = (),
    ) -> None:
        """Queue the seqs of one job, the longest first, but before all others those of the indexes `first`.

        `suspects`: the most seqs that a batch may have with the seq of that index in it."""
        if not seqs:
            return
        tokens = sum(seq.ids.size for seq in seqs)
        ordered = sorted(seqs, key=lambda seq: (seq.index not in first, -seq.ids.size))
        apart = [seq for seq in ordered if seq.index in suspects] if suspects else []
        rest = [seq for seq in ordered if seq.index not in suspects] if suspects else ordered
        entry = _JobState(priority, tenant, self._kind_of(tokens), suspects, bool(apart) + bool(rest), next(self._numbers))
        level = self._level(priority)
        level.queue["suspect"].add(job, tenant, apart)
        level.queue[entry.kind].add(job, tenant, rest)
        self._entries[job] = entry
        self._count(tokens, entry.kind)
        if deadline < inf:
            self._add_deadline(deadline, entry.number, job)

    def cancel(self, job: K) -> None:
        """Forget what has not been taken of a job; no error if there is nothing."""
        if entry := self._entries.pop(job, None):
            self._expiring.pop(entry.number, None)
            rounds = self._levels[entry.priority].queue
            for waiting in (rounds["suspect"], rounds[entry.kind]):
                self._count(-waiting.discard(job, entry.tenant), entry.kind)
            self._drop_empty(entry.priority)

    def expire(self, now: float) -> list[K]:
        """Forget the jobs whose deadline has passed, and name those not named before."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            if (job := self._expiring.get(number)) is not None:
                self.cancel(job)
                self._expired.append(job)
        named, self._expired = self._expired, []
        return named

    @property
    def wake_at(self) -> float:
        """When the next of the waiting jobs expires; infinity if none does."""
        while self._deadlines and self._deadlines[0][1] not in self._expiring:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else inf

    @property
    def suspects_are_next(self) -> bool:
        """Whether `take` would give suspects, which must be alone on the device."""
        return bool(self._priorities) and self._levels[self._priorities[0]].queue["suspect"].tokens > 0

    def take(self, now: float, idle_lanes: int = 1) -> ScheduledBatch[K] | None:
        """The next batch; None when nothing waits.

        A text longer than the budget is a batch of its own. With several idle lanes little work is shared between them.
        """
        self._expired = self.expire(now)
        if not self._priorities:
            return None
        priority = self._priorities[0]
        level = self._levels[priority]
        kind = level.next_kind()
        level.last = kind
        share = max(_MIN_SHARE, -(-self.queued_tokens // max(idle_lanes, 1)))
        return ScheduledBatch(self._fill_batch(priority, kind, min(self.token_budget, share)), kind, priority)

    def take_small(self, now: float, priority: float = inf) -> ScheduledBatch[K] | None:
        """A batch of small jobs, if such are next among those of this priority or a more urgent one; else None."""
        self._expired = self.expire(now)
        if not self._priorities or self._priorities[0] > priority or self.suspects_are_next:
            return None
        first = self._priorities[0]
        if not self._levels[first].queue["small"].tokens:
            return None
        return ScheduledBatch(self._fill_batch(first, "small", self.token_budget), "small", first)

    def is_small(self, tokens: int) -> bool:
        """Whether a job of so many tokens is small."""
        return tokens <= self._max_batch_tokens // _SMALL_PART

    def tokens_ahead(self, tokens: int, priority: int = 0, *, tenant: str = "") -> int:
        """About how many tokens run until a new request would be done, its own included.

        All that is more urgent; in its own round what runs before it is done; and as much of the other round, with which its
        own alternates, and a batch. In steps as many as there are priorities, not jobs.
        """
        place = bisect_left(self._priorities, priority)
        before = sum(self._levels[urgent].tokens for urgent in self._priorities[:place])
        level = self._levels.get(priority)
        if level is None:
            return before + tokens
        kind = self._kind_of(tokens)
        done = level.queue[kind].tokens_ahead(tokens, tenant) + tokens
        other = level.queue["bulk" if kind == "small" else "small"].tokens
        return before + level.queue["suspect"].tokens + done + min(other, done + self.token_budget)

    def out_of_memory(self, num_tokens: int) -> None:
        """A batch of so many tokens did not fit: let no batch have more than half as many for a while."""
        self.token_budget = min(self.token_budget, max(_MIN_BUDGET, num_tokens // 2))
        self._good_batches = 0

    def succeeded(self) -> None:
        """A batch was computed. After some of them a lowered budget is raised by a step."""
        if self.token_budget < self._max_batch_tokens:
            self._good_batches += 1
            if self._good_batches % _RECOVERY_BATCHES == 0:
                step = max(1, self._max_batch_tokens // _RECOVERY_PART)
                self.token_budget = min(self._max_batch_tokens, self.token_budget + step)

    def _kind_of(self, tokens: int) -> Literal["small", "bulk"]:
        return "small" if self.is_small(tokens) else "bulk"

    def _fill_batch(self, priority: int, kind: Kind, budget: int) -> list[tuple[K, Seq]]:
        """Take seqs in turn until the next does not fit; the first always does."""
        waiting = self._levels[priority].queue[kind]
        work: list[tuple[K, Seq]] = []
        most: float = inf
        while waiting.tokens:
            job, seq = waiting.head()
            size = seq.ids.size
            entry = self._entries[job]
            if kind == "suspect":
                most = min(most, entry.suspects[seq.index])
            if work and (size > budget or len(work) >= most):
                break
            work.append((job, seq))
            budget -= size
            self.queued_tokens -= size
            if entry.kind == "small":
                self.small_tokens -= size
            if waiting.pop():
                entry.num_rounds -= 1
                if not entry.num_rounds:
                    del self._entries[job]
                    self._expiring.pop(entry.number, None)
        self._drop_empty(priority)
        return work

    def _level(self, priority: int) -> _PriorityLevel[K]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _PriorityLevel()
            insort(self._priorities, priority)
        return level

    def _drop_empty(self, priority: int) -> None:
        """Drop a level that is empty."""
        if not self._levels[priority].tokens:
            del self._levels[priority]
            self._priorities.remove(priority)

    def _count(self, tokens: int, kind: Kind) -> None:
        self.queued_tokens += tokens
        if kind == "small":
            self.small_tokens += tokens

    def _add_deadline(self, deadline: float, number: int, job: K) -> None:
        if len(self._deadlines) > 2 * len(self._expiring) + 64:  # most are of jobs that are gone
            self._deadlines = [item for item in self._deadlines if item[1] in self._expiring]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, number))
        self._expiring[number] = job


@dataclass(slots=True, eq=False)
class _JobState:
    """What is known of a waiting job."""

    priority: int
    tenant: str
    kind: Literal["small", "bulk"]
    suspects: Mapping[int, int]
    num_rounds: int
    """Rounds in which some of it waits."""
    number: int
    """By which its deadline knows it."""


class _PriorityLevel(Generic[K]):
    """The waiting seqs of one priority."""

    def __init__(self) -> None:
        self.queue: dict[Kind, FairQueue[K]] = {"suspect": FairQueue(), "small": FairQueue(), "bulk": FairQueue()}
        self.last: Kind = "bulk"

    @property
    def tokens(self) -> int:
        return sum(waiting.tokens for waiting in self.queue.values())

    def next_kind(self) -> Kind:
        if self.queue["suspect"].tokens:
            return "suspect"
        small, bulk = self.queue["small"].tokens, self.queue["bulk"].tokens
        if small and bulk:
            return "bulk" if self.last == "small" else "small"
        return "small" if small else "bulk"
