"""What ran -> what was asked for, where these are not one to one: texts in parts, and pairs that are alike. numpy only.

Where a text that is too long for the model ran in parts, its vector is the mean of theirs, weighted by the text's own tokens in
each; it is normalised again where they are. An error over a part names the text.

Source: vLLM's chunked processing of long embeddings, entrypoints/pooling/embed (0.33).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from whimbrel.errors import Location, WhimbrelError
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.result import Outputs


@dataclass(frozen=True, slots=True, eq=False)
class ChunkMerge:
    """How the vectors of parts become those of texts."""

    offsets_N1: Int64Array
    """Parts offsets_N1[i] to offsets_N1[i + 1] are those of text i."""
    weights_S: Float32Array
    """Of each part: its tokens."""
    normalized: bool
    """Whether vectors are."""


@dataclass(frozen=True, slots=True, eq=False)
class Deduplication:
    """Which of the texts that ran each text of the request is: those that are alike ran once."""

    index_N: Int64Array
    first_M: Int64Array
    """Where each that ran stands first."""


def merge_chunks(outputs: Outputs, merge: ChunkMerge | Deduplication | None) -> Outputs:
    """Vectors of parts -> vectors of texts, and scores of what ran -> scores of all."""
    if isinstance(merge, Deduplication):
        assert outputs.scores is not None
        return replace(outputs, scores=outputs.scores[merge.index_N])
    if merge is None or outputs.dense is None:
        return outputs
    starts, counts = merge.offsets_N1[:-1], np.diff(merge.offsets_N1)
    weights_S1 = merge.weights_S[:, None].astype(np.float64)
    mean_ND = np.add.reduceat(outputs.dense * weights_S1, starts) / np.add.reduceat(weights_S1, starts)
    if merge.normalized:
        norms_N1 = np.linalg.norm(mean_ND, axis=1, keepdims=True)
        mean_ND /= np.where(norms_N1 > 0, norms_N1, 1.0)
    dense = np.where((counts == 1)[:, None], outputs.dense[starts], mean_ND).astype(np.float32)
    return replace(outputs, dense=dense)


def map_error_location(
    error: WhimbrelError, merge: ChunkMerge | Deduplication | None, comparison: PairScoring | None = None
) -> WhimbrelError:
    """An error that names a seq, as one that names the text, or the part of a pair, that it is of."""

    def locate(location: Location) -> Location:
        seq, part = location.item, location.part
        if seq is None:
            return location
        if isinstance(merge, Deduplication):
            return Location("input", int(merge.first_M[seq]), part)
        if merge is not None:
            return Location("input", int(np.searchsorted(merge.offsets_N1[1:], seq, side="right")))
        if comparison is None or part is not None:  # a part of a pair is no seq: this was done where the error comes from
            return location
        return _of_pair(comparison, seq)

    return error.relocated(locate)


def _of_pair(comparison: PairScoring, seq: int) -> Location:
    """The first pair that a seq is in, and which part of it."""
    part = int(seq not in comparison.queries_P)
    pairs = np.flatnonzero((comparison.queries_P, comparison.documents_P)[part] == seq)
    return Location("input", int(pairs[0]), part)
