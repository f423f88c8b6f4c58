"""[Seq] -> Batch: the tokens of all seqs one after another, with offsets. numpy only; nothing is padded.

Shapes: T tokens, B seqs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.arrays import Int32Array
from whimbrel.types.seq import Seq


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A ragged batch on the host. Seqs are in order of length, then of keys, so that equal ones lie side by side."""

    order_B: Int32Array
    """order_B[i] is the place, in what was given to `pack`, of the i-th seq of the batch."""
    ids_T: Int32Array
    """The host's copy of the ids; it stays here for whatever looks at ids only."""
    positions_T: Int32Array
    """Rows of the position table."""
    type_ids_T: Int32Array
    cu_seqlens: Int32Array
    """B + 1 offsets: seq i owns tokens cu_seqlens[i] to cu_seqlens[i + 1]."""
    prompt_tokens_B: Int32Array
    num_attended_B: Int32Array
    """How many leading tokens of a seq are attended to: mostly all."""
    is_query_B: NDArray[np.bool_]
    spans_B: list[Int32Array | None] | None
    """Ranges of tokens of each seq, each pooled to a row of its own; None where no seq has such."""
    adapters_B: Int32Array
    """Which of the model's adapters each seq uses; -1: none."""
    tower: int = 0
    """Which of the card's towers runs it: all of its seqs have the same."""

    @property
    def num_tokens(self) -> int:
        return self.ids_T.size

    @property
    def num_seqs(self) -> int:
        return self.order_B.size


def pack(seqs: Sequence[Seq], *, position_offset: int = 0, pad_id: int = 0) -> Batch:
    """Lay the seqs one after another.

    `position_offset` is 0, or the RoBERTa family's pad_id + 1. There, as in transformers' `create_position_ids_from_
    input_ids`, a padding token inside a text has position pad_id and is not counted.
    """
    given_lengths = np.fromiter((seq.ids.size for seq in seqs), np.int32, len(seqs))
    order = np.lexsort((np.fromiter((seq.num_attended for seq in seqs), np.int32, len(seqs)), -given_lengths)).astype(np.int32)
    places: list[int] = order.tolist()
    ordered = [seqs[i] for i in places]
    lengths = given_lengths[order]
    cu_seqlens = np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)))
    ids = np.concatenate([seq.ids for seq in ordered])
    table_B6 = np.array(
        [
            (seq.prompt_tokens, seq.type_id, seq.second_text_start, seq.num_attended, seq.is_query, seq.adapter)
            for seq in ordered
        ],
        np.int32,
    ).reshape(-1, 6)
    prompt_tokens, type_ids, seconds, num_keys, is_query, adapters = np.ascontiguousarray(table_B6.T)
    return Batch(
        order_B=order,
        ids_T=ids,
        positions_T=_positions(ids, cu_seqlens, lengths, position_offset, pad_id),
        type_ids_T=_type_ids(cu_seqlens, lengths, type_ids, seconds),
        cu_seqlens=cu_seqlens,
        prompt_tokens_B=prompt_tokens,
        num_attended_B=np.where(num_keys > 0, num_keys, lengths).astype(np.int32),
        is_query_B=is_query.astype(np.bool_),
        spans_B=[seq.spans_S2 for seq in ordered] if any(seq.spans_S2 is not None for seq in ordered) else None,
        adapters_B=adapters,
        tower=ordered[0].tower,
    )


def _type_ids(cu_seqlens: Int32Array, lengths: Int32Array, type_ids_B: Int32Array, seconds_B: Int32Array) -> Int32Array:
    type_ids_T = np.repeat(type_ids_B, lengths)
    if seconds_B.any():
        begins_B = np.where(seconds_B > 0, cu_seqlens[:-1] + seconds_B, cu_seqlens[1:])
        type_ids_T += np.arange(type_ids_T.size, dtype=np.int32) >= np.repeat(begins_B, lengths)
    return type_ids_T


def _positions(ids: Int32Array, cu_seqlens: Int32Array, lengths: Int32Array, offset: int, pad_id: int) -> Int32Array:
    starts = np.repeat(cu_seqlens[:-1], lengths)
    if offset == 0:
        return np.arange(ids.size, dtype=np.int32) - starts
    counted = np.concatenate((np.zeros(1, np.int32), np.cumsum(ids != pad_id, dtype=np.int32)))
    return np.where(ids != pad_id, counted[1:] - counted[starts] + (offset - 1), pad_id).astype(np.int32)


def equal_length_groups(cu_seqlens: Int32Array, num_keys_B: Int32Array | None = None) -> list[tuple[int, int, int, int]]:
    """(first token, number of seqs, length, number of keys) of each run of neighbouring seqs that are equal in both."""
    lengths = np.diff(cu_seqlens)
    keys = lengths if num_keys_B is None else num_keys_B
    changes = (np.diff(lengths, prepend=-1) != 0) | (np.diff(keys, prepend=-1) != 0)
    starts = np.flatnonzero(changes)
    counts = np.diff(starts, append=lengths.size)
    return list(zip(cu_seqlens[starts].tolist(), counts.tolist(), lengths[starts].tolist(), keys[starts].tolist(), strict=True))
