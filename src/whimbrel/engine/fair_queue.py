"""Fair queueing: tenants take turns, and each tenant's jobs run in the order in which an even share would finish them. Pure.

Theory of operation. If the jobs of a tenant shared its turns evenly, a small job would soon be done whatever waits beside it.
But many equal jobs would all be done at the very end. So even sharing is only simulated. Each job that comes gets a *virtual
finish*: the virtual time at which even sharing would finish it. The job with the least virtual finish runs. No job is done
later than under even sharing by more than one seq; most are done sooner, and equal jobs in the order in which they came. While
a tenant is served, its virtual time advances by the tokens served, divided by the number of jobs that would still be active
under even sharing.

A caller that gave up and comes back has waited before. Its job gets a *head start*: what even sharing would have given it
meanwhile counts as served. So it runs before the jobs that came after its first try, and a caller whose patience is shorter
than the queue is served in one of its next tries.

Source: Friedman and Henderson, "Fairness and efficiency in web server protocols" (SIGMETRICS 2003), the fair sojourn protocol.
"""

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
    """The waiting seqs of a job. Its job is None once they are taken or discarded, so that the job can be freed."""

    job: K | None
    seqs: deque[Seq]
    tokens: int
    is_virtual_active: bool = True


@dataclass(slots=True, eq=False)
class _TenantQueue(Generic[K]):
    queues: dict[K, _JobQueue[K]] = field(default_factory=dict[K, "_JobQueue[K]"])
    heap: list[tuple[float, int, _JobQueue[K]]] = field(default_factory=list[tuple[float, int, "_JobQueue[K]"]])
    """(virtual finish, number, queue) of each job; discarded ones stay for a while."""
    virtual_work: list[tuple[float, int, _JobQueue[K]]] = field(default_factory=list[tuple[float, int, "_JobQueue[K]"]])
    """The same for the jobs that even sharing would not have finished yet."""
    num_active: int = 0
    """Jobs that would be active under even sharing."""
    time: float = 0.0
    """Virtual time, in tokens."""
    tokens: int = 0

    def advance_virtual_time(self, tokens: float) -> None:
        while self.virtual_work:
            finish, _, queue = self.virtual_work[0]
            if queue.is_virtual_active:
                tokens_until_done = (finish - self.time) * self.num_active
                if tokens_until_done > tokens:
                    self.time += tokens / self.num_active
                    return
                tokens -= tokens_until_done
                self.time = finish
                self.deactivate(queue)
            heapq.heappop(self.virtual_work)

    def add(self, number: int, queue: _JobQueue[K], head_start: float) -> None:
        """Add a job; now and then drop the entries of jobs that are gone."""
        finish = self.time + queue.tokens
        if len(self.heap) > 2 * len(self.queues) + 64:
            self.heap = [item for item in self.heap if item[2].job is not None]
            heapq.heapify(self.heap)
        if len(self.virtual_work) > 2 * self.num_active + 64:
            self.virtual_work = [item for item in self.virtual_work if item[2].is_virtual_active]
            heapq.heapify(self.virtual_work)
        heapq.heappush(self.heap, (finish - head_start / max(self.num_active, 1), number, queue))
        heapq.heappush(self.virtual_work, (finish, number, queue))
        self.num_active += 1

    def deactivate(self, queue: _JobQueue[K]) -> None:
        """Note that even sharing would have finished the job, or that it is gone."""
        if queue.is_virtual_active:
            queue.is_virtual_active = False
            self.num_active -= 1

    def head(self) -> tuple[K, _JobQueue[K]]:
        while (job := self.heap[0][2].job) is None:
            heapq.heappop(self.heap)
        return job, self.heap[0][2]


class FairQueue(Generic[K]):
    def __init__(self) -> None:
        self.tokens = 0
        self._tenants: OrderedDict[str, _TenantQueue[K]] = OrderedDict()
        self._numbers = count()

    def add(self, job: K, tenant_name: str, seqs: Sequence[Seq], tokens: int, *, head_start: float = 0.0) -> None:
        """Queue the seqs of a job that has none here, of `tokens` tokens, in the order in which they run.

        `head_start` is the number of tokens that ran while the caller waited in earlier tries.
        """
        if not seqs:
            return
        tenant = self._tenants.setdefault(tenant_name, _TenantQueue())
        queue = tenant.queues[job] = _JobQueue(job, deque(seqs), tokens)
        tenant.add(next(self._numbers), queue, head_start)
        tenant.tokens += queue.tokens
        self.tokens += queue.tokens

    def discard(self, job: K, tenant_name: str) -> int:
        tenant = self._tenants.get(tenant_name)
        queue = tenant.queues.pop(job, None) if tenant else None
        if tenant is None or queue is None:
            return 0
        queue.job = None
        queue.seqs.clear()
        tenant.deactivate(queue)
        tenant.tokens -= queue.tokens
        self.tokens -= queue.tokens
        if not tenant.queues:
            del self._tenants[tenant_name]
        return queue.tokens

    def head(self) -> tuple[K, Seq]:
        """Return the job whose turn it is, and its next seq. Raises StopIteration if the queue is empty."""
        job, queue = next(iter(self._tenants.values())).head()
        return job, queue.seqs[0]

    def pop(self) -> bool:
        """Remove the head; its tenant goes to the end of the turns. Return whether it was the job's last seq."""
        name, tenant = next(iter(self._tenants.items()))
        job, queue = tenant.head()
        size = queue.seqs.popleft().ids.size
        tenant.advance_virtual_time(size)
        queue.tokens -= size
        tenant.tokens -= size
        self.tokens -= size
        if not queue.seqs:
            queue.job = None
            del tenant.queues[job]
        if tenant.queues:
            self._tenants.move_to_end(name)
        else:
            del self._tenants[name]
        return not queue.seqs

    def tokens_ahead(self, tokens: int, tenant_name: str) -> int:
        """Return about how many tokens run before a new job of this tenant, of `tokens` tokens, would be done."""
        tenant = self._tenants.get(tenant_name)
        own = min(tenant.tokens, len(tenant.queues) * tokens) if tenant else 0
        others = len(self._tenants) - (1 if tenant else 0)
        foreign = self.tokens - (tenant.tokens if tenant else 0)
        return own + min(foreign, others * (own + tokens))
