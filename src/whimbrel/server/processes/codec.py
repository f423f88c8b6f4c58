"""Request codec: an EngineRequest as a header for a message and arrays for shared memory, and back without copying the arrays.

The arrays lie one after another, each aligned to a cache line:

    int32    a row per seq, the token ids of all seqs, the spans of all seqs, then the queries and the documents of all pairs
    int64    for each slot of the layout, the offsets of its rows; then int32 ids if the rows are vocabulary entries
    any      for each block of stored vectors, its offsets (int64) and its rows; then int32 ids if the vectors are sparse

A finish that is carried out by the worker does not travel: for the engine the rows of such a request are the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from whimbrel.engine.engine_request import EngineRequest, Scheduling
from whimbrel.outputs.finishers import ReturnRows
from whimbrel.outputs.layout import ArraySlot, ResultLayout
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.requested import OutputSpec
from whimbrel.outputs.stored_vectors import StoredVectors
from whimbrel.server.processes.shared_memory import align
from whimbrel.types.arrays import Int32Array
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.request import OutputName, Similarity
from whimbrel.types.result import Sparse
from whimbrel.types.seq import Seq

_COLUMNS: Final = 9
"""Numbers in the row of a seq."""

_Source: TypeAlias = memoryview | mmap


class PairHeader(msgspec.Struct, array_like=True):
    """The scalars of a pair scoring."""

    output: OutputName
    similarity: Similarity
    num_pairs: int
    explain: bool
    pooling: TokenPooling | None
    stored: list[tuple[str, int, int, int, bool]]
    """The dtype of each block, its number of texts, rows and columns, and whether its vectors are sparse."""


class RequestHeader(msgspec.Struct, array_like=True):
    """The scalars of a request, which say how its arrays are read."""

    num_seqs: int
    num_tokens: int
    num_spans: int
    num_truncated: int
    slots: list[tuple[OutputSpec, int, bool]]
    """The spec of each slot, its offset in bytes, and whether its rows have ids."""
    layout_bytes: int
    """Size of the memory that the layout describes."""
    dynamic_output: OutputSpec | None
    received: float
    tokenize: float
    scheduling: Scheduling
    pairs: PairHeader | None


def encode_header(request: EngineRequest, scheduling: Scheduling) -> RequestHeader:
    """Return the header of a request that runs under this scheduling."""
    layout, finish = request.layout, request.finish
    pairs = None
    if isinstance(finish, PairScoring):
        stored = [(each.rows_XD.dtype.name, len(each), *each.rows_XD.shape, each.ids_X is not None) for each in finish.stored]
        pairs = PairHeader(finish.output, finish.similarity, finish.num_pairs, finish.explain, finish.pooling, stored)
    return RequestHeader(
        num_seqs=len(request.seqs),
        num_tokens=request.num_tokens,
        num_spans=sum(len(seq.spans_S2) for seq in request.seqs if seq.spans_S2 is not None),
        num_truncated=request.num_truncated,
        slots=[(slot.spec, slot.start, slot.ids_P is not None) for slot in layout.by_name.values()],
        layout_bytes=layout.num_bytes,
        dynamic_output=layout.dynamic_output,
        received=request.received,
        tokenize=request.tokenize,
        scheduling=scheduling,
        pairs=pairs,
    )


def request_arrays(request: EngineRequest) -> list[NDArray[Any]]:
    """Return the arrays of a request, in the order of the module's table."""
    finish = request.finish
    slots: list[NDArray[Any]] = []
    for slot in request.layout.by_name.values():
        slots += [slot.offsets_N1, *([] if slot.ids_P is None else [slot.ids_P])]
    seqs = pack_seqs(request.seqs)
    if not isinstance(finish, PairScoring):
        return [seqs, *slots]
    seqs = np.concatenate((seqs, finish.queries_P, finish.documents_P))
    return [seqs, *slots, *(array for stored in finish.stored for array in stored.arrays)]


def arrays_bytes(arrays: Sequence[NDArray[Any]]) -> int:
    """Return the memory that arrays take, in bytes."""
    return sum(align(array.nbytes) for array in arrays)


