"""Sweep of request rates over one or several servers, in turns, so that a change of the machine touches all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite

from whimbrel_bench.backends import Sample
from whimbrel_bench.options import Load
from whimbrel_bench.results import Result
from whimbrel_bench.target import Target


def run_sweep(
    targets: Sequence[Target],
    samples: Mapping[str, Sequence[Sample]],
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
            own = samples[target.name]
            due = rate * seconds
            result = run(target, own[: max(1, round(due))] if isfinite(due) else own, replace(load, rate=rate))
            results.append(result)
            if result.interrupted:
                return results
            if isfinite(rate) and result.request_throughput < 0.7 * rate:
                behind.add(target.name)
    return results
