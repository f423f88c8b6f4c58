"""Whose seq is next: tenants in turn, and of a tenant's jobs the one that an even share would finish first. Pure.

Theory of operation. If the jobs of a tenant shared it evenly, a small one would soon be done whatever waits beside it, but many
equal ones would all be done at the very end. So even sharing is only imagined: each job gets a *tag* when it comes, the virtual
time at which it would be done, and the job of the least tag runs. No job is done later than under even shares, but for a seq;
most are done sooner, and equal ones in the order in which they came. Virtual time advances, while the tenant is served,
by the tokens served over the number of jobs that would still share it. Source: Friedman and Henderson, "Fairness and
efficiency in web server protocols" (SIGMETRICS 2003), the fair sojourn protocol.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from whimbrel.types.seq import Seq

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True, eq=False)
class _JobQueue(Generic[K]):
    """The seqs of a job that wait in a round; no job once they are taken or discarded, so that nothing is kept of it."""

    job: K | None
    seqs: deque[Seq]
    tokens: int
    is_virtual_active: bool = True
    """Whether even shares would still have it to do."""


@dataclass(slots=True, eq=False)
class _TenantQueue(Generic[K]):
    """The waiting jobs of a tenant."""

    queues: dict[K, _JobQueue[K]] = field(default_factory=dict[K, "_JobQueue[K]"])
    heap: list[tuple[float, int, _JobQueue[K]]] = field(default_factory=list[tuple[float, int, "_JobQueue[K]"]])
    """(tag, number, line) of each job; those that were discarded stay a while."""
    virtual_work: list[tuple[float, int, _JobQueue[K]]] = field(default_factory=list[tuple[float, int, "_JobQueue[K]"]])
    """Likewise, of the jobs that even shares would not have finished yet."""
    num_active: int = 0
    """Of those, without the discarded ones."""
    time: float = 0.0
    """Virtual, in tokens."""
    tokens: int = 0

    def advance_virtual_time(self, tokens: float) -> None:
        """Let virtual time advance."""
        while self.virtual_work:
            tag, _, line = self.virtual_work[0]
            if line.is_virtual_active:
                until_it_is_done = (tag - self.time) * self.num_active
                if until_it_is_done > tokens:
                    self.time += tokens / self.num_active
                    return
                tokens -= until_it_is_done
                self.time = tag
                self.deactivate(line)
            heapq.heappop(self.virtual_work)

    def add(self, tag: float, number: int, line: _JobQueue[K]) -> None:
        """Note a job that came, and now and then forget those that are gone."""
        if len(self.heap) > 2 * len(self.queues) + 64:
            self.heap = [item for item in self.heap if item[2].job is not None]
            heapq.heapify(self.heap)
        if len(self.virtual_work) > 2 * self.num_active + 64:
            self.virtual_work = [item for item in self.virtual_work if item[2].is_virtual_active]
            heapq.heapify(self.virtual_work)
        heapq.heappush(self.heap, (tag, number, line))
        heapq.heappush(self.virtual_work, (tag, number, line))
        self.num_active += 1

    def deactivate(self, line: _JobQueue[K]) -> None:
        """Even shares would have nothing to do for it any more."""
        if line.is_virtual_active:
            line.is_virtual_active = False
            self.num_active -= 1

    def head(self) -> tuple[K, _JobQueue[K]]:
        while (job := self.heap[0][2].job) is None:
            heapq.heappop(self.heap)
        return job, self.heap[0][2]


class FairQueue(Generic[K]):
    """Seqs that wait for their turn."""

    def __init__(self) -> None:
        self.tokens = 0
        self._tenants: OrderedDict[str, _TenantQueue[K]] = OrderedDict()
        self._numbers = count()

    def add(self, job: K, name: str, seqs: Sequence[Seq]) -> None:
        """Queue seqs of a job that has none here, in the order in which they are to run."""
        if not seqs:
            return
        tenant = self._tenants.setdefault(name, _TenantQueue())
        line = tenant.queues[job] = _JobQueue(job, deque(seqs), sum(seq.ids.size for seq in seqs))
        tenant.add(tenant.time + line.tokens, next(self._numbers), line)
        tenant.tokens += line.tokens
        self.tokens += line.tokens

    def discard(self, job: K, name: str) -> int:
        """Remove what waits of a job, and return how many tokens that was."""
        tenant = self._tenants.get(name)
        line = tenant.queues.pop(job, None) if tenant else None
        if tenant is None or line is None:
            return 0
        line.job = None
        line.seqs.clear()
        tenant.deactivate(line)
        tenant.tokens -= line.tokens
        self.tokens -= line.tokens
        if not tenant.queues:
            del self._tenants[name]
        return line.tokens

    def head(self) -> tuple[K, Seq]:
        """Whose turn it is, and with what. Raises StopIteration if nobody waits here."""
        job, line = next(iter(self._tenants.values())).head()
        return job, line.seqs[0]

    def pop(self) -> bool:
        """Remove the head; its tenant goes to the end of the round. Returns whether it was the job's last."""
        name, tenant = next(iter(self._tenants.items()))
        job, line = tenant.head()
        size = line.seqs.popleft().ids.size
        tenant.advance_virtual_time(size)
        line.tokens -= size
        tenant.tokens -= size
        self.tokens -= size
        if not line.seqs:
            line.job = None
            del tenant.queues[job]
        if tenant.queues:
            self._tenants.move_to_end(name)
        else:
            del self._tenants[name]
        return not line.seqs

    def tokens_ahead(self, tokens: int, name: str) -> int:
        """About how many of the tokens here run before a new job of this tenant, of so many tokens, is done."""
        tenant = self._tenants.get(name)
        own = min(tenant.tokens, len(tenant.queues) * tokens) if tenant else 0
        others = len(self._tenants) - (1 if tenant else 0)
        foreign = self.tokens - (tenant.tokens if tenant else 0)
        return own + min(foreign, others * (own + tokens))