def write_arrays(arrays: Sequence[NDArray[Any]], memory: NDArray[np.uint8]) -> None:
    """Write arrays into memory."""
    start = 0
    for array in arrays:
        memory[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
        start += align(array.nbytes)


def decode_request(header: RequestHeader, source: _Source) -> tuple[EngineRequest, int]:
    """Return a request whose arrays are views of `source`, and their bytes. Raises ValueError if it is too short."""
    reader = _Reader(source)
    num_pairs = 0 if header.pairs is None else header.pairs.num_pairs
    flat = reader.read("int32", _COLUMNS * header.num_seqs + header.num_tokens + 2 * (header.num_spans + num_pairs))
    pairs_at = flat.size - 2 * num_pairs
    slots: dict[OutputName, ArraySlot] = {}
    for spec, start, has_ids in header.slots:
        offsets = reader.read("int64", header.num_seqs + 1)
        slots[spec.name] = ArraySlot(spec, start, offsets, reader.read("int32", int(offsets[-1])) if has_ids else None)
    finish = ReturnRows()
    if header.pairs is not None:
        queries_P, documents_P = flat[pairs_at : pairs_at + num_pairs], flat[pairs_at + num_pairs :]
        stored = tuple(reader.stored_vectors(*block) for block in header.pairs.stored)
        finish = PairScoring(
            header.pairs.output,
            header.pairs.similarity,
            queries_P,
            documents_P,
            stored,
            header.pairs.explain,
            header.pairs.pooling,
        )
    request = EngineRequest(
        unpack_seqs(flat[:pairs_at], header.num_seqs, header.num_tokens),
        ResultLayout(slots, header.layout_bytes, header.dynamic_output),
        header.received,
        header.tokenize,
        finish,
        header.scheduling,
        header.num_truncated,
    )
    return request, reader.position


class _Reader:
    """Reads arrays one after another."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self.position = 0

    def read(self, dtype: str, count: int) -> NDArray[Any]:
        array = np.frombuffer(self._source, dtype, count, self.position)
        self.position += align(array.nbytes)
        return array

    def stored_vectors(self, dtype: str, num_texts: int, num_rows: int, num_columns: int, is_sparse: bool) -> StoredVectors:
        offsets = self.read("int64", num_texts + 1)
        rows = self.read(dtype, num_rows * num_columns).reshape(num_rows, num_columns)
        return StoredVectors(rows, offsets, self.read("int32", num_rows) if is_sparse else None)


def pack_seqs(seqs: Sequence[Seq]) -> Int32Array:
    """Return a row of numbers for each seq; then all token ids; then all spans."""
    rows = [
        (
            seq.ids.size,
            seq.prompt_tokens,
            seq.type_id,
            seq.second_text_start,
            seq.num_attended,
            seq.is_query,
            -1 if seq.spans_S2 is None else len(seq.spans_S2),
            seq.adapter,
            seq.tower,
        )
        for seq in seqs
    ]
    spans = [seq.spans_S2.ravel() for seq in seqs if seq.spans_S2 is not None]
    return np.concatenate([np.array(rows, np.int32).ravel(), *(seq.ids for seq in seqs), *spans], dtype=np.int32)


def unpack_seqs(flat: Int32Array, num_seqs: int, num_tokens: int) -> list[Seq]:
    """Return the seqs that `pack_seqs` has packed; their arrays are views."""
    table = flat[: _COLUMNS * num_seqs].reshape(num_seqs, _COLUMNS)
    ids = flat[table.size : table.size + num_tokens]
    spans = flat[table.size + num_tokens :].reshape(-1, 2)
    starts: list[int] = (np.cumsum(table[:, 0]) - table[:, 0]).tolist()
    counts = np.maximum(table[:, 6], 0)
    span_starts: list[int] = (np.cumsum(counts) - counts).tolist()
    return [
        Seq(
            ids[start : start + length],
            index,
            prompt_tokens,
            type_id,
            second_text_start,
            num_attended,
            bool(is_query),
            spans_S2=None if count < 0 else spans[first : first + count],
            adapter=adapter,
            tower=tower,
        )
        for index, (
            start,
            first,
            (length, prompt_tokens, type_id, second_text_start, num_attended, is_query, count, adapter, tower),
        ) in enumerate(zip(starts, span_starts, table.tolist(), strict=True))
    ]


def pack_entries(sparse: Sparse) -> bytes:
    """Return the offsets, ids and weights of sparse rows, one after another."""
    return sparse.offsets_N1.tobytes() + sparse.ids_X.tobytes() + sparse.weights_X.tobytes()


def unpack_entries(source: _Source, num_texts: int) -> Sparse:
    """Return the sparse rows that `pack_entries` has packed, as views of `source`."""
    offsets = np.frombuffer(source, np.int64, num_texts + 1)
    count = int(offsets[-1])
    ids = np.frombuffer(source, np.int32, count, offsets.nbytes)
    return Sparse(ids, np.frombuffer(source, np.float32, count, offsets.nbytes + ids.nbytes), offsets)
