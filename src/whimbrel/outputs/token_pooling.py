"""Fewer vectors for a document: tokens of like direction become their mean. numpy, and scipy when it is used.

Ward's clustering on the cosine distances of a document's tokens, cut at num_tokens // pool_factor clusters; each becomes the
mean of its tokens, in the order of the cut tree. The first tokens ("protected": [CLS] and its like) stay as they are, in front.
Source: Sentence Transformers 6, multi_vector_encoder/modules/token_pooling.py, whose vectors these are. PyLate up to 1.3.4 and
colpali-engine cluster otherwise: vectors that they have pooled are others.

Queries are not pooled. Published results lose nothing at a factor of 2 and a few per cent at 4 (arXiv 2409.14683), more where
one detail of a long page is searched for. Pooling twice is not pooling once by both factors.

Distances are those of float32, as there. Where several are equal but for their last bits, as those of repeated tokens are,
rounding decides what is joined first: another processor or library of linear algebra may join another pair.

Memory and time grow with the square of a document's tokens.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, Final

import numpy as np

from whimbrel.outputs.ward import ward_linkage
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.result import Ragged

_LEAST_NORM: Final = np.float32(1e-12)
"""What torch.nn.functional.normalize divides by at least."""
MAX_TOKENS: Final = 8192
"""Of a document, protected ones not counted: its distances then take about a gigabyte."""
_LONG: Final = 1024
"""A document of more is clustered so that other threads run meanwhile,"""
_one_at_a_time: Final = Lock()
"""but no other such document: for the sake of the memory that each takes."""


def pool_tokens(documents: Ragged, pooling: TokenPooling) -> Ragged:
    """The documents' vectors, pooled. They are finite and of norm 1: what counts as distance is 1 - dot.

    A document's vectors do not depend on the others. Each has one vector at least, and none where it had none; ties may leave
    fewer than num_tokens // pool_factor.
    """
    rows_XD = np.asarray(documents.rows_XD, dtype=np.float32)
    clusters = [_clusters(document_TD, pooling) for document_TD in Ragged(rows_XD, documents.offsets_N1)]
    offsets_N1 = np.cumsum([0, *(cluster_T.max(initial=-1) + 1 for cluster_T in clusters)], dtype=np.int64)
    if clusters:
        cluster_X = np.concatenate(clusters) + np.repeat(offsets_N1[:-1], np.diff(documents.offsets_N1))
        rows_XD = _means(rows_XD, cluster_X)
    return Ragged(_normalized(rows_XD) if pooling.normalize_embeddings else rows_XD, offsets_N1)


def _clusters(document_TD: Float32Array, pooling: TokenPooling) -> Int64Array:
    """Which vector of the outcome each token goes into."""
    num_protected = min(pooling.num_protected_tokens, len(document_TD))
    free_TD = document_TD[num_protected:]
    num_clusters = max(int(len(free_TD) // pooling.pool_factor), 1)
    if num_clusters >= len(free_TD):
        return np.arange(len(document_TD))
    return np.concatenate((np.arange(num_protected), num_protected + _ward(free_TD, num_clusters)))


def _ward(rows_TD: Float32Array, num_clusters: int) -> Int64Array:
    """The cluster of each row, counted from 0 without gaps."""
    from scipy.cluster import hierarchy  # pyright: ignore[reportMissingTypeStubs]
    from scipy.spatial.distance import squareform

    scipy: Any = hierarchy
    if len(rows_TD) > _LONG:
        with _one_at_a_time:
            tree = ward_linkage(squareform(_distances(rows_TD)).astype(np.float64))
    else:
        tree = scipy.linkage(_distances(rows_TD), method="ward")
    labels: Int64Array = scipy.fcluster(tree, t=num_clusters, criterion="maxclust")
    return np.unique(labels, return_inverse=True)[1]


def _distances(rows_TD: Float32Array) -> Float32Array:
    """Of each two rows, once."""
    from scipy.spatial.distance import squareform

    distances_TT = rows_TD @ rows_TD.T
    np.clip(np.subtract(1, distances_TT, out=distances_TT), 0, 2, out=distances_TT)
    return squareform(distances_TT, checks=False)


def _means(rows_XD: Float32Array, cluster_X: Int64Array) -> Float32Array:
    """The mean of each cluster, summed in the order of the tokens."""
    order_X = np.argsort(cluster_X, kind="stable")
    counts = np.bincount(cluster_X)
    starts = np.cumsum(counts) - counts
    return np.divide(np.add.reduceat(rows_XD[order_X], starts), counts[:, None], dtype=np.float32)


def _normalized(rows_XD: Float32Array) -> Float32Array:
    return rows_XD / np.maximum(np.linalg.norm(rows_XD, axis=1, keepdims=True), _LEAST_NORM)
