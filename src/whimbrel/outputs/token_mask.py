"""Token masks: the tokens of a text that give a row of an output, and the keys of vocabulary entries. numpy only.

Shapes: T tokens, B seqs, X tokens or entries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.arrays import Int32Array, Int64Array
from whimbrel.types.card import Output


def token_mask(
    output: Output, ids_T: Int32Array, cu_seqlens: NDArray[np.integer], is_query_B: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return whether each token gives a row of `output`: (T,). Queries keep the skipped ids where the output says so."""
    mask_T = np.isin(ids_T, np.array(output.keep_ids, np.int32)) if output.keep_ids else np.ones(ids_T.size, np.bool_)
    if output.skip_ids:
        mask_T &= ~np.isin(ids_T, np.array(output.skip_ids, np.int32))
        if not output.skip_in_queries:
            mask_T |= np.repeat(is_query_B, np.diff(cu_seqlens))
    for leading in range(output.skip_first):
        first = cu_seqlens[:-1] + leading
        mask_T[first[first < cu_seqlens[1:]]] = False
    return mask_T


def entry_keys(seq_X: NDArray[np.integer], ids_X: Int32Array) -> Int64Array:
    """Return sort keys of (seq, token id): ordered by seq, then by id: (X,)."""
    return (seq_X.astype(np.int64) << 32) | ids_X
