"""Ratio of medians with its confidence interval, by the bootstrap. Pure."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_DRAWS: Final = 10_000


class Ratio(NamedTuple):
    """Ratio of two medians, and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float

    @property
    def shows_difference(self) -> bool:
        """True if the interval does not contain 1."""
        return not self.low <= 1.0 <= self.high


def ratio_of_medians(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Return median(a) / median(b) of rounds that were measured in turns.

    Rounds are drawn again with their partners (paired percentile bootstrap), so a load on both does not widen the interval.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    a_R, b_R = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a_R.shape != b_R.shape or not a_R.size:
        raise ValueError(f"{a_R.size} and {b_R.size} rounds: there must be as many of both, at least one")
    drawn_DR: NDArray[np.int64] = np.random.default_rng(0).integers(0, a_R.size, size=(_DRAWS, a_R.size))
    ratios_D = np.median(a_R[drawn_DR], axis=1) / np.median(b_R[drawn_DR], axis=1)
    low, high = np.percentile(ratios_D, [2.5, 97.5])
    return Ratio(float(np.median(a_R) / np.median(b_R)), float(low), float(high))
