"""Token pooling: fewer vectors for a document. numpy, and scipy when it is used.

Tokens of similar direction are replaced by their mean. Ward's clustering on the cosine distances of a document's tokens is cut
at num_tokens // pool_factor clusters. Each becomes the mean of its tokens, in the order of the cut tree. The first tokens
("protected": [CLS] and similar ones) stay as they are, in front. The vectors are those of Sentence Transformers 6
(multi_vector_encoder/modules/token_pooling.py). PyLate up to 1.3.4 and colpali-engine cluster differently, so their pooled
vectors differ.

Published results lose nothing at a factor of 2 and a few per cent at 4 (arXiv 2409.14683).

Distances are float32, as in the source. If several differ only in their last bits, e.g. those of repeated tokens, rounding
decides which pair is merged first: another processor or linear algebra library may merge another pair.

Memory and time grow with the square of a document's tokens. Promise: clustering one long document delays neither other requests
nor the event loop. scipy is twice as fast for some thousand rows, but holds Python's lock: seconds for 8,192 rows (ADR 20). So
longer documents are clustered here.

Shapes: T tokens, X tokens of all documents, D columns, N rows to cluster, M merges.
"""

from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.result import Ragged

_Floats = NDArray[np.float64]

_LEAST_NORM: Final = np.float32(1e-12)
"""Least divisor, as in torch.nn.functional.normalize."""
MAX_TOKENS: Final = 8192
"""Limit in tokens of a document, without protected ones. Its distances take about a gigabyte."""
_LONG: Final = 1024
"""Number of tokens above which a document is clustered by `ward_linkage`."""
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


def ward_linkage(distances_NN: _Floats) -> _Floats:
    """Return scipy.cluster.hierarchy.linkage(squareform(distances_NN), "ward"), (N - 1, 4), bit for bit, and let others run.

    Overwrites the distances, which are symmetric; N is at least 2. Raises ValueError if they, or those of merged clusters, are
    not finite. The latter happens where vectors are not normalised, as distances are then none of a space.

    Theory of operation: nearest-neighbor chains. A chain goes from any cluster to its nearest, and on from there, until two
    clusters are each other's nearest. These are merged, and the chain continues before them. A merge brings no two clusters
    nearer, so the rest of the chain stays valid. Among equally near clusters, the previous one in the chain is preferred, then
    the lowest index. The new distances follow Lance and Williams, with their terms added in scipy's order.

    Source: scipy/cluster/_hierarchy.pyx (1.17), nn_chain and label.
    """
    if not np.isfinite(distances_NN).all():
        raise ValueError("distances must be finite.")
    merges_M4 = _merge_pairs(distances_NN)
    return _relabel(merges_M4[np.argsort(merges_M4[:, 2], kind="stable")])


def _merge_pairs(distances_NN: _Floats) -> _Floats:
    """Return (row, row, distance, size) of each merge, in the order of the chain. The higher row then represents both."""
    num = len(distances_NN)
    sizes_N = np.ones(num)
    merged_N = np.zeros(num)  # infinity for rows that another represents
    np.fill_diagonal(distances_NN, np.inf)
    merges_M4 = np.empty((num - 1, 4))
    chain: list[int] = []
    for merge in merges_M4:
        chain = chain or [int(merged_N.argmin())]
        while True:
            near_N = distances_NN[chain[-1]] + merged_N
            nearest = int(near_N.argmin())
            if len(chain) > 1 and near_N[chain[-2]] <= near_N[nearest]:
                break
            if len(chain) > num:  # a circle, which would never end
                raise ValueError("the distances are none of a space.")
            chain.append(nearest)
        x, y = sorted((chain.pop(), chain.pop()))
        merge[:] = x, y, distances_NN[x, y], sizes_N[x] + sizes_N[y]
        merged_N[x] = np.inf
        merged_distances_N = _merged_distances(distances_NN, sizes_N, x, y) + merged_N
        if np.isnan(merged_distances_N[merged_N == 0]).any():
            raise ValueError("the distances are none of a space.")
        distances_NN[y] = distances_NN[:, y] = merged_distances_N
        sizes_N[y] = merge[3]
    return merges_M4


def _merged_distances(distances_NN: _Floats, sizes_N: _Floats, x: int, y: int) -> _Floats:
    to_x_N, to_y_N, apart, size_x, size_y = distances_NN[x], distances_NN[y], distances_NN[x, y], sizes_N[x], sizes_N[y]
    share_N = 1 / (sizes_N + (size_x + size_y))
    squares_N = (sizes_N + size_x) * share_N * to_x_N * to_x_N + (sizes_N + size_y) * share_N * to_y_N * to_y_N
    squares_N -= sizes_N * share_N * apart * apart
    return np.sqrt(squares_N)


def _relabel(merges_M4: _Floats) -> _Floats:
    """Replace rows by clusters: merge i forms the cluster N + i."""
    from scipy.cluster.hierarchy import DisjointSet  # pyright: ignore[reportMissingTypeStubs]

    num = len(merges_M4) + 1
    rows: Any = DisjointSet(range(num))
    clusters = list(range(num))  # by the row that a set is known by
    for new, merge in enumerate(merges_M4, start=num):
        first, second = (int(rows[int(row)]) for row in merge[:2])
        rows.merge(first, second)
        merge[:] = *sorted((clusters[first], clusters[second])), merge[2], rows.subset_size(first)
        clusters[rows[first]] = new
    return merges_M4
