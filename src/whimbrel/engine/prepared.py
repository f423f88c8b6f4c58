"""TODO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from whimbrel.types.late_interaction import TokenPooling

if TYPE_CHECKING:
    from whimbrel.outputs.layout import ResultLayout
    from whimbrel.outputs.merge import ChunkMerge, Deduplication
    from whimbrel.outputs.multi_vector import TokenReduction
from whimbrel.outputs.layout import ResultLayout
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.types.seq import PairTokens, Seq, TokenOffsets


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """A tokenised request and what is to become of it: the one message that goes to an engine."""

    seqs: Sequence[Seq]
    layout: ResultLayout
    """What it asks of the model, and where each row lies."""
    num_tokens: int
    num_truncated: int
    received: float
    """When the request came (time.perf_counter)."""
    tokenize: float
    """Seconds that tokenising took."""
    priority: int = 0
    deadline: float = inf
    tenant: str = ""
    pair_scoring: PairScoring | None = None
    """What the answer is made of it; None: it is the answer."""
    merge: ChunkMerge | Deduplication | None = None
    """How what is given for seqs becomes the answer, where they are not the texts; it stays where the request came in."""
    reduction: TokenReduction | None = None
    """What becomes of token vectors: of documents that are compared in the engine, else where the request came in."""
    token_offsets: Sequence[TokenOffsets] | None = None
    """Of each text, if the request asked for them; they stay where it was tokenised."""
    pair_tokens: Sequence[PairTokens] | None = None
    """Of each pair, if the request asked for an explanation; they stay here too."""
    suspects: Mapping[int, int] = field(default_factory=dict[int, int])
    """Seqs that were on the device when an engine died, by index: each may share a batch with so many seqs at most, and runs
    while nothing else does."""

    @property
    def pooling(self) -> TokenPooling | None:
        """Of documents that are compared."""
        return None if self.pair_scoring is None or self.reduction is None else self.reduction.pooling
