"""MaxSim: for each pair, the sum over query tokens of the greatest similarity to a document token.

Vectors are neither padded nor copied: a padding vector would compete with similarities below 0. Ranges of rows assign tokens to
texts. Sums are float32. A document without tokens scores EMPTY, below all others, as in Sentence Transformers.

On a CPU `maxsim_cpu.py` computes tiles, and a score has the same bits alone and with any others. On a GPU `maxsim_triton.py`
runs a Triton kernel. `maxsim_reference` is the plain formula. Source: Khattab and Zaharia, "ColBERT" (2004.12832), 3.3.

Shapes: Q query tokens, T document tokens, M queries, N documents, P pairs, D width.
"""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from whimbrel.model.ops.maxsim_cpu import maxsim_cpu
from whimbrel.model.ops.token_vectors import EMPTY, NO_MATCH, TokenVectors
from whimbrel.types.arrays import Float32Array
from whimbrel.types.result import Ragged

Reduce: TypeAlias = Literal["sum", "mean"]
"""Reduction of the maxima of a query's tokens."""


def maxsim(
    queries: TokenVectors,
    documents: TokenVectors,
    query_P: NDArray[np.integer],
    document_P: NDArray[np.integer],
    *,
    reduce: Reduce = "sum",
    threads: Executor | None = None,
    num_threads: int = 1,
) -> Float32Array:
    """Return the score of each pair (query_P[i], document_P[i]), (P,) on the host. A query without tokens scores 0.

    On a CPU `threads` run the parts, about `num_threads` at a time, with the same bits. Raises ValueError if widths differ.
    """
    if queries.width != documents.width:
        raise ValueError(f"query vectors have width {queries.width}, document vectors {documents.width}")
    if queries.rows_TD.is_cuda:
        from whimbrel.model.ops.maxsim_triton import maxsim_triton

        scores_P = maxsim_triton(queries, documents, query_P, document_P)
    else:
        scores_P = maxsim_cpu(queries, documents, query_P, document_P, threads=threads, num_threads=num_threads)
    if reduce == "mean":
        scores_P /= np.maximum(queries.lengths, 1)[query_P]
    scores_P[documents.lengths[document_P] == 0] = EMPTY
    return scores_P


def maxsim_reference(query_QD: Tensor, document_TD: Tensor) -> float:
    """Return the score of one pair by the plain formula, in float64."""
    if not len(document_TD):
        return EMPTY
    return (query_QD.double() @ document_TD.double().T).amax(dim=1).sum().item()


def best_matches(
    queries: TokenVectors, documents: TokenVectors, query_P: NDArray[np.integer], document_P: NDArray[np.integer]
) -> Ragged:
    """Return the greatest similarity of each query token, and the index of the first document token that has it.

    (Q, 2) for each pair, on the host; NO_MATCH for a document without tokens. On a CPU, pairs are computed one by one.
    """
    if queries.rows_TD.is_cuda:
        from whimbrel.model.ops.maxsim_triton import matches_triton

        matches_X2 = matches_triton(queries, documents, query_P, document_P)
    else:
        pairs = zip(query_P.tolist(), document_P.tolist(), strict=True)
        matches = [_best_matches(queries.of_text(query), documents.of_text(document)) for query, document in pairs]
        matches_X2 = np.concatenate(matches) if matches else np.empty((0, 2), np.float32)
    return Ragged(matches_X2, np.concatenate(([0], np.cumsum(queries.lengths[query_P]))))


def _best_matches(query_QD: Tensor, document_TD: Tensor) -> Float32Array:
    if not len(document_TD):
        return np.tile(np.array(NO_MATCH, np.float32), (len(query_QD), 1))
    best_Q, token_Q = (query_QD @ document_TD.T).max(dim=1)
    return np.stack((best_Q.numpy(), token_Q.numpy()), axis=1, dtype=np.float32, casting="same_kind")
