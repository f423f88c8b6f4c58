"""Sweep of request rates over one or several servers, in turns, so that a change of the machine touches all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from whimbrel.errors import SetupError
from whimbrel_bench.arrivals import read_rate
from whimbrel_bench.backends import Sample
from whimbrel_bench.results import Result, word
from whimbrel_bench.target import Load, Target


@dataclass(frozen=True)
class Point:
    """One run of a sweep, as pictures show it. Latencies in milliseconds."""

    server: str
    rate: float
    throughput: float
    """Requests answered per second."""
    median: float
    high: float
    """The highest percentile that was asked for."""
    failed: int = 0


def read_rates(text: str) -> list[float]:
    """Return the rates of `--sweep`, in rising order. Raises SetupError."""
    rates = sorted({read_rate(part.strip()) for part in text.split(",") if part.strip()})
    if not rates:
        raise SetupError("--sweep has no rates.", hint="for example --sweep 5,10,20,40,inf")
    return rates


def run_sweep(
    targets: Sequence[Target],
    samples: Callable[[Target], Sequence[Sample]],
    load: Load,
    rates: Sequence[float],
    *,
    run: Callable[[Target, Sequence[Sample], Load], Result],
    seconds: float,
) -> list[Result]:
    """Run every rate on every server: as many requests as are due in `seconds`, and all samples at an infinite rate.

    A server that does not keep up with a rate is not asked for higher ones but the infinite one. A run that was stopped is the
    last.
    """
    results: list[Result] = []
    behind: set[str] = set()
    for rate in rates:
        for target in targets:
            if target.name in behind and isfinite(rate):
                continue
            own = samples(target)
            count = max(1, min(len(own), round(rate * seconds))) if isfinite(rate) else len(own)
            result = run(target, own[:count], replace(load, rate=rate))
            results.append(result)
            if result.interrupted:
                return results
            if isfinite(rate) and result.request_throughput < 0.7 * rate:
                behind.add(target.name)
    return results


def points(results: Sequence[Result]) -> list[Point]:
    """Return the points of results that have latencies."""
    found: list[Point] = []
    for result in results:
        if not result.completed:
            continue
        ms, setting = result.milliseconds(), result.setting
        high = ms[f"p{word(max(setting.percentiles))}_e2el_ms"]
        name = setting.server or setting.model
        found.append(Point(name, setting.request_rate, result.request_throughput, ms["median_e2el_ms"], high, result.failed))
    return found
