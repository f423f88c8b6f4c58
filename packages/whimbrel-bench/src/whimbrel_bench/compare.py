"""Comparison of two servers, models or dtypes: the same work in turns, after both have given the same vectors.

A contender is anything that computes the same texts. No time is taken before the cosines of their results are high enough.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import SetupError, WhimbrelError
from whimbrel.types.arrays import Float32Array
from whimbrel_bench.backends import Sample, read_rows
from whimbrel_bench.offline import cosines, rows_of, run_requests
from whimbrel_bench.target import Load, Target

if TYPE_CHECKING:
    from whimbrel.engine.engine import Engine


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


class Contender(NamedTuple):
    """One side of a comparison, by its name in words."""

    name: str
    vectors: Callable[[], list[Float32Array]]
    """Returns the results of the first texts."""
    round: Callable[[], float]
    """Does all the work once, and returns the seconds that it took."""


def server_contender(target: Target, samples: Sequence[Sample], load: Load, num_checked: int) -> Contender:
    """Return a server, with a number of requests on their way at a time."""

    def vectors() -> list[Float32Array]:
        return [row for sample in samples[:num_checked] for row in read_rows(target.backend, target.ask(sample))]

    def run() -> float:
        result = target.run(samples, load)
        if result.interrupted:
            raise KeyboardInterrupt
        return result.all_answered().duration

    return Contender(target.name, vectors, run)


def _engine_contender(engine: Engine, chunks: Sequence[list[str]], num_checked: int) -> Contender:
    """Return a model in an engine of this process."""

    def run() -> float:
        begin = perf_counter()
        run_requests(engine, chunks)
        return perf_counter() - begin

    name = f"{engine.card.name} ({engine.plan.dtype}, {engine.plan.device})"
    return Contender(name, lambda: rows_of(run_requests(engine, chunks[:num_checked])), run)


@contextmanager
def engine_contenders(
    sides: Sequence[tuple[str | None, str]], device: str, requests: Sequence[Sample], *, num_checked: int
) -> Generator[list[Contender]]:
    """Load an engine for each model and dtype."""
    from whimbrel.engine.engine import Engine

    with ExitStack() as stack:
        made = (Engine(model, dtype=dtype, device=device, max_queue_tokens=2**31) for model, dtype in sides)
        engines = [stack.enter_context(engine) for engine in made]
        chunks = [list(sample.texts) for sample in requests]
        yield [_engine_contender(engine, chunks, num_checked) for engine in engines]


@dataclass(frozen=True)
class Comparison:
    """Seconds of each round of both sides, and the ratio of the first's median to the second's."""

    names: tuple[str, str]
    rounds: tuple[list[float], list[float]]
    min_cosine: float
    num_compared: int
    interrupted: bool = False
    failure: str = ""
    """The error that ended the rounds early, or ""."""

    @property
    def ratio(self) -> Ratio:
        return ratio_of_medians(*self.rounds)


def check_same(first: Contender, second: Contender, threshold: float) -> tuple[float, int]:
    """Return the lowest cosine and the number of results. Raises SetupError with the numbers if it is below the threshold."""
    found = cosines(first.vectors(), second.vectors())
    if not found.size:
        raise SetupError("there are no vectors to compare.", hint="choose a dataset with at least one text")
    lowest = float(found.min())
    if not lowest >= threshold:
        raise SetupError(
            f"{first.name} and {second.name} do not give the same: the lowest of {found.size} cosines is {lowest:.6f}, "
            f"text {int(found.argmin())} (mean {float(found.mean()):.6f}); --min-cosine is {threshold:g}.",
            hint="compare servers of the same model; --min-cosine lowers the threshold",
        )
    return lowest, found.size


def compare(
    first: Contender, second: Contender, *, rounds: int, threshold: float, on_round: Callable[[int], None] | None = None
) -> Comparison:
    """Check both, warm both up, and measure them in turns; the one that begins alternates.

    Ctrl-C or a failure ends the comparison with the rounds so far. Raises WhimbrelError or KeyboardInterrupt if there are none.
    """
    lowest, number = check_same(first, second, threshold)
    seconds: tuple[list[float], list[float]] = ([], [])
    interrupted, failure = False, ""
    try:
        for side in (first, second):
            side.round()  # not counted
        for index in range(rounds):
            sides = ((first, 0), (second, 1)) if index % 2 == 0 else ((second, 1), (first, 0))
            found = {place: side.round() for side, place in sides}
            for place in (0, 1):
                seconds[place].append(found[place])
            if on_round is not None:
                on_round(index + 1)
    except KeyboardInterrupt:
        if not seconds[0]:
            raise
        interrupted = True
    except WhimbrelError as error:
        if not seconds[0]:
            raise
        failure = error.message
    return Comparison((first.name, second.name), seconds, lowest, number, interrupted, failure)


def describe(comparison: Comparison) -> list[str]:
    """Return the comparison as lines of text."""
    (first, second), ratio = comparison.names, comparison.ratio
    medians = [float(np.median(each)) for each in comparison.rounds]
    width = max(len(first), len(second))
    lines = [f"  {name:<{width}}  {median:10.4f} s per round" for name, median in zip(comparison.names, medians, strict=True)]
    lines.append(f"same results: lowest of {comparison.num_compared} cosines {comparison.min_cosine:.6f}")
    number = len(comparison.rounds[0])
    lines.append(
        f"ratio of medians over {number} rounds: {ratio.value:.3f} (95 % interval {ratio.low:.3f} to {ratio.high:.3f})"
    )
    if comparison.interrupted:
        lines.append("Stopped early: these are the rounds so far.")
    if number < 5:
        lines.append("Fewer than 5 rounds: the interval says little.")
    elif not ratio.shows_difference:
        lines.append("No difference is shown: the interval contains 1.")
    else:
        faster, factor = (second, ratio.value) if ratio.value > 1 else (first, 1 / ratio.value)
        lines.append(f"{faster} is faster, {factor:.3f} times.")
    return lines


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison with names that say its units."""
    ratio = comparison.ratio
    return {
        "names": list(comparison.names),
        "round_seconds": [list(each) for each in comparison.rounds],
        "ratio_of_medians": ratio.value,
        "ratio_interval_95": [ratio.low, ratio.high],
        "min_cosine": comparison.min_cosine,
        "num_compared": comparison.num_compared,
        "interrupted": comparison.interrupted,
        "failure": comparison.failure or None,
    }
