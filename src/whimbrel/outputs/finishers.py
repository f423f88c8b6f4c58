"""Finishers: from the rows that batches give to the outputs of one request. numpy only.

The use of a request's rows is one tagged value, its finish. A `Finisher` carries it out: the lanes hand it the rows of each
batch, in any order. Once every seq and every step is done, `result` returns the outputs. A finisher knows no queue, no
lock and no Future.

Where a request runs in an engine process, the engine carries out pair scoring, and the worker everything else: it owns the
texts.

Shapes: B seqs of a batch, S seqs of the request, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest, NonFinite, WhimbrelError
from whimbrel.outputs.layout import ResultLayout, build_outputs, concat_sparse, estimated_bytes
from whimbrel.outputs.merge import ReturnRows
from whimbrel.outputs.multi_vector import TokenReduction, pool_all
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.rows import BatchOutput, DeviceRows
from whimbrel.outputs.similarity import score_pairs
from whimbrel.types.arrays import Float32Array, Int32Array
from whimbrel.types.batch import ranges
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.result import Outputs, Ragged, Sparse

Step: TypeAlias = Callable[[], None]
"""Work of a finisher that any thread may do. Raises MemoryError."""


Finish: TypeAlias = ReturnRows | PairScoring
"""The use of a request's rows. A ReturnRows is carried out in the process that tokenized the request."""


def locate_error(error: WhimbrelError, finish: Finish) -> WhimbrelError:
    """Return an error that names a seq as one that names the text of the request, or the part of a pair."""
    return error.relocated(lambda location: location if location.item is None else finish.locate(location))


class Finisher(Protocol):
    adds_slowly: bool = False
    """True if `add` may take long, so that it runs in the finish pool. If not, it may write into the response."""
    finishes_slowly: bool = False
    """True if `result` may take long, so that it runs in the finish pool."""
    num_bytes: int
    """Memory that it holds besides the response, in bytes."""
    skipped_seqs: Collection[int] = frozenset[int]()
    """Seqs whose rows are known, and need not be computed."""
    first_seqs: Collection[int] = frozenset[int]()
    """Seqs that are scheduled before the others of the request."""
    num_steps: int = 0
    """Steps that must run in addition to `add` of every seq."""

    def take_steps(self) -> Sequence[Step]:
        """Return the steps that may run from now on, each once."""
        return ()

    def add(self, batch: BatchOutput, seqs_B: NDArray[np.integer], seqs_S: NDArray[np.integer]) -> Sequence[Step]:
        """Take the rows of the batch's seqs `seqs_B`, which are the request's seqs `seqs_S`. Return the steps that may run from
        now on. Raises MemoryError and ComputeError.
        """
        ...

    def result(self) -> Outputs:
        """Return the outputs, once all seqs were added and all steps have run. Raises WhimbrelError and MemoryError."""
        ...


class RowsFinisher(Finisher):
    """Scatters rows into the arrays of a layout, and applies a local finish at the end."""

    def __init__(self, layout: ResultLayout, memory: NDArray[np.uint8], finish: ReturnRows, *, num_seqs: int) -> None:
        """`memory` holds the arrays of the layout; nothing is written to it after `result`."""
        self._layout = layout
        self._memory = memory
        self._arrays = layout.arrays(memory)
        self._sparse_rows: dict[int, tuple[Int32Array, Float32Array]] = {}
        self._finish = finish
        self.finishes_slowly = isinstance(finish, TokenReduction | VectorScores)
        self.num_bytes = estimated_bytes(layout) * num_seqs

    def add(self, batch: BatchOutput, seqs_B: NDArray[np.integer], seqs_S: NDArray[np.integer]) -> Sequence[Step]:
        for slot, array_PD in zip(self._layout.by_name.values(), self._arrays.values(), strict=True):
            name = slot.spec.name
            offsets_B1 = batch.selections[name].offsets_B1
            source = ranges(offsets_B1[seqs_B], offsets_B1[seqs_B + 1])
            target = ranges(slot.offsets_N1[seqs_S], slot.offsets_N1[seqs_S + 1])
            array_PD[target] = cast(Float32Array, batch.rows[name])[source, : slot.spec.num_columns]
        if (dynamic := self._layout.dynamic_output) is not None:
            sparse = cast(Sparse, batch.rows[dynamic.name])
            rows: list[int] = batch.selections[dynamic.name].offsets_B1[seqs_B].tolist()
            self._sparse_rows |= {seq: sparse[row] for row, seq in zip(rows, seqs_S.tolist(), strict=True)}
        return ()

    def result(self) -> Outputs:
        entries = None if self._layout.dynamic_output is None else concat_sparse(self._sparse_rows)
        return self._finish.apply(build_outputs(self._layout, self._memory, entries))


@dataclass(frozen=True, slots=True, eq=False)
class VectorScores(ReturnRows):
    """The scores of pairs by their dense or sparse vectors, written to `scores_P1`."""

    pairs: PairScoring
    scores_P1: Float32Array
    num_seqs: int

    def apply(self, outputs: Outputs) -> Outputs:
        self.scores_P1[:, 0] = _checked_scores(self.pairs, score_pairs(outputs, self.pairs), self.num_seqs)
        return Outputs(scores=self.scores_P1)


