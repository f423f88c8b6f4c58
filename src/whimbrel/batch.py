"""[Seq] -> Batch: the tokens of all seqs one after another, with offsets. numpy only; nothing is padded.

Shapes: T tokens, B seqs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whimbrel.types import Int32Array, Seq


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A ragged batch on the host. Seqs are in order of length, so that equal lengths lie side by side."""

    order_B: Int32Array
    """order_B[i] is the place, in what was given to `pack`, of the i-th seq of the batch."""
    ids_T: Int32Array
    """The host's copy of the ids; it stays here for whatever looks at ids only."""
    positions_T: Int32Array
    """Rows of the position table."""
    type_ids_B: Int32Array
    cu_seqlens: Int32Array
    """B + 1 offsets: seq i owns tokens cu_seqlens[i] to cu_seqlens[i + 1]."""
    prompt_tokens_B: Int32Array

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
    order = np.argsort(-given_lengths, kind="stable").astype(np.int32)
    places: list[int] = order.tolist()
    ordered = [seqs[i] for i in places]
    lengths = given_lengths[order]
    cu_seqlens = np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)))
    ids = np.concatenate([seq.ids for seq in ordered])
    return Batch(
        order_B=order,
        ids_T=ids,
        positions_T=_positions(ids, cu_seqlens, lengths, position_offset, pad_id),
        type_ids_B=np.fromiter((seq.type_id for seq in ordered), np.int32, len(seqs)),
        cu_seqlens=cu_seqlens,
        prompt_tokens_B=np.fromiter((seq.prompt_tokens for seq in ordered), np.int32, len(seqs)),
    )


def _positions(ids: Int32Array, cu_seqlens: Int32Array, lengths: Int32Array, offset: int, pad_id: int) -> Int32Array:
    starts = np.repeat(cu_seqlens[:-1], lengths)
    if offset == 0:
        return np.arange(ids.size, dtype=np.int32) - starts
    counted = np.concatenate((np.zeros(1, np.int32), np.cumsum(ids != pad_id, dtype=np.int32)))
    return np.where(ids != pad_id, counted[1:] - counted[starts] + (offset - 1), pad_id).astype(np.int32)


def runs(cu_seqlens: Int32Array) -> list[tuple[int, int, int]]:
    """(first token, number of seqs, length) of each run of neighbouring seqs of equal length."""
    lengths = np.diff(cu_seqlens)
    starts = np.flatnonzero(np.diff(lengths, prepend=-1))
    counts = np.diff(starts, append=lengths.size)
    return list(zip(cu_seqlens[starts].tolist(), counts.tolist(), lengths[starts].tolist(), strict=True))
