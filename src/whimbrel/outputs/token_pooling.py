"""Token pooling: fewer vectors for a document. numpy, and scipy when it is used.

Tokens of similar direction are replaced by their mean. Ward's clustering on the cosine distances of a document's tokens is cut
at num_tokens // pool_factor clusters. Each becomes the mean of its tokens, in the order of the cut tree. The first tokens
("protected": [CLS] and similar ones) stay as they are, in front. The vectors are those of Sentence Transformers 6
(multi_vector_encoder/modules/token_pooling.py). PyLate up to 1.3.4 and colpali-engine cluster differently, so their pooled
vectors differ.

Published results lose nothing at a factor of 2 and a few per cent at 4 (arXiv 2409.14683).

Distances are float32, as in the source. If several differ only in their last bits, e.g. those of repeated tokens, rounding
decides which pair is merged first: another processor or linear algebra library may merge another pair.

Memory and time grow with the square of a document's tokens. Pooling one document does not stop other threads: scipy holds
Python's lock while it clusters, so longer documents are clustered by `ward.py`, which releases it.

Shapes: T tokens, X tokens of all documents, D columns.
"""

from threading import Lock
from typing import Any, Final

import numpy as np

from whimbrel.outputs.ward import ward_linkage
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.result import Ragged

_LEAST_NORM: Final = np.float32(1e-12)
"""Least divisor, as in torch.nn.functional.normalize."""
MAX_TOKENS: Final = 8192
"""Limit in tokens of a document, without protected ones. Its distances take about a gigabyte."""
_LONG: Final = 1024
"""Number of tokens above which a document is clustered by `ward.py`."""
_one_at_a_time: Final = Lock()
"""Lock that limits the memory: one long document is clustered at a time."""


def pool_tokens(documents: Ragged, pooling: TokenPooling) -> Ragged:
    """Return the pooled vectors of the documents, whose vectors are finite and have norm 1; the distance is 1 - dot.

    A document's result does not depend on the other documents. It has at least one vector, unless the document has none. Ties
    may leave fewer than num_tokens // pool_factor.
    """
    rows_XD = np.asarray(documents.rows_XD, dtype=np.float32)
    clusters = [_cluster(document_TD, pooling) for document_TD in Ragged(rows_XD, documents.offsets_N1)]
    offsets_N1 = np.cumsum([0, *(cluster_T.max(initial=-1) + 1 for cluster_T in clusters)], dtype=np.int64)
    if clusters:
        cluster_X = np.concatenate(clusters) + np.repeat(offsets_N1[:-1], np.diff(documents.offsets_N1))
        rows_XD = _cluster_means(rows_XD, cluster_X)
    return Ragged(_normalize(rows_XD) if pooling.normalize_embeddings else rows_XD, offsets_N1)


def _cluster(document_TD: Float32Array, pooling: TokenPooling) -> Int64Array:
    num_protected = min(pooling.num_protected_tokens, len(document_TD))
    free_TD = document_TD[num_protected:]
    num_clusters = max(int(len(free_TD) // pooling.pool_factor), 1)
    if num_clusters >= len(free_TD):
        return np.arange(len(document_TD))
    return np.concatenate((np.arange(num_protected), num_protected + _ward_clusters(free_TD, num_clusters)))


def _ward_clusters(rows_TD: Float32Array, num_clusters: int) -> Int64Array:
    """Return the cluster of each row, numbered from 0 without gaps."""
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
    """Return the cosine distance of each two rows, in scipy's condensed form."""
    from scipy.spatial.distance import squareform

    distances_TT = rows_TD @ rows_TD.T
    np.clip(np.subtract(1, distances_TT, out=distances_TT), 0, 2, out=distances_TT)
    return squareform(distances_TT, checks=False)


def _cluster_means(rows_XD: Float32Array, cluster_X: Int64Array) -> Float32Array:
    """Return the mean of each cluster, summed in the order of the tokens."""
    order_X = np.argsort(cluster_X, kind="stable")
    counts = np.bincount(cluster_X)
    starts = np.cumsum(counts) - counts
    return np.divide(np.add.reduceat(rows_XD[order_X], starts), counts[:, None], dtype=np.float32)


def _normalize(rows_XD: Float32Array) -> Float32Array:
    return rows_XD / np.maximum(np.linalg.norm(rows_XD, axis=1, keepdims=True), _LEAST_NORM)
