"""Whose seq is next: owners in turn, and of an owner's jobs the one that an even share would finish first. Pure.

Theory of operation. If the jobs of an owner shared it evenly, a small one would soon be done whatever waits beside it, but many
equal ones would all be done at the very end. So even sharing is only imagined: each job gets a *tag* when it comes, the virtual
time at which it would be done, and the job of the least tag runs. No job is done later than under even shares, but for a seq;
most are done sooner, and equal ones in the order in which they came. Virtual time advances, while the owner is served,
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
class _Line(Generic[K]):
    """The seqs of a job that wait in a round; no job once they are taken or discarded, so that nothing is kept of it."""

    job: K | None
    seqs: deque[Seq]
    tokens: int
    shares: bool = True
    """Whether even shares would still have it to do."""


@dataclass(slots=True, eq=False)
class _Owner(Generic[K]):
    """The waiting jobs of an owner."""

    lines: dict[K, _Line[K]] = field(default_factory=dict[K, "_Line[K]"])
    heap: list[tuple[float, int, _Line[K]]] = field(default_factory=list[tuple[float, int, "_Line[K]"]])
    """(tag, number, line) of each job; those that were discarded stay a while."""
    shared: list[tuple[float, int, _Line[K]]] = field(default_factory=list[tuple[float, int, "_Line[K]"]])
    """Likewise, of the jobs that even shares would not have finished yet."""
    num_sharing: int = 0
    """Of those, without the discarded ones."""
    time: float = 0.0
    """Virtual, in tokens."""
    tokens: int = 0

    def served(self, tokens: float) -> None:
        """Let virtual time advance."""
        while self.shared:
            tag, _, line = self.shared[0]
            if line.shares:
                until_it_is_done = (tag - self.time) * self.num_sharing
                if until_it_is_done > tokens:
                    self.time += tokens / self.num_sharing
                    return
                tokens -= until_it_is_done
                self.time = tag
                self.unshare(line)
            heapq.heappop(self.shared)

    def add(self, tag: float, number: int, line: _Line[K]) -> None:
        """Note a job that came, and now and then forget those that are gone."""
        if len(self.heap) > 2 * len(self.lines) + 64:
            self.heap = [item for item in self.heap if item[2].job is not None]
            heapq.heapify(self.heap)
        if len(self.shared) > 2 * self.num_sharing + 64:
            self.shared = [item for item in self.shared if item[2].shares]
            heapq.heapify(self.shared)
        heapq.heappush(self.heap, (tag, number, line))
        heapq.heappush(self.shared, (tag, number, line))
        self.num_sharing += 1

    def unshare(self, line: _Line[K]) -> None:
        """Even shares would have nothing to do for it any more."""
        if line.shares:
            line.shares = False
            self.num_sharing -= 1

    def first(self) -> tuple[K, _Line[K]]:
        while (job := self.heap[0][2].job) is None:
            heapq.heappop(self.heap)
        return job, self.heap[0][2]


class Round(Generic[K]):
    """Seqs that wait for their turn."""

    def __init__(self) -> None:
        self.tokens = 0
        self._owners: OrderedDict[str, _Owner[K]] = OrderedDict()
        self._numbers = count()

    def add(self, job: K, name: str, seqs: Sequence[Seq]) -> None:
        """Queue seqs of a job that has none here, in the order in which they are to run."""
        if not seqs:
            return
        owner = self._owners.setdefault(name, _Owner())
        line = owner.lines[job] = _Line(job, deque(seqs), sum(seq.ids.size for seq in seqs))
        owner.add(owner.time + line.tokens, next(self._numbers), line)
        owner.tokens += line.tokens
        self.tokens += line.tokens

    def discard(self, job: K, name: str) -> int:
        """Remove what waits of a job, and return how many tokens that was."""
        owner = self._owners.get(name)
        line = owner.lines.pop(job, None) if owner else None
        if owner is None or line is None:
            return 0
        line.job = None
        line.seqs.clear()
        owner.unshare(line)
        owner.tokens -= line.tokens
        self.tokens -= line.tokens
        if not owner.lines:
            del self._owners[name]
        return line.tokens

    def head(self) -> tuple[K, Seq]:
        """Whose turn it is, and with what. Raises StopIteration if nobody waits here."""
        job, line = next(iter(self._owners.values())).first()
        return job, line.seqs[0]

    def pop(self) -> bool:
        """Remove the head; its owner goes to the end of the round. Returns whether it was the job's last."""
        name, owner = next(iter(self._owners.items()))
        job, line = owner.first()
        size = line.seqs.popleft().ids.size
        owner.served(size)
        line.tokens -= size
        owner.tokens -= size
        self.tokens -= size
        if not line.seqs:
            line.job = None
            del owner.lines[job]
        if owner.lines:
            self._owners.move_to_end(name)
        else:
            del self._owners[name]
        return not line.seqs

    def ahead(self, tokens: int, name: str) -> int:
        """About how many of the tokens here run before a new job of this owner, of so many tokens, is done."""
        owner = self._owners.get(name)
        own = min(owner.tokens, len(owner.lines) * tokens) if owner else 0
        others = len(self._owners) - (1 if owner else 0)
        foreign = self.tokens - (owner.tokens if owner else 0)
        return own + min(foreign, others * (own + tokens))
