"""Scores of pairs out of what a model gives for each text: how dense and sparse vectors are compared. numpy only.

Token vectors are compared where they are made (`matching`). A score has the same bits alone and among any others: products are
summed row by row, in an order that depends on the width alone.

Source: sentence_transformers/util/similarity.py (6.2), whose distances are negative, so that what is near scores high.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from whimbrel.types import Comparison, Float32Array, Outputs, Similarity, Sparse

_PAIRS_AT_A_TIME: Final = 4096

_DENSE: Final[Mapping[Similarity, Callable[[Float32Array, Float32Array], Float32Array]]] = {
    "cosine": lambda a_PD, b_PD: (a_PD * b_PD).sum(axis=1),  # of unit vectors, which is what is asked of the model
    "dot": lambda a_PD, b_PD: (a_PD * b_PD).sum(axis=1),
    "euclidean": lambda a_PD, b_PD: -np.sqrt(np.square(a_PD - b_PD).sum(axis=1)),
    "manhattan": lambda a_PD, b_PD: -np.abs(a_PD - b_PD).sum(axis=1),
}


def compare(outputs: Outputs, comparison: Comparison) -> Float32Array:
    """The score of each pair -> (P,)."""
    if outputs.dense is not None:
        return _compare_dense(outputs.dense, comparison)
    assert outputs.sparse is not None
    return _compare_sparse(outputs.sparse, comparison)


def _compare_dense(dense_ND: Float32Array, comparison: Comparison) -> Float32Array:
    scores_P = np.empty(comparison.num_pairs, np.float32)
    for start in range(0, comparison.num_pairs, _PAIRS_AT_A_TIME):
        some = slice(start, start + _PAIRS_AT_A_TIME)
        a_PD, b_PD = dense_ND[comparison.queries_P[some]], dense_ND[comparison.documents_P[some]]
        scores_P[some] = _DENSE[comparison.similarity](a_PD, b_PD)
    return scores_P


def _compare_sparse(sparse: Sparse, comparison: Comparison) -> Float32Array:
    """The dot product: a query's weights are looked up by the entries of its documents, all at once."""
    scores_P = np.zeros(comparison.num_pairs, np.float32)
    weights_V = np.zeros(int(sparse.ids_X.max(initial=-1)) + 1, np.float32)
    order = np.argsort(comparison.queries_P, kind="stable")
    for pairs in np.split(order, np.flatnonzero(np.diff(comparison.queries_P[order])) + 1) if order.size else []:
        ids, weights = sparse[int(comparison.queries_P[pairs[0]])]
        weights_V[ids] = weights
        for pair in pairs.tolist():
            document_ids, document_weights = sparse[int(comparison.documents_P[pair])]
            scores_P[pair] = (weights_V[document_ids] * document_weights).sum()
        weights_V[ids] = 0.0
    return scores_P
