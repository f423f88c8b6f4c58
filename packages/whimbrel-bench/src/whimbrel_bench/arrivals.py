"""Arrival times of requests at a rate: a Poisson process, scaled to the rate exactly."""

from math import inf, isfinite

import numpy as np


def arrival_times(count: int, rate: float, *, seed: int = 0, burstiness: float = 1.0) -> list[float] | None:
    """Return the seconds after the start at which `count` requests are due, or None for an infinite rate.

    The gaps are of a gamma distribution with shape `burstiness`: exponential for 1, more even above. The last request is due at
    count / rate, so that the rate is the one asked for, as in vLLM's benchmark.
    """
    if not isfinite(rate):
        return None
    if burstiness == inf:
        return [(i + 1) / rate for i in range(count)]
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), size=count)
    times = np.cumsum(gaps)
    return (times * (count / rate / times[-1])).tolist() if count else []
