"""Finishers: from the rows that batches give to the outputs of one request. numpy only.

The use of a request's rows is one tagged value, its finish. A `Finisher` carries it out: the lanes hand it the rows of each
batch, in any order. Once every seq and every step is done, `result` returns the outputs. A finisher knows no queue, no
lock and no Future.

Where a request runs in an engine process, the engine carries out pair scoring, and the worker everything else: it owns the
texts.

Shapes: B seqs of a batch, S seqs of the request, P pairs.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest, NonFinite, WhimbrelError
from whimbrel.outputs.layout import ESTIMATED_BYTES, ResultLayout, build_outputs, concat_sparse
from whimbrel.outputs.merge import ReturnRows
from whimbrel.outputs.multi_vector import TokenReduction
from whimbrel.outputs.pair_scoring import PairScoring, score_pairs
from whimbrel.outputs.rows import BatchOutput
from whimbrel.types.arrays import Float32Array, Int32Array
from whimbrel.types.batch import ranges
from whimbrel.types.result import Outputs, Sparse

_ROWS_PER_SLICE: Final = 8
"""Rows of a seq, on average, from which on they are copied seq by seq, which takes a call each, but no index of each row."""

Step: TypeAlias = Callable[[], None]
"""Work of a finisher that any thread may do. Raises MemoryError."""


Finish: TypeAlias = ReturnRows | PairScoring
"""The use of a request's rows. A ReturnRows is carried out in the process that tokenized the request."""


def locate_error(error: WhimbrelError, finish: Finish) -> WhimbrelError:
    """Return an error that names a seq as one that names the text of the request, or the part of a pair."""
    return error.relocated(lambda location: location if location.item is None else finish.locate(location.item, location))


Addition: TypeAlias = tuple["Finisher", NDArray[np.integer], NDArray[np.integer]]
"""A finisher and the numbers of its seqs, in the batch and in its request: the arguments of `Finisher.add`."""
AddTogether: TypeAlias = Callable[[BatchOutput, Sequence[Addition]], Sequence[Sequence[Step] | Exception]]
"""Function that adds the rows of a batch to several finishers, and returns the steps or the error of each."""


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

    def together(self, batch: BatchOutput) -> AddTogether | None:
        """Return the function that adds this batch's rows to several finishers at once; None if each takes its own."""
        return None

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
        self.num_bytes = 0 if layout.dynamic_output is None else ESTIMATED_BYTES * num_seqs

    def add(self, batch: BatchOutput, seqs_B: NDArray[np.integer], seqs_S: NDArray[np.integer]) -> Sequence[Step]:
        for slot, array_PD in zip(self._layout.by_name.values(), self._arrays.values(), strict=True):
            name = slot.spec.name
            offsets_B1, rows_PD = batch.selections[name].offsets_B1, cast(Float32Array, batch.rows[name])
            starts, ends, firsts = offsets_B1[seqs_B], offsets_B1[seqs_B + 1], slot.offsets_N1[seqs_S]
            columns = slot.spec.num_columns
            if (ends - starts).sum() >= _ROWS_PER_SLICE * starts.size:
                for start, end, first in zip(starts.tolist(), ends.tolist(), firsts.tolist(), strict=True):
                    array_PD[first : first + end - start] = rows_PD[start:end, :columns]
            else:
                array_PD[ranges(firsts, slot.offsets_N1[seqs_S + 1])] = rows_PD[ranges(starts, ends), :columns]
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
        self.scores_P1[:, 0] = checked_scores(self.pairs, score_pairs(outputs, self.pairs), self.num_seqs)
        return Outputs(scores=self.scores_P1)


def score_vectors(rows: ResultLayout, pairs: PairScoring, response: Outputs, *, num_seqs: int) -> RowsFinisher:
    """Return the finisher that scores pairs by their dense or sparse vectors, once all of these are there."""
    assert response.scores is not None
    scores = VectorScores(pairs, response.scores, num_seqs)
    finisher = RowsFinisher(rows, np.empty(rows.num_bytes, np.uint8), scores, num_seqs=num_seqs)
    finisher.num_bytes += rows.num_bytes + stored_bytes(pairs)
    return finisher


def stored_bytes(pairs: PairScoring) -> int:
    return sum(array.nbytes for stored in pairs.stored for array in stored.arrays)


def checked_scores(pairs: PairScoring, scores_P: Float32Array, num_seqs: int) -> Float32Array:
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
