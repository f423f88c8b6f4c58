"""Array types and offsets of ragged arrays. numpy only."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Float32Array: TypeAlias = NDArray[np.float32]

Int32Array: TypeAlias = NDArray[np.int32]

Int64Array: TypeAlias = NDArray[np.int64]


def offsets_of(counts: NDArray[np.integer | np.bool_]) -> Int64Array:
    """Return the offsets of ranges with these counts, (N + 1,)."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def ranges(starts: NDArray[np.integer], ends: NDArray[np.integer]) -> Int64Array:
    """Concatenate the integers of several ranges."""
    counts = ends - starts
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum(), dtype=np.int64) + np.repeat(starts - before, counts)
