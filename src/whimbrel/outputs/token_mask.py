"""TODO."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.arrays import Int32Array, Int64Array
from whimbrel.types.card import Output


def token_mask(
    output: Output, ids_T: Int32Array, cu_seqlens: NDArray[np.integer], is_query_B: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which tokens give a row."""
    kept_T = np.isin(ids_T, np.array(output.keep_ids, np.int32)) if output.keep_ids else np.ones(ids_T.size, np.bool_)
    if output.skip_ids:
        kept_T &= ~np.isin(ids_T, np.array(output.skip_ids, np.int32))
        if not output.skip_in_queries:
            kept_T |= np.repeat(is_query_B, np.diff(cu_seqlens))
    for leading in range(output.skip_first):
        first = cu_seqlens[:-1] + leading
        kept_T[first[first < cu_seqlens[1:]]] = False
    return kept_T


def entry_keys(seq_X: NDArray[np.integer], ids_X: Int32Array) -> Int64Array:
    """Numbers in the order of seqs, and within one of ids."""
    return (seq_X.astype(np.int64) << 32) | ids_X
