"""Engine requests: a tokenized request with its layouts and its finish, the one message to an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from whimbrel.outputs.finishers import Finish, ReturnRows, ReturnRowsWithOffsets, response_layout
from whimbrel.outputs.layout import ResultLayout
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.types.result import Outputs, Result, Timings
from whimbrel.types.seq import Seq


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The time at which a request runs, and the seqs beside which it may run."""

    priority: int = 0
    """Lower numbers run first."""
    deadline: float = inf
    """The time (perf_counter) from which the response is of no use."""
    tenant: str = ""
    """The caller whose share of the engine the request uses."""
    suspects: Mapping[int, int] = field(default_factory=dict[int, int])
    """Seqs that were on the device when an engine died, and the number of seqs that each may share a batch with."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """A tokenized request. It carries its layouts, so that nothing after tokenization plans them again."""

    seqs: Sequence[Seq]
    layout: ResultLayout
    """The layout of the rows that the model gives."""
    received: float
    """The time at which the request came (perf_counter)."""
    tokenize: float = 0.0
    """Seconds that tokenization took."""
    finish: Finish = field(default_factory=ReturnRows)
    scheduling: Scheduling = field(default_factory=Scheduling)
    num_truncated: int = 0
    """Texts that were truncated."""
    num_tokens: int = field(init=False)
    response: ResultLayout = field(init=False)
    """The layout of the response: the rows, or the scores of pairs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(seq.ids.size for seq in self.seqs))
        object.__setattr__(self, "response", response_layout(self.layout, self.finish))

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute: no seq and no pair."""
        return not self.seqs and not isinstance(self.finish, PairScoring)

    def result(self, outputs: Outputs, timings: Timings) -> Result:
        """Return the result that these outputs are."""
        return Result(
            outputs,
            self.num_tokens,
            self.num_truncated,
            timings,
            token_offsets=self.finish.token_offsets if isinstance(self.finish, ReturnRowsWithOffsets) else None,
            pair_tokens=self.finish.pair_tokens if isinstance(self.finish, PairScoring) else None,
        )
