"""Bootstrap intervals of means over queries, alone and of differences between systems. numpy only; the same seed each time.

Queries are drawn again with replacement, and with them the values of all systems (paired percentile bootstrap). So queries that
are hard for every system do not widen the interval of a difference. An interval says how far a result depends on the choice of
queries; it knows nothing of judgements that are wrong or missing.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.

Shapes: Q queries, C columns (a system's measure each), D draws.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS: Final = 10_000
_SEED: Final = 0
_NUMBERS: Final = 2**22
"""Numbers of a chunk of draws."""

Float64Array = NDArray[np.float64]

MIN_DIFFERENT: Final = 6
"""Queries that have to differ before a difference is shown: five agree by chance in one of sixteen cases."""


class Interval(NamedTuple):
    """A mean, and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return not self.low <= 0.0 <= self.high


def draw_means(values_QC: Float64Array) -> Float64Array:
    """Return the mean of each column over each draw of queries: (D, C)."""
    num_queries = len(values_QC)
    rng = np.random.default_rng(_SEED)
    step = max(1, _NUMBERS // num_queries)
    parts: list[Float64Array] = []
    for start in range(0, DRAWS, step):
        count = min(step, DRAWS - start)
        drawn_DQ = rng.integers(0, num_queries, size=(count, num_queries)) + np.arange(count)[:, None] * num_queries
        times_DQ = np.bincount(drawn_DQ.ravel(), minlength=count * num_queries).reshape(count, num_queries)
        parts.append(times_DQ @ values_QC / num_queries)
    return np.concatenate(parts)


def interval_of(values_Q: Float64Array, means_D: Float64Array) -> Interval:
    """Return the mean of `values_Q` with the middle 95 % of the means of its draws."""
    low, high = np.percentile(means_D, [2.5, 97.5])
    return Interval(float(values_Q.mean()), float(low), float(high))
