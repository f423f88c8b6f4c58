"""Load on a server: one function, so that another generator can take its place."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter, process_time

from driver import send_all
from environments import Peer


@dataclass(frozen=True, slots=True)
class Round:
    """Answers to one round of load."""

    seconds: float
    latencies: list[float]
    bodies: list[bytes]
    """Bodies of the answers, connection by connection."""
    client_cores: float
    """Cores that the generator itself took."""


@dataclass(slots=True)
class Served:
    """Rounds of one server with one workload."""

    peer: Peer
    workload: str
    texts: int
    cosine: float | None
    rounds: list[Round] = field(default_factory=list[Round])
    server_cores: list[float] = field(default_factory=list[float])

    @property
    def cpu(self) -> float:
        """Return the server's processor seconds in a round, the median of all."""
        return median(cores * each.seconds for cores, each in zip(self.server_cores, self.rounds, strict=True))

    @property
    def median(self) -> float:
        return median(each.seconds for each in self.rounds)


def load(port: int, path: str, connections: Sequence[Sequence[bytes]]) -> Round:
    """Send the requests of all connections at once, each connection's one after another. All must get 200."""
    with ThreadPoolExecutor(len(connections)) as threads:
        client, started = process_time(), perf_counter()
        parts = list(threads.map(partial(send_all, port, path=path), connections))
        seconds = perf_counter() - started
        cores = (process_time() - client) / seconds
    answers = [answer for part in parts for answer in part]
    return Round(seconds, [latency for latency, _ in answers], [body for _, body in answers], cores)
