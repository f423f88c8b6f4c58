"""Tiles of queries: the table that tells each program of the ragged attention kernel its queries and their keys.

A seq of at most 16 queries is one small tile; others have large ones, of which only the last is not full. So the tiles of a seq
depend on nothing but its own number of queries. Those with more keys come first, because they take longest.

Shapes: S seqs, W tiles, R rows, N heads, H head width.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from whimbrel.types.arrays import Int32Array, Int64Array
from whimbrel.types.batch import offsets_of

SMALL_TILE: Final = 16
LARGE_TILE: Final = 64
"""Queries of a tile. Tensor cores take 16 rows at least, and those of Hopper's fast products 64."""

STEP: Final = 8
"""Divisor of head widths and strides that the kernel takes: 8 elements of 2 bytes are one load of 16."""
MAX_WIDTH: Final = 256
"""Limit of the width of heads, whose sums are in registers."""


def suits(x_RNH: Tensor) -> bool:
    """Return whether the kernel reads heads as they lie."""
    return x_RNH.stride(2) == 1 and not any(stride % STEP for stride in x_RNH.stride()[:2]) and x_RNH.data_ptr() % 16 == 0


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """The small tiles, and after them the large ones."""

    table_W8: Int32Array
    """First row of the queries, their number, and the position of the first one, counted from the first key. First row of the
    own keys, and their number. First row of the kept keys, and their number. The last field keeps both parts aligned."""
    num_small: int


def make_tiles(seqs_S7: Int64Array) -> Tiles:
    """Return the tiles of seqs, which have the first 7 fields of a tile."""
    queries_S = seqs_S7[:, 1]
    size_S = np.where(queries_S <= SMALL_TILE, SMALL_TILE, LARGE_TILE)
    count_S = -(-queries_S // size_S)
    seq_W = np.arange(len(queries_S)).repeat(count_S)
    first_W = (np.arange(seq_W.size) - offsets_of(count_S)[:-1][seq_W]) * size_S[seq_W]
    table_W8 = np.zeros((seq_W.size, 8), np.int32)
    table_W8[:, :7] = seqs_S7[seq_W]
    table_W8[:, 0] += first_W
    table_W8[:, 1] = np.minimum(queries_S[seq_W] - first_W, size_S[seq_W])
    table_W8[:, 2] += first_W
    is_large_W = size_S[seq_W] == LARGE_TILE
    order_W = np.lexsort((-table_W8[:, 2], -(table_W8[:, 4] + table_W8[:, 6]), is_large_W))
    return Tiles(table_W8[order_W], int(seq_W.size - is_large_W.sum()))
