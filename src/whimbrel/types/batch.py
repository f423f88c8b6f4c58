"""Ragged arrays and batches: the rows or tokens of several texts concatenated, with offsets. numpy only; without padding.

Every batch comes through here, so methods of arrays are called: numpy's functions of the same names take twice as long.

Shapes: T tokens, B seqs, S spans.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.arrays import Int32Array, Int64Array
from whimbrel.types.seq import Seq


def offsets_of(counts: NDArray[np.integer | np.bool_]) -> Int64Array:
    """Return 0 and the running sums: (N + 1,)."""
    offsets = np.zeros(counts.size + 1, np.int64)
    counts.cumsum(out=offsets[1:])
    return offsets


def lengths_of(offsets: NDArray[np.integer]) -> NDArray[Any]:
    """Return the differences of neighbors, (N,) of N + 1 offsets; np.diff takes ten times as long."""
    return offsets[1:] - offsets[:-1]


def ranges(starts: NDArray[np.integer], ends: NDArray[np.integer]) -> Int64Array:
    """Return the concatenation of arange(start, end) over all pairs."""
    if starts.size == ends.size == 1:
        return np.arange(starts[0], ends[0], dtype=np.int64)
    counts = ends - starts
    before = counts.cumsum() - counts
    return np.arange(counts.sum(), dtype=np.int64) + (starts - before).repeat(counts)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Ragged batch on the host: the input of a model. The longest seqs come first, and equal ones are neighbors."""

    order_B: Int32Array
    """Position of each seq in the list that was given to `pack`."""
    ids_T: Int32Array
    positions_T: Int32Array
    type_ids_T: Int32Array
    cu_seqlens: Int32Array
    """B + 1 offsets: seq i owns tokens cu_seqlens[i] to cu_seqlens[i + 1]."""
    prompt_tokens_B: Int32Array
    """Number of leading tokens of each seq that pooling leaves out."""
    num_attended_B: Int32Array
    """Number of leading tokens of each seq that are attended to: all, unless its expansion tokens are not."""
    is_query_B: NDArray[np.bool_]
    spans_B: list[Int32Array | None] | None
    """Ranges of tokens of each seq, each pooled to its own row; None if no seq has any."""
    adapters_B: Int32Array
    prefix_tokens_B: Int32Array
    """Number of leading tokens of each seq that are computed apart (`Seq.prefix_tokens`)."""
    tower: int = 0
    """Index of the card's tower that runs all seqs of the batch."""

    @property
    def num_tokens(self) -> int:
        return self.ids_T.size

    @property
    def num_seqs(self) -> int:
        return self.order_B.size


class RowCount:
    """Number of rows that a model computes for a batch as it grows: each distinct prefix once, and every seq's own tokens."""

    def __init__(self, seqs: Iterable[Seq] = ()) -> None:
        self.num_rows = 0
        self.num_tokens = 0
        self._prefixes: set[tuple[int, int, bytes]] = set()
        for seq in seqs:
            self.add(seq)

    def rows_of(self, seq: Seq) -> int:
        """Return the number of rows that a seq would add."""
        return seq.ids.size - (seq.prefix_tokens if seq.prefix_tokens and _prefix(seq) in self._prefixes else 0)

    def add(self, seq: Seq) -> None:
        self.num_rows += self.rows_of(seq)
        self.num_tokens += seq.ids.size
        if seq.prefix_tokens:
            self._prefixes.add(_prefix(seq))


def _prefix(seq: Seq) -> tuple[int, int, bytes]:
    return seq.tower, seq.adapter, seq.ids[: seq.prefix_tokens].tobytes()


def pack(seqs: Sequence[Seq], *, position_offset: int = 0, pad_id: int = 0) -> Batch:
    """Concatenate the seqs of one tower, the longest first. Equally long ones are sorted by attended tokens and by prefixes.

    `position_offset` is 0, or the RoBERTa family's pad_id + 1. There, as in transformers' `create_position_ids_from_
    input_ids`, a padding token inside a text has position pad_id and is not counted.
    """
    indices = sorted(range(len(seqs)), key=lambda i: (-seqs[i].ids.size, seqs[i].num_attended, seqs[i].prefix_tokens))
    ordered = [seqs[i] for i in indices]
    table_B8 = np.array(
        [
            (
                seq.ids.size, seq.prefix_tokens, seq.prompt_tokens, seq.type_id,
                seq.second_text_start, seq.num_attended or seq.ids.size, seq.is_query, seq.adapter,
            )
            for seq in ordered
        ],
        np.int32,
    )  # fmt: skip
    columns: list[Int32Array] = list(np.ascontiguousarray(table_B8.T))
    lengths, prefixes, prompt_tokens, type_ids, second_starts, num_attended, is_query, adapters = columns
    cu_seqlens = offsets_of(lengths).astype(np.int32)
    ids = np.concatenate([seq.ids for seq in ordered])
    return Batch(
        order_B=np.array(indices, np.int32),
        ids_T=ids,
        positions_T=_positions(ids, cu_seqlens, lengths, position_offset, pad_id),
        type_ids_T=_type_ids(cu_seqlens, lengths, type_ids, second_starts),
        cu_seqlens=cu_seqlens,
        prompt_tokens_B=prompt_tokens,
        num_attended_B=num_attended,
        is_query_B=is_query.astype(np.bool_),
        spans_B=[seq.spans_S2 for seq in ordered] if any(seq.spans_S2 is not None for seq in ordered) else None,
        adapters_B=adapters,
        prefix_tokens_B=prefixes,
        tower=ordered[0].tower,
    )


def _type_ids(cu_seqlens: Int32Array, lengths: Int32Array, type_ids_B: Int32Array, second_starts_B: Int32Array) -> Int32Array:
    type_ids_T = type_ids_B.repeat(lengths)
    if second_starts_B.any():
        begins_B = np.where(second_starts_B > 0, cu_seqlens[:-1] + second_starts_B, cu_seqlens[1:])
        type_ids_T += np.arange(type_ids_T.size, dtype=np.int32) >= np.repeat(begins_B, lengths)
    return type_ids_T


def _positions(ids: Int32Array, cu_seqlens: Int32Array, lengths: Int32Array, offset: int, pad_id: int) -> Int32Array:
    starts = cu_seqlens[:-1].repeat(lengths)
    if offset == 0:
        return np.arange(ids.size, dtype=np.int32) - starts
    counted = np.concatenate((np.zeros(1, np.int32), np.cumsum(ids != pad_id, dtype=np.int32)))
    return np.where(ids != pad_id, counted[1:] - counted[starts] + (offset - 1), pad_id).astype(np.int32)


def equal_length_groups(cu_seqlens: Int32Array, num_attended_B: Int32Array | None = None) -> list[tuple[int, int, int, int]]:
    """Return (first token, number of seqs, length, attended tokens) of each run of seqs that are equal in the last two."""
    lengths = lengths_of(cu_seqlens)
    attended = lengths if num_attended_B is None else num_attended_B
    if lengths.size == 1:
        return [(int(cu_seqlens[0]), 1, int(lengths[0]), int(attended[0]))]
    changes = ((lengths[1:] != lengths[:-1]) | (attended[1:] != attended[:-1])).nonzero()[0] + 1
    bounds = [0, *changes.tolist(), lengths.size] if lengths.size else [0]
    return [
        (int(cu_seqlens[first]), last - first, int(lengths[first]), int(attended[first])) for first, last in pairwise(bounds)
    ]
