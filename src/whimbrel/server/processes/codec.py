"""Request codec: an EngineRequest as a header and arrays in shared memory, and back without copying the arrays.

The header is msgpack, in which the dtype, the shape and the offset of an array stand for the array. The worker carries out the
finish, except for the scoring of pairs. For the engine the rows of all other requests are the response.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from mmap import mmap
from operator import attrgetter
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from whimbrel.engine.engine_request import EngineRequest
from whimbrel.outputs.layout import ResultLayout
from whimbrel.outputs.merge import ReturnRows
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.server.processes.shared_memory import align
from whimbrel.types.arrays import Int32Array
from whimbrel.types.result import Sparse
from whimbrel.types.scheduling import Scheduling
from whimbrel.types.seq import Seq

_COLUMNS: Final = 10
"""Numbers in the row of a seq: its tokens, its spans (-1 for None) and its scalars."""
_scalars: Final = attrgetter(
    "prompt_tokens", "type_id", "second_text_start", "num_attended", "is_query", "adapter", "tower", "prefix_tokens"
)

_Source: TypeAlias = memoryview | mmap


class _Header(msgspec.Struct, array_like=True):
    num_seqs: int
    seqs: Int32Array
    layout: ResultLayout
    received: float
    tokenize: float
    pairs: PairScoring | None
    scheduling: Scheduling
    num_truncated: int


def encode_request(request: EngineRequest, scheduling: Scheduling) -> tuple[bytes, list[NDArray[Any]], int]:
    """Return the header of a request that runs under this scheduling, its arrays, and their size in bytes."""
    arrays: list[NDArray[Any]] = []
    size = 0

    def place(array: NDArray[Any]) -> tuple[str, tuple[int, ...], int]:
        nonlocal size
        start = size
        arrays.append(array)
        size += align(array.nbytes)
        return array.dtype.str, array.shape, start

    seqs, finish = request.seqs, request.finish
    pairs = replace(finish, pair_tokens=None) if isinstance(finish, PairScoring) else None
    header = _Header(
        len(seqs), pack_seqs(seqs), request.layout, request.received, request.tokenize, pairs, scheduling, request.num_truncated
    )
    return msgspec.msgpack.encode(header, enc_hook=place), arrays, size


def write_arrays(arrays: Sequence[NDArray[Any]], memory: NDArray[np.uint8]) -> None:
    start = 0
    for array in arrays:
        memory[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
        start += align(array.nbytes)


def decode_request(header: bytes, source: _Source) -> EngineRequest:
    """Return a request whose arrays are views of `source`. Raises msgspec.ValidationError if `source` is too short."""

    def read(_: Any, place: tuple[str, list[int], int]) -> NDArray[Any]:
        dtype, shape, start = place
        return np.frombuffer(source, dtype, prod(shape), start).reshape(shape)

    told = msgspec.msgpack.decode(header, type=_Header, dec_hook=read)
    seqs, finish = unpack_seqs(told.seqs, told.num_seqs), told.pairs or ReturnRows()
    return EngineRequest(seqs, told.layout, told.received, told.tokenize, finish, told.scheduling, told.num_truncated)


def pack_seqs(seqs: Sequence[Seq]) -> Int32Array:
    """Return a row of numbers for each seq; then all token ids; then all spans."""
    rows = [(seq.ids.size, -1 if seq.spans_S2 is None else len(seq.spans_S2), *_scalars(seq)) for seq in seqs]
    spans = [seq.spans_S2.ravel() for seq in seqs if seq.spans_S2 is not None]
    return np.concatenate([np.array(rows, np.int32).ravel(), *(seq.ids for seq in seqs), *spans], dtype=np.int32)


def unpack_seqs(flat: Int32Array, num_seqs: int) -> list[Seq]:
    """Return the seqs that `pack_seqs` has packed; their arrays are views."""
    rows: list[list[int]] = flat[: _COLUMNS * num_seqs].reshape(num_seqs, _COLUMNS).tolist()
    start = _COLUMNS * num_seqs
    spans = flat[start + sum(row[0] for row in rows) :].reshape(-1, 2)
    first_span = 0
    seqs: list[Seq] = []
    for index, (length, num_spans, prompt, type_id, second, attended, is_query, adapter, tower, prefix) in enumerate(rows):
        ids = flat[start : start + length]
        own = None if num_spans < 0 else spans[first_span : first_span + num_spans]
        scalars = (prompt, type_id, second, attended, bool(is_query))
        seqs.append(Seq(ids, index, *scalars, spans_S2=own, adapter=adapter, tower=tower, prefix_tokens=prefix))
        start += length
        first_span += max(num_spans, 0)
    return seqs


def pack_entries(sparse: Sparse) -> bytes:
    """Return the offsets, ids and weights of sparse rows, one after another."""
    return sparse.offsets_N1.tobytes() + sparse.ids_X.tobytes() + sparse.weights_X.tobytes()


def unpack_entries(source: _Source, num_texts: int) -> Sparse:
    """Return the sparse rows that `pack_entries` has packed, as views of `source`."""
    offsets = np.frombuffer(source, np.int64, num_texts + 1)
    count = int(offsets[-1])
    ids = np.frombuffer(source, np.int32, count, offsets.nbytes)
    return Sparse(ids, np.frombuffer(source, np.float32, count, offsets.nbytes + ids.nbytes), offsets)
