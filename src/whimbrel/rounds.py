"""Round robin: owners in turn, the jobs of an owner in turn, one seq each. Pure; a part of the scheduler."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from whimbrel.types import Seq

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Line:
    """The seqs of a job that wait in a round."""

    seqs: deque[Seq]
    tokens: int


class Round(Generic[K]):
    """Seqs that wait for their turn."""

    def __init__(self) -> None:
        self.tokens = 0
        self._num_seqs = 0
        self._owners: OrderedDict[str, OrderedDict[K, _Line]] = OrderedDict()

    def add(self, job: K, owner: str, seqs: Sequence[Seq]) -> None:
        """Queue seqs of a job that has none here, in the order in which they are to run."""
        if seqs:
            line = _Line(deque(seqs), sum(seq.ids.size for seq in seqs))
            self._owners.setdefault(owner, OrderedDict())[job] = line
            self.tokens += line.tokens
            self._num_seqs += len(seqs)

    def discard(self, job: K, owner: str) -> int:
        """Remove what waits of a job, and return how many tokens that was."""
        jobs = self._owners.get(owner)
        line = jobs.pop(job, None) if jobs else None
        if line is None:
            return 0
        self.tokens -= line.tokens
        self._num_seqs -= len(line.seqs)
        if not jobs:
            del self._owners[owner]
        return line.tokens

    def head(self) -> tuple[K, Seq]:
        """Whose turn it is, and with what."""
        for jobs in self._owners.values():
            for job, line in jobs.items():
                return job, line.seqs[0]
        raise IndexError("nobody waits here")

    def pop(self) -> bool:
        """Remove the head; its owner and its job go to the end of their rounds. Returns whether it was the job's last."""
        owner, jobs = next(iter(self._owners.items()))
        job, line = next(iter(jobs.items()))
        size = line.seqs.popleft().ids.size
        line.tokens -= size
        self.tokens -= size
        self._num_seqs -= 1
        if not line.seqs:
            del jobs[job]
            if not jobs:
                del self._owners[owner]
                return True
        else:
            jobs.move_to_end(job)
        self._owners.move_to_end(owner)
        return not line.seqs

    def ahead(self, num_seqs: int, owner: str) -> int:
        """About how many of the tokens here run before a new job of this owner has had so many turns."""
        if not self.tokens:
            return 0
        own = len(self._owners.get(owner, ()))
        others = len(self._owners) - (1 if own else 0)
        rivals = own + others * (own + 1)  # seqs that run between two turns of the job
        return min(self.tokens, num_seqs * rivals * self.tokens // self._num_seqs)
