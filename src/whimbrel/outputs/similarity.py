"""Similarity of dense and sparse vectors of pairs. numpy only.

`model/maxsim_scorer.py` scores token vectors. A score has the same bits alone and among any others: products are summed row
by row, in an order that depends only on the width.

Source: sentence_transformers/util/similarity.py (6.2). Distances are negative, so that similar texts score high.

Shapes: P pairs, N texts, D columns, V vocabulary entries.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from whimbrel.outputs.layout import concat_sparse
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.stored_vectors import to_float32
from whimbrel.types.arrays import Float32Array
from whimbrel.types.batch import ranges
from whimbrel.types.request import Similarity
from whimbrel.types.result import Outputs, Sparse

_PAIRS_AT_A_TIME: Final = 4096

_DENSE: Final[Mapping[Similarity, Callable[[Float32Array, Float32Array], Float32Array]]] = {
    "cosine": lambda a_PD, b_PD: (a_PD * b_PD).sum(axis=1),  # the vectors have norm 1
    "dot": lambda a_PD, b_PD: (a_PD * b_PD).sum(axis=1),
    "euclidean": lambda a_PD, b_PD: -np.sqrt(np.square(a_PD - b_PD).sum(axis=1)),
    "manhattan": lambda a_PD, b_PD: -np.abs(a_PD - b_PD).sum(axis=1),
}


def score_pairs(outputs: Outputs, comparison: PairScoring) -> Float32Array:
    """Return the score of each pair, (P,). It is not finite if the vectors are too large."""
    with np.errstate(over="ignore", invalid="ignore"):
        if comparison.output == "dense":
            return _score_dense(_dense_vectors(outputs, comparison), comparison)
        return _score_sparse(_sparse_vectors(outputs, comparison), comparison)


def _dense_vectors(outputs: Outputs, comparison: PairScoring) -> Float32Array:
    """Return the vectors of all texts: first the computed ones, then the stored ones."""
    computed = [] if outputs.dense is None else [outputs.dense]
    stored = [to_float32(each) for each in comparison.stored]
    if comparison.similarity == "cosine":
        stored = [_normalize(rows_ND) for rows_ND in stored]
    return computed[0] if computed and not stored else np.concatenate([*computed, *stored])


def _normalize(rows_ND: Float32Array) -> Float32Array:
    """Divide rows by their norm, except zeros. In float64, whose squares neither overflow nor underflow."""
    wide_ND = rows_ND.astype(np.float64)
    norms_N1 = np.linalg.norm(wide_ND, axis=1, keepdims=True)
    return (wide_ND / np.where(norms_N1 > 0, norms_N1, 1)).astype(np.float32)


def _score_dense(dense_ND: Float32Array, comparison: PairScoring) -> Float32Array:
    scores_P = np.empty(comparison.num_pairs, np.float32)
    for start in range(0, comparison.num_pairs, _PAIRS_AT_A_TIME):
        some = slice(start, start + _PAIRS_AT_A_TIME)
        a_PD, b_PD = dense_ND[comparison.queries_P[some]], dense_ND[comparison.documents_P[some]]
        scores_P[some] = _DENSE[comparison.similarity](a_PD, b_PD)
    return scores_P


def _sparse_vectors(outputs: Outputs, comparison: PairScoring) -> Sparse:
    if outputs.sparse is not None and not comparison.stored:
        return outputs.sparse
    computed = outputs.sparse or concat_sparse({})
    ids = [computed.ids_X, *(each.ids_X for each in comparison.stored if each.ids_X is not None)]
    weights = [computed.weights_X, *(each.rows_XD[:, 0] for each in comparison.stored)]
    counts = [np.diff(each.offsets_N1) for each in (computed, *comparison.stored)]
    return Sparse(np.concatenate(ids), np.concatenate(weights), np.concatenate(([0], np.cumsum(np.concatenate(counts)))))


def _score_sparse(sparse: Sparse, comparison: PairScoring) -> Float32Array:
    """Return dot products. The weights of a query are looked up by the entries of all its documents at once."""
    scores_P = np.zeros(comparison.num_pairs, np.float32)
    weights_V = np.zeros(int(sparse.ids_X.max(initial=-1)) + 1, np.float32)
    starts_N, ends_N = sparse.offsets_N1[:-1], sparse.offsets_N1[1:]
    order = np.argsort(comparison.queries_P, kind="stable")
    order = order[(ends_N > starts_N)[comparison.documents_P[order]]]  # the others score 0
    for pairs in np.split(order, np.flatnonzero(np.diff(comparison.queries_P[order])) + 1) if order.size else []:
        ids, weights = sparse[int(comparison.queries_P[pairs[0]])]
        documents = comparison.documents_P[pairs]
        entries = ranges(starts_N[documents], ends_N[documents])
        weights_V[ids] = weights
        begins = np.cumsum(ends_N[documents] - starts_N[documents]) - (ends_N - starts_N)[documents]
        scores_P[pairs] = np.add.reduceat(weights_V[sparse.ids_X[entries]] * sparse.weights_X[entries], begins)
        weights_V[ids] = 0.0
    return scores_P
