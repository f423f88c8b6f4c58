"""Requests as bytes, of which seqs are int32, and entries of the vocabulary as bytes: how they travel between processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from mmap import mmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from whimbrel.engine.prepared import EngineRequest
from whimbrel.outputs.stored_vectors import StoredVectors
from whimbrel.server.processes.messages import StoredKind
from whimbrel.server.processes.shared_memory import align
from whimbrel.types.arrays import Int32Array
from whimbrel.types.result import Sparse
from whimbrel.types.seq import Seq

_COLUMNS: Final = 9


def num_ints(num_seqs: int, num_tokens: int, num_spans: int, num_pairs: int = 0) -> int:
    """Of the array that `pack` makes."""
    return _COLUMNS * num_seqs + num_tokens + 2 * (num_spans + num_pairs)


def request_bytes(prepared: EngineRequest) -> int:
    """What a request takes; whole lines of the cache, so that what comes after it is aligned."""
    comparison = prepared.pair_scoring
    num_pairs = 0 if comparison is None else comparison.num_pairs
    num = num_ints(len(prepared.seqs), prepared.num_tokens, count_spans(prepared.seqs), num_pairs)
    given = () if comparison is None else comparison.stored
    return align(4 * num) + sum(align(array.nbytes) for each in given for array in each.arrays)


def pack(prepared: EngineRequest, memory: NDArray[np.uint8]) -> None:
    """Write a request into memory: its seqs, and what is compared."""
    comparison = prepared.pair_scoring
    arrays: list[NDArray[Any]] = [pack_seqs(prepared.seqs)]
    if comparison is not None:
        arrays[0] = np.concatenate((arrays[0], comparison.queries_P, comparison.documents_P))
        arrays += [array for each in comparison.stored for array in each.arrays]
    start = 0
    for array in arrays:
        memory[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
        start += align(array.nbytes)


def unpack_stored(source: memoryview | mmap, num_before: int, kinds: Sequence[StoredKind]) -> tuple[StoredVectors, ...]:
    """The vectors that come after so many numbers; views of the source."""
    start = align(4 * num_before)

    def array(dtype: str, count: int) -> NDArray[Any]:
        nonlocal start
        found = np.frombuffer(source, dtype, count, start)
        start += align(found.nbytes)
        return found

    given: list[StoredVectors] = []
    for dtype, num_texts, num_rows, num_columns, is_sparse in kinds:
        offsets, rows = array("int64", num_texts + 1), array(dtype, num_rows * num_columns).reshape(num_rows, num_columns)
        given.append(StoredVectors(rows, offsets, array("int32", num_rows) if is_sparse else None))
    return tuple(given)


def stored_kinds(given: Iterable[StoredVectors]) -> list[StoredKind]:
    """What `unpack_given` must know."""
    return [(each.rows_XD.dtype.name, len(each), *each.rows_XD.shape, each.ids_X is not None) for each in given]


def unpack_pairs(source: memoryview | mmap, num_before: int, num_pairs: int) -> tuple[Int32Array, Int32Array]:
    """The pairs that come after so many numbers. Raises ValueError if the source is too short."""
    flat = np.frombuffer(source, np.int32, 2 * num_pairs, 4 * num_before)
    return flat[:num_pairs], flat[num_pairs:]


def count_spans(seqs: Sequence[Seq]) -> int:
    """Spans of all seqs."""
    return sum(len(seq.spans_S2) for seq in seqs if seq.spans_S2 is not None)


def pack_seqs(seqs: Sequence[Seq]) -> Int32Array:
    """A row of numbers for each seq; then all ids; then all spans."""
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


def unpack_seqs(source: memoryview | mmap, num_seqs: int, num_tokens: int, num_spans: int) -> list[Seq]:
    """What was packed; ids are views of `source`. Raises ValueError if it is too short."""
    flat = np.frombuffer(source, np.int32, num_ints(num_seqs, num_tokens, num_spans))
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
            second,
            num_keys,
            bool(is_query),
            spans_S2=None if count < 0 else spans[first : first + count],
            adapter=adapter,
            tower=tower,
        )
        for index, (
            start,
            first,
            (length, prompt_tokens, type_id, second, num_keys, is_query, count, adapter, tower),
        ) in enumerate(zip(starts, span_starts, table.tolist(), strict=True))
    ]


def pack_entries(sparse: Sparse) -> bytes:
    """Offsets, ids and weights one after another."""
    return sparse.offsets_N1.tobytes() + sparse.ids_X.tobytes() + sparse.weights_X.tobytes()


def unpack_entries(source: memoryview | mmap, num_texts: int) -> Sparse:
    """What was packed."""
    offsets = np.frombuffer(source, np.int64, num_texts + 1)
    count = int(offsets[-1])
    ids = np.frombuffer(source, np.int32, count, offsets.nbytes)
    return Sparse(ids, np.frombuffer(source, np.float32, count, offsets.nbytes + ids.nbytes), offsets)
