"""The best documents of each query, kept while blocks of documents are scored. numpy only.

Documents are numbered in descending order of their ids as bytes, in which trec_eval ranks documents of equal score. A score in
float32 and a number make one integer, greater for what ranks first, so the best documents do not depend on the blocks.

Shapes: Q queries, B documents of a block, K best documents.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.arrays import Float32Array, Int64Array

_LAST: Final = 2**31 - 1
_NUMBERS: Final = 2**21
"""Scores that are merged at a time: 16 MiB of keys."""


def trec_order(ids: Iterable[str]) -> list[str]:
    """Return ids in descending order of their UTF-8 bytes, which is that of their code points."""
    return sorted(ids, reverse=True)


class Best:
    """The best `depth` documents of each query by their scores, or by final scores among the best `depth` by first scores."""

    def __init__(self, num_queries: int, depth: int) -> None:
        self._depth = depth
        self._keys_QK = np.empty((num_queries, 0), np.int64)
        self._final_QK = np.empty((num_queries, 0), np.float32)

    def add(self, scores_QB: Float32Array, first: int, final_QB: Float32Array | None = None) -> None:
        """Take the scores of a block whose first document has the number `first`. The kept ones are ranked by `final_QB`."""
        numbers_B = np.arange(first, first + scores_QB.shape[1], dtype=np.int64)
        final_QB = scores_QB if final_QB is None else final_QB
        num_queries, num_kept = self._keys_QK.shape
        step = max(1, _NUMBERS // (num_kept + len(numbers_B)))
        some = [slice(start, start + step) for start in range(0, num_queries, step)]
        parts = [self._merged(rows, _keys(scores_QB[rows], numbers_B), final_QB[rows]) for rows in some]
        self._keys_QK = np.concatenate([keys for keys, _ in parts])
        self._final_QK = np.concatenate([final for _, final in parts])

    def _merged(self, rows: slice, keys_qB: Int64Array, final_qB: Float32Array) -> tuple[Int64Array, Float32Array]:
        """Return the best of some queries after a block."""
        keys = np.concatenate([self._keys_QK[rows], keys_qB], axis=1)
        final = np.concatenate([self._final_QK[rows], final_qB], axis=1)
        if keys.shape[1] <= self._depth:
            return keys, final
        place_qK = np.argpartition(keys, -self._depth, axis=1)[:, -self._depth :]
        return np.take_along_axis(keys, place_qK, axis=1), np.take_along_axis(final, place_qK, axis=1)

    def ranked(self, top_k: int) -> tuple[Int64Array, Float32Array]:
        """Return the numbers of each query's best documents, best first, and their scores: (Q, at most `top_k`) both."""
        numbers_QK = _numbers(self._keys_QK)
        order_QK = np.argsort(-_keys(self._final_QK, numbers_QK), axis=1)[:, :top_k]
        return np.take_along_axis(numbers_QK, order_QK, axis=1), np.take_along_axis(self._final_QK, order_QK, axis=1)


def _keys(scores: Float32Array, numbers: NDArray[np.int64]) -> Int64Array:
    """Return an integer for each score and document, greater for what ranks first."""
    bits = (scores.astype(np.float32, copy=False) + np.float32(0)).view(np.int32)  # -0 becomes 0
    ordered = (bits ^ ((bits >> 31) & np.int32(_LAST))).astype(np.int64)  # of negative floats the bits fall
    return (ordered << 32) | (_LAST - numbers)


def _numbers(keys: Int64Array) -> Int64Array:
    return _LAST - (keys & 0xFFFFFFFF)
