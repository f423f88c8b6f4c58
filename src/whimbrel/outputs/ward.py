"""Ward's clustering as scipy does it, bit for bit, for what is large: meanwhile other threads of the process run. numpy only.

scipy's own is faster (twice, for some thousand rows), but holds Python's lock for all of it: for 8,192 rows seconds, in which
no event loop turns.

Theory of operation: chains of nearest neighbours. From any cluster go to its nearest, and on from there, until two are each
other's nearest; these are joined, and the chain goes on with what came before them. Joining makes no two clusters nearer than
they were, so the rest of the chain stays right. Of equally near ones the one before in the chain is preferred, then the lowest.
The new distances are Lance's and Williams', as is the order in which their terms are added up.

Source: scipy/cluster/_hierarchy.pyx (1.17), nn_chain and label.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]


def ward_linkage(distances_NN: _Floats) -> _Floats:
    """scipy.cluster.hierarchy.linkage(squareform(distances_NN), "ward"): (N - 1, 4). The distances are overwritten.

    They are symmetric, and N is at least 2. Raises ValueError if they are not finite."""
    if not np.isfinite(distances_NN).all():
        raise ValueError("distances must be finite.")
    joined_M4 = _merge_pairs(distances_NN)
    return _relabel(joined_M4[np.argsort(joined_M4[:, 2], kind="stable")])


def _merge_pairs(distances_NN: _Floats) -> _Floats:
    """(one, other, distance, size) of each join, in the order of the chain. Of two the higher stands for both from then on."""
    num = len(distances_NN)
    sizes_N, gone_N = np.ones(num), np.zeros(num)
    """`gone_N`: infinity for those that another stands for."""
    np.fill_diagonal(distances_NN, np.inf)
    joined_M4 = np.empty((num - 1, 4))
    chain: list[int] = []
    for join in joined_M4:
        chain = chain or [int(gone_N.argmin())]
        while True:
            near_N = distances_NN[chain[-1]] + gone_N
            nearest = int(near_N.argmin())
            if len(chain) > 1 and near_N[chain[-2]] <= near_N[nearest]:
                break
            chain.append(nearest)
        x, y = sorted((chain.pop(), chain.pop()))
        join[:] = x, y, distances_NN[x, y], sizes_N[x] + sizes_N[y]
        gone_N[x] = np.inf
        distances_NN[y] = distances_NN[:, y] = _joint_distances(distances_NN, sizes_N, x, y) + gone_N
        sizes_N[y] = join[3]
    return joined_M4


def _joint_distances(distances_NN: _Floats, sizes_N: _Floats, x: int, y: int) -> _Floats:
    """Those of x and y as one; infinite to itself."""
    to_x_N, to_y_N, apart, size_x, size_y = distances_NN[x], distances_NN[y], distances_NN[x, y], sizes_N[x], sizes_N[y]
    share_N = 1 / (sizes_N + (size_x + size_y))
    squares_N = (sizes_N + size_x) * share_N * to_x_N * to_x_N + (sizes_N + size_y) * share_N * to_y_N * to_y_N
    squares_N -= sizes_N * share_N * apart * apart
    return np.sqrt(squares_N)


def _relabel(joined_M4: _Floats) -> _Floats:
    """The same with clusters in place of rows: N + i is what join i made."""
    num = len(joined_M4) + 1
    above = list(range(2 * num - 1))
    sizes = [1] * num

    def cluster(row: int) -> int:
        top = row
        while above[top] != top:
            top = above[top]
        while above[row] != top:
            above[row], row = top, above[row]
        return top

    for made, join in enumerate(joined_M4, start=num):
        one, other = sorted((cluster(int(join[0])), cluster(int(join[1]))))
        sizes.append(sizes[one] + sizes[other])
        above[one] = above[other] = made
        join[:] = one, other, join[2], sizes[made]
    return joined_M4
