"""Ward's hierarchical clustering that lets other threads run. numpy, and scipy's disjoint sets.

The result equals scipy's bit for bit. Promise: clustering one long document delays neither other requests nor the event loop.
scipy's implementation is twice as fast for some thousand rows, but holds Python's lock: seconds for 8,192 rows (ADR 20).

Theory of operation: nearest-neighbor chains. A chain goes from any cluster to its nearest, and on from there, until two
clusters are each other's nearest. These are merged, and the chain continues before them. A merge brings no two clusters nearer,
so the rest of the chain stays valid. Among equally near clusters, the previous one in the chain is preferred, then the lowest
index. The new distances follow Lance and Williams, with their terms added in scipy's order.

Source: scipy/cluster/_hierarchy.pyx (1.17), nn_chain and label.

Shapes: N rows, M merges.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]


def ward_linkage(distances_NN: _Floats) -> _Floats:
    """Return scipy.cluster.hierarchy.linkage(squareform(distances_NN), "ward"), (N - 1, 4). Overwrites the distances.

    The distances are symmetric and N is at least 2. Raises ValueError if they, or those of merged clusters, are not finite. The
    latter happens where vectors are not normalised, as distances are then none of a space."""
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
