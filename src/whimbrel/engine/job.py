"""The nouns of the lanes: a job, the work of a batch, what they need of a runner and of a recorder. No torch, no threads."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.engine.prepared import EngineRequest
from whimbrel.errors import ComputeError, InvalidRequest, NonFinite, OutOfMemory, WhimbrelError
from whimbrel.outputs.layout import build_outputs, concat_sparse, estimated_bytes, response_layout
from whimbrel.outputs.merge import map_error_location, merge_chunks
from whimbrel.outputs.multi_vector import pool_documents, reduce_tokens
from whimbrel.outputs.pair_scoring import PairScoring, Part
from whimbrel.outputs.rows import DeviceRows, OutputRows, RowSelection
from whimbrel.outputs.similarity import score_pairs
from whimbrel.types.arrays import Float32Array, Int32Array, ranges
from whimbrel.types.batch import Batch
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs, Ragged, Result, Sparse, Timings
from whimbrel.types.seq import Seq


@dataclass(frozen=True, slots=True, eq=False)
class BatchOutput:
    """What a batch gave: which rows are whose, and the rows."""

    selections: Mapping[OutputName, RowSelection]
    outputs: Mapping[OutputName, OutputRows]


class PairScorerProtocol(Protocol):
    """Compares token vectors as they come; see `matching.Matcher`."""

    @property
    def scores(self) -> Float32Array:
        """The scores of all pairs, once all texts were added and all parts have run."""
        ...

    @property
    def token_matches(self) -> Ragged | None:
        """Then too, if the request asked for an explanation: as in Outputs."""
        ...

    @property
    def keep_documents(self) -> Container[int]:
        """Seqs whose vectors are known, and need not be computed."""
        ...

    @property
    def num_parts(self) -> int:
        """Those that there will be."""
        ...

    def take_parts(self) -> Sequence[Part]:
        """The parts that may run from now on, each given out once."""
        ...

    def add(
        self,
        rows_XD: Any,
        texts: NDArray[np.integer],
        starts: NDArray[np.integer],
        ends: NDArray[np.integer],
    ) -> Sequence[Part]:
        """Texts that were computed, each once: texts[i] has rows starts[i] to ends[i], which are not kept.

        Returns the parts that may run from now on. Raises MemoryError."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    """A request on its way: where its outputs go, and what is left to do."""

    future: Future[Result]
    request: EngineRequest
    memory: NDArray[np.uint8]
    """Of the answer, as `answer_places` divides it. Nothing is written here any more once the Future is done."""
    scorer: PairScorerProtocol | None = None
    """Of pairs that are compared by their token vectors, which have no place."""
    origin: object = None
    """Whatever the tenant of a recorder wants to know a job by."""
    queue: float = -1.0
    """Seconds until its first seq was taken; negative until then."""
    compute: float = 0.0
    seqs: Sequence[Seq] = field(init=False)
    """What is to be computed: the request's seqs, less those whose vectors are known."""
    num_tokens: int = field(init=False)
    """Of these."""
    num_pending: int = field(init=False)
    """Seqs not collected yet, and parts of the comparison that have not run."""
    arrays: dict[OutputName, Float32Array] = field(init=False)
    sparse_rows: dict[int, tuple[Int32Array, Float32Array]] = field(init=False)
    """By seq: what has no place."""

    def __post_init__(self) -> None:
        places = self.request.layout
        self.seqs = self.request.seqs
        if self.scorer is not None:
            self.seqs = [seq for seq in self.seqs if seq.index not in self.scorer.keep_documents]
        self.num_tokens = sum(seq.ids.size for seq in self.seqs)
        self.num_pending = len(self.seqs) + (0 if self.scorer is None else self.scorer.num_parts)
        self.arrays = {}
        if self.scorer is None:
            memory = self.memory if self.request.pair_scoring is None else np.empty(places.num_bytes, np.uint8)
            self.arrays = places.arrays(memory)
        self.sparse_rows = {}

    @property
    def run_first(self) -> Container[int]:
        """Seqs that run before the others: queries, without which documents that are compared have to be kept."""
        comparison = self.request.pair_scoring
        found: list[int] = [] if comparison is None or self.scorer is None else comparison.queries_P.tolist()
        return frozenset(found)

    @property
    def num_bytes(self) -> int:
        """Of its ids and its outputs, about."""
        ids = self.num_tokens * np.dtype(np.int32).itemsize
        arrays = 0
        if self.request.pair_scoring is not None:
            given = [array for each in self.request.pair_scoring.stored for array in each.arrays]
            arrays = sum(array.nbytes for array in (*self.arrays.values(), *given))
        return ids + self.memory.nbytes + arrays + estimated_bytes(self.request.layout) * len(self.seqs)

    def write(self, batch: BatchOutput, rows: NDArray[np.integer], indexes: NDArray[np.integer]) -> None:
        """Take over what a batch gave: its seqs `rows` are the job's seqs `indexes`."""
        for name, array_PD in self.arrays.items():
            place = self.request.layout.by_name[name]
            offsets_B1 = batch.selections[name].offsets_B1
            source = ranges(offsets_B1[rows], offsets_B1[rows + 1])
            target = ranges(place.offsets_N1[indexes], place.offsets_N1[indexes + 1])
            array_PD[target] = cast(Float32Array, batch.outputs[name])[source, : place.spec.width]
        if (unplaced := self.request.layout.dynamic_output) is not None:
            entries = cast(Sparse, batch.outputs[unplaced.name])
            for row, index in zip(batch.selections[unplaced.name].offsets_B1[rows].tolist(), indexes.tolist(), strict=True):
                self.sparse_rows[index] = entries[row]

    def add_to_scorer(self, batch: BatchOutput, rows: NDArray[np.integer], indexes: NDArray[np.integer]) -> Sequence[Part]:
        """As `write`, of token vectors that are compared; the parts that may run from now on. Raises MemoryError and
        ComputeError."""
        comparison, pooling = self.request.pair_scoring, self.request.pooling
        if pooling is None:
            return self._match(batch, rows, indexes, None)
        assert comparison is not None
        is_query = np.isin(indexes, comparison.queries_P)
        return [
            *self._match(batch, rows[is_query], indexes[is_query], None),
            *self._match(batch, rows[~is_query], indexes[~is_query], pooling),
        ]

    def _match(
        self, batch: BatchOutput, rows: NDArray[np.integer], indexes: NDArray[np.integer], pooling: TokenPooling | None
    ) -> Sequence[Part]:
        assert self.scorer is not None
        name = "multi_vector"
        offsets_B1, width = batch.selections[name].offsets_B1, self.request.layout.by_name[name].spec.width
        given = batch.outputs[name]
        vectors_XD: Any = (given.rows_PD if isinstance(given, DeviceRows) else cast(Float32Array, given))[:, :width]
        starts, ends = offsets_B1[rows], offsets_B1[rows + 1]
        if pooling is not None:
            host_XD = cast(Float32Array, vectors_XD.cpu().numpy() if isinstance(given, DeviceRows) else vectors_XD)
            own = Ragged(host_XD[ranges(starts, ends)], np.concatenate(([0], np.cumsum(ends - starts))))
            found = pool_documents(own, pooling)
            vectors_XD, starts, ends = found.rows_XD, found.offsets_N1[:-1], found.offsets_N1[1:]
        return self.scorer.add(vectors_XD, indexes, starts, ends)

    def resolve(self) -> None:
        """Answer; the job is nobody else's any more."""
        prepared = self.request
        total = perf_counter() - prepared.received
        timings = Timings(prepared.tokenize, max(0.0, self.queue), self.compute, total)
        if self.future.set_running_or_notify_cancel():
            try:
                outputs = self._outputs()
            except MemoryError:
                self.future.set_exception(OutOfMemory("there is no memory to put the answer together."))
                return
            except WhimbrelError as error:
                self.future.set_exception(error)
                return
            except BaseException as error:  # a bug: the caller is told before the thread that found it dies
                self.future.set_exception(ComputeError(f"the answer could not be put together ({type(error).__name__})."))
                raise
            self.future.set_result(
                Result(
                    outputs, prepared.num_tokens, prepared.num_truncated, timings, prepared.token_offsets, prepared.pair_tokens
                )
            )

    def _outputs(self) -> Outputs:
        prepared, comparison = self.request, self.request.pair_scoring
        if comparison is None or self.scorer is None:
            entries = concat_sparse(self.sparse_rows) if prepared.layout.dynamic_output is not None else None
            outputs = merge_chunks(build_outputs(prepared.layout, self.arrays, entries), prepared.merge)
            if comparison is None:
                return reduce_tokens(outputs, prepared.reduction)
            scores_P = score_pairs(outputs, comparison)
        else:
            scores_P = self.scorer.scores
        if not np.isfinite(scores_P).all():  # finite vectors whose product is not
            raise _not_finite(comparison, len(prepared.seqs), int(np.isfinite(scores_P).argmin()))
        places = response_layout(prepared.layout, prepared.pair_scoring)
        scores_P1, matches = places.arrays(self.memory)["scores"], places.token_matches_in(self.memory)
        scores_P1[:, 0] = scores_P
        if matches is not None:
            assert self.scorer is not None
            assert self.scorer.token_matches is not None
            matches.rows_XD[:] = self.scorer.token_matches.rows_XD
        return Outputs(scores=scores_P1, token_matches=matches)

    def fail(self, error: WhimbrelError) -> None:
        """Answer with an error; the job is nobody else's any more."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(map_error_location(error, self.request.merge, self.request.pair_scoring))


def _not_finite(comparison: PairScoring, num_seqs: int, pair: int) -> WhimbrelError:
    """An error that names the part of a pair that came as vectors, as these are too large; else the document."""
    came = [int(numbers[pair]) >= num_seqs for numbers in (comparison.queries_P, comparison.documents_P)]
    if any(came):
        return InvalidRequest("a score is NaN or infinite: the vectors are too large.", item=pair, part=int(came[1]))
    return NonFinite("a score is NaN or infinite.", item=pair, part=1)


BatchItems: TypeAlias = list[tuple[Job, Seq]]
"""The seqs of one batch, each with its job."""


class BatchObserver(Protocol):
    """Is told what is on the device, so that another process can tell what was there when this one died.

    Called from several threads; must be quick and must not raise.
    """

    def started(self, work: BatchItems) -> int:
        """These seqs are about to be launched, in this thread. Returns what `ended` is called with."""
        ...

    def resumed(self, slot: int) -> None:
        """The batch goes on, after another ran between its layers."""
        ...

    def ended(self, slot: int) -> None:
        """The batch was collected, or it failed."""
        ...


class RunnerProtocol(Protocol):
    """What lanes need of a runner; see `runner.Runner`."""

    @property
    def unstable(self) -> Sequence[str]:
        """The parts of the model that give a text other bits in other batches."""
        ...

    def init_thread(self) -> None:
        """Called once by each thread before it launches anything."""
        ...

    def launch(
        self, batch: Batch, wanted: Mapping[OutputName, RowSelection], between_layers: Callable[[], None] | None = None
    ) -> Any:
        """Run a batch, or give it to the device. Raises MemoryError if there is no room for it."""
        ...

    def collect(self, pending: Any) -> Mapping[OutputName, OutputRows]:
        """Wait for what `launch` returned: the rows that were wanted. Raises MemoryError as `launch`."""
        ...
