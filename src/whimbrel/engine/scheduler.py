"""Scheduler: the choice of the seqs that run next. Pure: no threads, no clock, no tensors.

Theory of operation. Only the most urgent priority that waits is served; lower numbers come first. Each priority has three
queues, and a batch holds seqs of one of them:

- *suspect*: seqs that were on the device when an engine died. They come first, and few at a time: the supervisor's quarantine
  says how many may share a batch. The dispatcher runs such a batch alone on the device.
- *small*: jobs that fill no more than a quarter of a batch, such as single queries.
- *bulk*: everything else.

Small and bulk batches alternate while both wait, so neither starves. A small batch is never filled up with bulk, so that it is
over soon. A queue serves its tenants in turn, one seq each, and the jobs of a tenant by fair queueing (fair_queue.py). Within a
job the longest seqs come first, so seqs of similar length stay together, and lanes finish a request together.

The scheduler knows jobs by identity and seqs by length. The dispatcher adds jobs, waits for `wake_at`, and answers those that
expire.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from whimbrel.engine.fair_queue import FairQueue
from whimbrel.types.batch import RowCount
from whimbrel.types.batch_memory import MAX_SHARED
from whimbrel.types.scheduling import ORDINARY, Scheduling
from whimbrel.types.seq import Seq, count_tokens

K = TypeVar("K", bound=Hashable)

Kind: TypeAlias = Literal["suspect", "small", "bulk"]

_MIN_SHARE: Final = 128
"""Tokens. Idle lanes do not share work in pieces that are smaller than this."""
_SMALL_PART: Final = 4
"""A job is small if it has at most 1 / `_SMALL_PART` of a batch's tokens."""
_MIN_BUDGET: Final = 16
_RECOVERY_BATCHES: Final = 32
_RECOVERY_PART: Final = 8
"""Every 32 good batches give back an eighth of the full budget."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch(Generic[K]):
    """The seqs of one batch, each with its job."""

    items: list[tuple[K, Seq]]
    kind: Kind
    priority: int


class Scheduler(Generic[K]):
    """The waiting seqs of all jobs. Not thread-safe: the dispatcher holds its lock around every call.

    `token_budget` and the numbers of tokens may be read without it.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        self.token_budget = max_batch_tokens
        self.queued_tokens = 0
        self.small_tokens = 0
        """The queued tokens that belong to small jobs."""
        self.ordinary_tokens = 0
        """The queued tokens without those that are less urgent than an ordinary request."""
        self.ordinary_small_tokens = 0
        self._max_batch_tokens = max_batch_tokens
        self._good_batches = 0
        self._levels: dict[int, _PriorityLevel[K]] = {}  # by priority
        self._entries: dict[K, _JobState] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; deadlines of jobs that are gone stay for a while
        self._expiring: dict[int, K] = {}  # jobs with a deadline, by the number of their state
        self._numbers = count()
        self._expired: list[K] = []  # found by `take` or `take_small`, and left for the next `expire`

    def add(
        self,
        job: K,
        seqs: Sequence[Seq],
        tokens: int,
        scheduling: Scheduling = ORDINARY,
        *,
        first: Container[int] = (),
        head_start: float = 0.0,
    ) -> None:
        """Queue the seqs of one job, of `tokens` tokens. Called once per job: the dispatcher keeps what it requeues.

        The indices in `first` come before all others, e.g. the queries that documents are scored against. `head_start` is as in
        FairQueue.
        """
        if not seqs:
            return
        ordered = sorted(seqs, key=lambda seq: (seq.index not in first, -seq.ids.size))
        suspect_seqs = [seq for seq in ordered if seq.index in scheduling.suspects]
        rest = [seq for seq in ordered if seq.index not in scheduling.suspects]
        num_queues = bool(suspect_seqs) + bool(rest)
        entry = _JobState(scheduling, self.kind_of(tokens), num_queues, next(self._numbers))
        priority, tenant = scheduling.priority, scheduling.tenant
        if priority not in self._levels:
            self._levels[priority] = _PriorityLevel()
        queues, suspect_tokens = self._levels[priority].queues, count_tokens(suspect_seqs)
        queues["suspect"].add(job, tenant, suspect_seqs, suspect_tokens, head_start=head_start)
        queues[entry.kind].add(job, tenant, rest, tokens - suspect_tokens, head_start=head_start)
        self._entries[job] = entry
        self._count(tokens, entry.kind, priority)
        if scheduling.deadline < inf:
            self._add_deadline(scheduling.deadline, entry.number, job)

    def cancel(self, job: K) -> None:
        if entry := self._entries.pop(job, None):
            self._expiring.pop(entry.number, None)
            priority, tenant = entry.scheduling.priority, entry.scheduling.tenant
            queues = self._levels[priority].queues
            for waiting in (queues["suspect"], queues[entry.kind]):
                self._count(-waiting.discard(job, tenant), entry.kind, priority)
            self._drop_empty(priority)

    def expire(self, now: float) -> list[K]:
        """Remove the jobs whose deadline has passed. Return those that were not returned before."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            if (job := self._expiring.get(number)) is not None:
                self.cancel(job)
                self._expired.append(job)
        expired, self._expired = self._expired, []
        return expired

    @property
    def wake_at(self) -> float:
        """The time at which the next waiting job expires; infinity if none does. A lane that waits wakes then."""
        while self._deadlines and self._deadlines[0][1] not in self._expiring:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else inf

    @property
    def num_shares(self) -> int:
        """About how many idle lanes `take` has a batch for."""
        return -(-self.queued_tokens // min(_MIN_SHARE, self.token_budget))

    @property
    def first_priority(self) -> float:
        """The priority of what `take` would return; infinity when nothing waits."""
        return min(self._levels, default=inf)

    @property
    def suspects_are_next(self) -> bool:
        """True if `take` would return suspects, which must be alone on the device."""
        return bool(self._levels) and self._levels[min(self._levels)].queues["suspect"].tokens > 0

    def take(self, now: float, idle_lanes: int = 1) -> ScheduledBatch[K] | None:
        """Return the next batch, or None when nothing waits.

        A text longer than the budget is a batch of its own. Several idle lanes share a small amount of work.
        """
        self._expired = self.expire(now)
        if not self._levels:
            return None
        priority = min(self._levels)
        level = self._levels[priority]
        kind = level.next_kind()
        level.last = kind
        share = max(_MIN_SHARE, -(-self.queued_tokens // max(idle_lanes, 1)))
        return ScheduledBatch(self._fill_batch(priority, kind, min(self.token_budget, share)), kind, priority)

    def take_small(self, now: float, priority: float = inf) -> ScheduledBatch[K] | None:
        """Return a batch of small jobs, of at most a quarter of a batch's tokens, to run beside bulk; else None.

        It is given if these are next at this priority or a more urgent one, and does not change whose turn is next.
        """
        self._expired = self.expire(now)
        if not self._levels or self.suspects_are_next:
            return None
        first = min(self._levels)
        if first > priority or not self._levels[first].queues["small"].tokens:
            return None
        budget = min(self.token_budget, max(_MIN_BUDGET, self._max_batch_tokens // _SMALL_PART))
        return ScheduledBatch(self._fill_batch(first, "small", budget), "small", first)

    def kind_of(self, tokens: int) -> Literal["small", "bulk"]:
        return "small" if tokens <= self._max_batch_tokens // _SMALL_PART else "bulk"

    def tokens_ahead(self, tokens: int, priority: int = 0, *, tenant: str = "") -> int:
        """Estimate the tokens that must run until a new request is done, its own included.

        These are all more urgent tokens, and those of its own queue that run before it is done. The other queue, with which its
        own alternates, adds as many and a batch. The time is linear in the number of priorities, not of jobs.
        """
        before = sum(level.tokens for urgent, level in self._levels.items() if urgent < priority)
        level = self._levels.get(priority)
        if level is None:
            return before + tokens
        kind = self.kind_of(tokens)
        done = level.queues[kind].tokens_ahead(tokens, tenant) + tokens
        other = level.queues["bulk" if kind == "small" else "small"].tokens
        return before + level.queues["suspect"].tokens + done + min(other, done + self.token_budget)

    def out_of_memory(self, num_tokens: int) -> None:
        """Note that a batch of `num_tokens` did not fit: the budget becomes half of that, and at least `_MIN_BUDGET`.

        A single text that is longer still runs, as a batch of its own.
        """
        self.token_budget = min(self.token_budget, max(_MIN_BUDGET, num_tokens // 2))
        self._good_batches = 0

    def succeeded(self) -> None:
        """Note that a batch was computed. Every few of them raise a lowered budget by a step."""
        if self.token_budget < self._max_batch_tokens:
            self._good_batches += 1
            if self._good_batches % _RECOVERY_BATCHES == 0:
                step = max(1, self._max_batch_tokens // _RECOVERY_PART)
                self.token_budget = min(self._max_batch_tokens, self.token_budget + step)

    def _fill_batch(self, priority: int, kind: Kind, budget: int) -> list[tuple[K, Seq]]:
        """Take seqs in turn until the next does not fit. The first always fits. A prefix that several share is counted once."""
        waiting = self._levels[priority].queues[kind]
        items: list[tuple[K, Seq]] = []
        max_seqs: float = inf
        rows = RowCount()
        while waiting.tokens:
            job, seq = waiting.head()
            size = seq.ids.size
            entry = self._entries[job]
            if kind == "suspect":
                max_seqs = min(max_seqs, entry.scheduling.suspects[seq.index])
            is_full = rows.num_rows + rows.rows_of(seq) > budget or rows.num_tokens + size > MAX_SHARED * budget
            if items and (is_full or len(items) >= max_seqs):
                break
            items.append((job, seq))
            rows.add(seq)
            self._count(-size, entry.kind, priority)
            if waiting.pop():
                entry.num_queues -= 1
                if not entry.num_queues:
                    del self._entries[job]
                    self._expiring.pop(entry.number, None)
        self._drop_empty(priority)
        return items

    def _drop_empty(self, priority: int) -> None:
        if not self._levels[priority].tokens:
            del self._levels[priority]

    def _count(self, tokens: int, kind: Kind, priority: int) -> None:
        small = tokens if kind == "small" else 0
        self.queued_tokens += tokens
        self.small_tokens += small
        if priority <= ORDINARY.priority:
            self.ordinary_tokens += tokens
            self.ordinary_small_tokens += small

    def _add_deadline(self, deadline: float, number: int, job: K) -> None:
        if len(self._deadlines) > 2 * len(self._expiring) + 64:  # most of these jobs are gone
            self._deadlines = [item for item in self._deadlines if item[1] in self._expiring]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, number))
        self._expiring[number] = job


@dataclass(slots=True, eq=False)
class _JobState:
    scheduling: Scheduling
    kind: Literal["small", "bulk"]
    num_queues: int
    number: int
    """The number that its deadline refers to."""


class _PriorityLevel(Generic[K]):
    def __init__(self) -> None:
        self.queues: dict[Kind, FairQueue[K]] = {"suspect": FairQueue(), "small": FairQueue(), "bulk": FairQueue()}
        self.last: Kind = "bulk"

    @property
    def tokens(self) -> int:
        return sum(waiting.tokens for waiting in self.queues.values())

    def next_kind(self) -> Kind:
        if self.queues["suspect"].tokens:
            return "suspect"
        small, bulk = self.queues["small"].tokens, self.queues["bulk"].tokens
        if small and bulk:
            return "bulk" if self.last == "small" else "small"
        return "small" if small else "bulk"
