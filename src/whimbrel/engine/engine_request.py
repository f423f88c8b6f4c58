"""Engine requests, the jobs that an engine makes of them, and the observer of its batches. No torch, no threads."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from whimbrel.outputs.finishers import Finish, Finisher
from whimbrel.outputs.layout import ResultLayout, scores_layout
from whimbrel.outputs.list_scoring import ListScoring
from whimbrel.outputs.merge import ReturnRows, ReturnRowsWithOffsets
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.types.result import Outputs, Result, Timings
from whimbrel.types.scheduling import ORDINARY, Scheduling
from whimbrel.types.seq import Seq, count_tokens

_ID_BYTES: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """A tokenized request, and the only message to an engine. Nothing after tokenization plans its layouts again."""

    seqs: Sequence[Seq]
    layout: ResultLayout
    """The layout of the rows that the model gives."""
    received: float
    """The time at which the request came (perf_counter)."""
    tokenize: float = 0.0
    """Seconds that tokenization took."""
    finish: Finish = field(default_factory=ReturnRows)
    scheduling: Scheduling = ORDINARY
    num_truncated: int = 0
    num_tokens: int = field(init=False)
    """Tokens of all seqs."""
    response: ResultLayout = field(init=False)
    """The layout of the response: the rows, or the scores of pairs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", count_tokens(self.seqs))
        response = scores_layout(self.layout, self.finish) if isinstance(self.finish, PairScoring) else self.layout
        object.__setattr__(self, "response", response)

    @property
    def is_empty(self) -> bool:
        return not self.seqs and not isinstance(self.finish, PairScoring)

    def result(self, outputs: Outputs, timings: Timings) -> Result:
        finish = self.finish
        offsets = finish.token_offsets if isinstance(finish, ReturnRowsWithOffsets) else None
        pair_tokens = finish.pair_tokens if isinstance(finish, PairScoring) else None
        listwise = isinstance(finish, ListScoring)
        return Result(outputs, self.num_tokens, self.num_truncated, timings, offsets, pair_tokens, listwise=listwise)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    """A request on its way. The dispatcher owns it: whoever removes it from there sets its Future."""

    future: Future[Result]
    request: EngineRequest
    finisher: Finisher
    origin: object = None
    """The name that an observer of batches knows the job by."""
    queue: float = -1.0
    """Seconds until its first seq was taken; negative until then."""
    compute: float = 0.0
    """Seconds of the batches that its seqs took part in."""
    seqs: Sequence[Seq] = field(init=False)
    """The seqs that are computed: those of the request whose rows are not known yet."""
    num_tokens: int = field(init=False)
    num_pending: int = field(init=False)
    """Seqs that are not collected yet, and steps of the finisher that have not run."""

    def __post_init__(self) -> None:
        skipped = self.finisher.skipped_seqs
        self.seqs = [seq for seq in self.request.seqs if seq.index not in skipped] if skipped else self.request.seqs
        self.num_tokens = count_tokens(self.seqs) if skipped else self.request.num_tokens
        self.num_pending = len(self.seqs) + self.finisher.num_steps

    @property
    def num_bytes(self) -> int:
        """Memory of its token ids, its response and its finisher, in bytes."""
        return _ID_BYTES * self.num_tokens + self.request.response.num_bytes + self.finisher.num_bytes


BatchItems: TypeAlias = list[tuple[Job, Seq]]
"""The seqs of one batch, each with its job."""


class BatchObserver:
    """Is told which batches are on the device, so that another process can tell what ran when this one died.

    Called from several threads; must be quick and must not raise. This one does nothing.
    """

    def started(self, items: BatchItems) -> int:
        """Note that these seqs are about to be launched by this thread. Return the slot that the others are called with."""
        return 0

    def resumed(self, slot: int) -> None:
        """Note that the batch, a text in pieces, goes on with its next piece."""

    def ended(self, slot: int) -> None:
        """Note that the batch was collected, or failed."""