class TokenScorer(Protocol):
    """Late interaction over token vectors as they come; model/maxsim_scorer.py explains it."""

    scores: Float32Array
    token_matches: Ragged | None
    known_documents: Collection[int]
    num_steps: int

    def take_steps(self) -> Sequence[Step]: ...

    def add(
        self, rows_XD: Any, texts: NDArray[np.integer], starts: NDArray[np.integer], ends: NDArray[np.integer]
    ) -> Sequence[Step]: ...


class MaxSimFinisher(Finisher):
    """Scores pairs by late interaction while their token vectors come, and keeps none of them."""

    adds_slowly = True
    finishes_slowly = True

    def __init__(
        self, rows: ResultLayout, pairs: PairScoring, scorer: TokenScorer, response: Outputs, *, num_seqs: int
    ) -> None:
        """`response` holds the arrays that `result` writes the scores, and the token matches of an explanation, to."""
        self._pairs = pairs
        self._scorer = scorer
        self._response = response
        self._num_seqs = num_seqs
        self._width = rows.by_name["multi_vector"].spec.width
        self.skipped_seqs = scorer.known_documents
        # Documents that are computed before their query would have to be kept.
        self.first_seqs = frozenset[int](pairs.queries_P.tolist())
        self.num_steps = scorer.num_steps
        self.num_bytes = _stored_bytes(pairs)

    def take_steps(self) -> Sequence[Step]:
        return self._scorer.take_steps()

    def add(self, batch: BatchOutput, seqs_B: NDArray[np.integer], seqs_S: NDArray[np.integer]) -> Sequence[Step]:
        pairs = self._pairs
        if not pairs.poolings and not pairs.query_poolings:
            return self._score(batch, seqs_B, seqs_S, ())
        is_query = np.isin(seqs_S, pairs.queries_P)
        return [
            *self._score(batch, seqs_B[is_query], seqs_S[is_query], pairs.query_poolings),
            *self._score(batch, seqs_B[~is_query], seqs_S[~is_query], pairs.poolings),
        ]

    def _score(
        self,
        batch: BatchOutput,
        seqs_B: NDArray[np.integer],
        seqs_S: NDArray[np.integer],
        poolings: Sequence[TokenPooling],
    ) -> Sequence[Step]:
        offsets_B1 = batch.selections["multi_vector"].offsets_B1
        rows = batch.rows["multi_vector"]
        vectors_XD: Any = (rows.rows_PD if isinstance(rows, DeviceRows) else cast(Float32Array, rows))[:, : self._width]
        starts, ends = offsets_B1[seqs_B], offsets_B1[seqs_B + 1]
        if poolings:
            host_XD = cast(Float32Array, vectors_XD.cpu().numpy() if isinstance(rows, DeviceRows) else vectors_XD)
            texts = Ragged(host_XD[ranges(starts, ends)], np.concatenate(([0], np.cumsum(ends - starts))))
            fewer = pool_all(texts, poolings)
            vectors_XD, starts, ends = fewer.rows_XD, fewer.offsets_N1[:-1], fewer.offsets_N1[1:]
        return self._scorer.add(vectors_XD, seqs_S, starts, ends)

    def result(self) -> Outputs:
        assert self._response.scores is not None
        self._response.scores[:, 0] = _checked_scores(self._pairs, self._scorer.scores, self._num_seqs)
        if self._response.token_matches is not None:
            assert self._scorer.token_matches is not None
            self._response.token_matches.rows_XD[:] = self._scorer.token_matches.rows_XD
        return self._response


def make_finisher(
    layout: ResultLayout,
    response: ResultLayout,
    finish: Finish,
    memory: NDArray[np.uint8],
    *,
    num_seqs: int,
    make_scorer: Callable[[PairScoring, Ragged | None], TokenScorer],
) -> Finisher:
    """Return the finisher of a request. `memory` holds the response; `make_scorer` gets the token matches that it fills in."""
    if not isinstance(finish, PairScoring):
        return RowsFinisher(layout, memory, finish, num_seqs=num_seqs)
    outputs = build_outputs(response, memory, None)
    assert outputs.scores is not None
    if finish.output != "multi_vector":
        scores = VectorScores(finish, outputs.scores, num_seqs)
        finisher = RowsFinisher(layout, np.empty(layout.num_bytes, np.uint8), scores, num_seqs=num_seqs)
        finisher.num_bytes += layout.num_bytes + _stored_bytes(finish)
        return finisher
    scorer = make_scorer(finish, build_outputs(response, np.empty_like(memory), None).token_matches)
    return MaxSimFinisher(layout, finish, scorer, outputs, num_seqs=num_seqs)


def _stored_bytes(pairs: PairScoring) -> int:
    return sum(array.nbytes for stored in pairs.stored for array in stored.arrays)


def _checked_scores(pairs: PairScoring, scores_P: Float32Array, num_seqs: int) -> Float32Array:
    """Return the scores. If one is not finite, raises an error that blames stored vectors, or else the model."""
    finite_P = np.isfinite(scores_P)
    if finite_P.all():  # finite vectors may have a product that is not
        return scores_P
    pair = int(finite_P.argmin())
    is_stored = [int(texts_P[pair]) >= num_seqs for texts_P in (pairs.queries_P, pairs.documents_P)]
    if any(is_stored):
        part = int(is_stored[1])
        raise InvalidRequest("a score is NaN or infinite: the vectors are too large.", item=pair, part=part)
    raise NonFinite("a score is NaN or infinite.", item=pair, part=1)
