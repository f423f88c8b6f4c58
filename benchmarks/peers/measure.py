"""Rounds of contenders in turns: their results are compared first, then one works at a time, in rotating order."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np
from common import note
from environments import Builder, Peer
from numpy.typing import NDArray

from whimbrel.errors import WhimbrelError
from whimbrel_bench.processes import cpu_seconds

T = TypeVar("T")

MIN_COSINES: Final = {"float32": 0.98, "bfloat16": 0.98, "its default": 0.98, "int8": 0.9}
"""Limits below which a result counts as wrong, by dtype."""


class Rows(NamedTuple):
    """Rows of a result: a vector or a score per text, or a vector per token."""

    rows: NDArray[np.float32]
    sizes: NDArray[np.int64]
    """Number of rows of each text."""


class Round(NamedTuple):
    """Seconds of a round, and what a load generator saw of it."""

    seconds: float
    latencies: Sequence[float] = ()
    """Seconds of each request."""
    client_cores: float = 0.0


class Contender(Protocol):
    """A peer that runs, with its workloads. Running one raises WhimbrelError if the peer fails."""

    peer: Peer
    pid: int
    """Process that leads the others of the peer."""

    def check(self, number: int) -> Rows: ...

    def time(self, number: int) -> Round: ...

    def stop(self) -> None: ...


@dataclass(slots=True)
class Measured:
    """Rounds of one peer with one workload."""

    peer: Peer
    workload: str
    model: str
    tokens: int
    """Tokens of a round, or of servers its texts."""
    cosine: float | None = None
    """Smallest cosine to the reference, or for scores their correlation with it."""
    rounds: list[Round] = field(default_factory=list[Round])
    cpu: list[float] = field(default_factory=list[float])
    """Processor seconds of the peer's processes in each round, which other work on the machine changes less."""
    idle_cores: float = 0.0
    """Most cores that the waiting peers took meanwhile."""

    @property
    def seconds(self) -> list[float]:
        return [each.seconds for each in self.rounds]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def is_wrong(self) -> bool:
        return self.cosine is not None and not self.cosine >= MIN_COSINES[self.peer.dtype]


@dataclass(slots=True)
class Run:
    """A comparison: what it has found so far, and the reasons of the peers that failed."""

    builder: Builder
    rounds: int
    quick: bool
    measured: dict[str, list[Measured]] = field(default_factory=lambda: {"engines": [], "servers": []})
    failures: dict[str, str] = field(default_factory=dict[str, str])

    @contextmanager
    def noting(self, name: str) -> Generator[None]:
        """Turn a failure of a peer into a reason under this name."""
        try:
            yield
        except WhimbrelError as failure:
            self.failures[name] = str(failure)[:240]


def _min_cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the smallest cosine between rows of the same index; of scores their correlation."""
    if a.shape != b.shape:
        return float("nan")
    a, b = a.astype(np.float64), b.astype(np.float64)
    if a.ndim == 1 or a.shape[1] == 1:
        return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def measure(
    run: Run, kind: str, contenders: Sequence[Contender], workloads: Sequence[tuple[str, str, int]], *, reference: str
) -> None:
    """Measure the contenders with workloads, each given by name, model and tokens.

    Rows are added to those of the kind and filled round by round, so that an interrupted run keeps its complete part. A
    contender that fails is stopped. Results are compared with those of the peer called `reference`.
    """
    running = {each.peer.name: each for each in contenders}

    def ask(row: Measured, question: Callable[[Contender], T]) -> T | None:
        contender = running.pop(row.peer.name, None)
        if contender is None:
            return None
        with run.noting(f"{row.peer.name}, {row.workload}"):
            answer = question(contender)
            running[row.peer.name] = contender
            return answer
        contender.stop()
        return None

    parts: list[list[Measured]] = []
    for number, (name, model, tokens) in enumerate(workloads):
        note(f"{name}: comparing")
        rows = [Measured(each.peer, name, model, tokens) for each in running.values()]
        results = [(row, result) for row in rows if (result := ask(row, lambda each, number=number: each.check(number)))]
        expected = next((result for row, result in results if row.peer.name == reference), None)
        for row, result in results if expected is not None else ():
            same = np.array_equal(result.sizes, expected.sizes)
            row.cosine = _min_cosine(result.rows, expected.rows) if same else float("nan")
        parts.append([row for row, _ in results])
    run.measured[kind] += [row for part in parts for row in part]
    for turn in range(run.rounds):
        for number, part in enumerate(parts):
            note(f"{workloads[number][0]}: round {turn + 1} of {run.rounds}")
            first = turn % max(1, len(part))
            for row in [*part[first:], *part[:first]]:
                others = [each.pid for each in running.values() if each.peer is not row.peer]
                own = cpu_seconds(running[row.peer.name].pid) if row.peer.name in running else 0.0
                before, started = sum(map(cpu_seconds, others)), perf_counter()
                if one := ask(row, lambda each, number=number: each.time(number)):
                    row.rounds.append(one)
                    row.cpu.append(cpu_seconds(running[row.peer.name].pid) - own)
                    idle = (sum(map(cpu_seconds, others)) - before) / (perf_counter() - started)
                    row.idle_cores = max(row.idle_cores, idle)
