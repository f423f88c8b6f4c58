"""Latency of single queries under bulk load: their p99 beside 2,048-text requests of two clients, over that on an idle server.

    python benchmarks/latency.py [--rounds 5] [--queries 300] [--bulk 2] [--turns 2] [--dtype auto] [--serve ARGUMENTS]

The server is `python -m whimbrel serve` of the packaged all-MiniLM-L6-v2, with a queue without limits. In a round the same
queries, texts of 12 words, are sent one after another on a kept connection. First the server is otherwise idle. Then the bulk
clients (threads of another process, with a connection each) send requests of 2,048 texts of 4 to 60 words as base64, one after
another. The queries begin once bulk is queued. They are repeated until each bulk client has had `--turns` responses, so bulk
is also read, tokenized and written meanwhile. Then the bulk clients disconnect in the middle of their requests, and the next
phase begins once nothing is queued or running. Each round has its own queries and bulk. The seconds of a query run from its
first byte to the end of its response, as the client sees them.

The time of one batch is the mean of the engine's `compute` stage over some seconds of each loaded phase before the queries
begin, when all batches are bulk. All responses to queries are compared with the vectors of the in-process Engine, bit by bit.
Percentiles are over the queries of all rounds. The last column has the smallest and the largest percentile of one round.
Clients and server share the cores.
"""

from __future__ import annotations

import argparse
import shlex
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import cycle
from time import perf_counter
from typing import Final

import numpy as np
from common import Worker, chunks, default_plan, make_texts, note, print_setting, print_table
from driver import Serving, ask, body_of, read_metrics, serving, total, vectors_of

from whimbrel.types.arrays import Float32Array

QUERY_WORDS: Final = (12, 12)
BULK_WORDS: Final = (4, 60)
BULK_TEXTS: Final = 2048
_WATCH_SECONDS: Final = 3.0
"""Seconds of a loaded phase without queries, in which the batches of bulk are timed."""
_PATIENCE: Final = 120.0
PATIENT: Final = ("--max-queue-seconds", "3600")
"""Options that disable admission control, which is not measured here."""
MAX_RATIO: Final = 4.0


@dataclass(slots=True)
class Phases:
    """Measurements of one kind of phase."""

    seconds: list[list[float]] = field(default_factory=list[list[float]])
    """Seconds of each query, by round."""

    def percentile(self, q: float) -> float:
        return float(np.percentile(np.concatenate(self.seconds), q))

    def spread(self, q: float) -> tuple[float, float]:
        """Return the smallest and the largest value of the rounds."""
        each = [float(np.percentile(seconds, q)) for seconds in self.seconds]
        return min(each), max(each)


@dataclass(slots=True)
class Batches:
    """Batches of bulk, according to the metrics."""

    seconds: float = 0.0
    number: float = 0.0
    tokens: float = 0.0
    watched: float = 0.0

    @property
    def mean(self) -> float:
        return self.seconds / self.number


def make_engine(dtype: str) -> Callable[[Sequence[str]], Float32Array]:
    """Load the Engine."""
    from whimbrel import Engine

    return Engine(dtype=dtype).embed


class Bulk:
    """Clients that send bodies in turn until `stop`."""

    def __init__(self, port: int, bodies: Sequence[Sequence[bytes]]) -> None:
        """Start one client for each of `bodies`."""
        self.statuses: list[int] = []
        self._connections = [HTTPConnection("127.0.0.1", port) for _ in bodies]
        for connection in self._connections:
            connection.connect()
        clients = zip(self._connections, bodies, strict=True)
        self._threads = [threading.Thread(target=self._run, args=client) for client in clients]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Disconnect in the middle of a request."""
        for connection in self._connections:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()

    def _run(self, connection: HTTPConnection, bodies: Sequence[bytes]) -> None:
        with suppress(OSError, HTTPException):  # `stop` closes the connection
            for body in cycle(bodies):
                self.statuses.append(ask(connection, body).status)


def make_bulk(port: int) -> Callable[[Sequence[Sequence[bytes]] | None], list[int]]:
    """Return a function that starts Bulk with bodies to send, and stops it without. It returns the statuses so far."""
    bulk = Bulk(port, [])

    def call(bodies: Sequence[Sequence[bytes]] | None) -> list[int]:
        nonlocal bulk
        if bodies:
            bulk = Bulk(port, bodies)
        elif bodies is not None:
            bulk.stop()
        return list(bulk.statuses)

    return call


def probe(port: int, queries: Sequence[str], expected: Float32Array) -> list[float]:
    """Return the seconds of each query."""
    connection = HTTPConnection("127.0.0.1", port)
    bodies = [body_of([query]) for query in queries]
    seconds: list[float] = []
    answers: list[bytes] = []
    for body in bodies:
        started = perf_counter()
        answer = ask(connection, body)
        seconds.append(perf_counter() - started)
        if answer.status != 200:
            raise SystemExit(f"a query was answered with {answer.status}: {answer.body[:1000].decode()}")
        answers.append(answer.body)
    connection.close()
    if not np.array_equal(np.concatenate([vectors_of(answer) for answer in answers]), expected):
        raise SystemExit("the server's vectors are not the engine's")
    return seconds


def wait_for_queue(server: Serving, *, busy: bool) -> None:
    """Return once bulk is queued, or once nothing is queued or running."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        waiting = total(read_metrics(server.port), "whimbrel_queue_tokens")
        if (waiting > 0) == busy:
            time.sleep(1.0)  # running batches end, and new ones begin
            return
        time.sleep(0.1)
    raise SystemExit(f"the queue did not become {'busy' if busy else 'empty'}")


def watch(server: Serving, batches: Batches) -> None:
    """Time the batches of bulk alone."""
    before, started = read_metrics(server.port), perf_counter()
    time.sleep(_WATCH_SECONDS)
    after = read_metrics(server.port)
    batches.watched += perf_counter() - started
    stage = "whimbrel_stage_seconds"
    batches.seconds += total(after, f"{stage}_sum", stage="compute") - total(before, f"{stage}_sum", stage="compute")
    batches.number += total(after, f"{stage}_count", stage="compute") - total(before, f"{stage}_count", stage="compute")
    batches.tokens += total(after, "whimbrel_batch_tokens_sum") - total(before, "whimbrel_batch_tokens_sum")


def report(idle: Phases, loaded: Phases, batches: Batches) -> None:
    """Print the table and the target."""
    rows: list[list[str]] = []
    for name, phases in (("idle", idle), ("beside bulk", loaded)):
        low, high = phases.spread(99)
        numbers = [phases.percentile(50), phases.percentile(99), max(map(max, phases.seconds))]
        rows.append(
            [
                name,
                f"{sum(map(len, phases.seconds)):,}",
                *(f"{x * 1e3:,.1f}" for x in numbers),
                f"{low * 1e3:,.1f} to {high * 1e3:,.1f}",
            ]
        )
    ratios = [loaded.percentile(q) / idle.percentile(q) for q in (50, 99)]
    rows.append(["ratio", "", *(f"{ratio:.2f}" for ratio in ratios), "", ""])
    print_table(["queries, ms", "number", "p50", "p99", "slowest", "p99 of rounds"], rows)
    more = loaded.percentile(99) - idle.percentile(99)
    print(f"\nOne batch of bulk takes {batches.mean * 1e3:,.1f} ms, measured over {batches.number:,.0f}.")
    print(f"The p99 grows by {more * 1e3:,.1f} ms, {more / batches.mean:.2f} batch times (target: at most 1),")
    print(f"and {ratios[1]:.2f}-fold (target: at most {MAX_RATIO:g}).")
    if batches.tokens:
        each, rate = batches.tokens / batches.number, batches.tokens / batches.watched
        print(f"Bulk alone: {each:,.0f} tokens a batch, {rate:,.0f} tokens/s.")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--queries", type=int, default=300, help="of each phase")
    parser.add_argument("--bulk", type=int, default=2, help="clients that send bulk")
    parser.add_argument("--turns", type=int, default=2, help="bulk requests per client and phase, at least")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--serve", default="", help="further arguments of `whimbrel serve`, in one string")
    args = parser.parse_args()
    plan = default_plan(args.dtype)
    texts = [make_texts(args.queries, words=QUERY_WORDS, seed=i) for i in range(args.rounds + 1)]
    note("the engine's vectors")
    engine = Worker(make_engine, plan.dtype)
    expected = [engine.ask(queries) for queries in texts]
    idle, loaded, batches = Phases(), Phases(), Batches()
    statuses: list[int] = []
    with serving(plan.dtype, *PATIENT, *shlex.split(args.serve)) as server:
        note("warm-up")
        probe(server.port, texts[-1], expected[-1])
        bulk = Worker(make_bulk, server.port)
        for i in range(args.rounds):
            note(f"round {i + 1} of {args.rounds}")
            seeds = chunks(range(1000 * (i + 1), 1000 * (i + 1) + 2 * args.bulk), 2)
            bodies = [[body_of(make_texts(BULK_TEXTS, words=BULK_WORDS, seed=seed)) for seed in each] for each in seeds]
            idle.seconds.append(probe(server.port, texts[i], expected[i]))
            bulk.ask(bodies)
            wait_for_queue(server, busy=True)
            watch(server, batches)
            loaded.seconds.append([])
            while not loaded.seconds[-1] or len(bulk.ask(None)) < args.turns * args.bulk:
                loaded.seconds[-1] += probe(server.port, texts[i], expected[i])
            statuses += bulk.ask([])
            if set(statuses) - {200}:
                raise SystemExit(f"bulk was answered with {sorted(set(statuses))}: it was not there all the time")
            wait_for_queue(server, busy=False)
    report(idle, loaded, batches)
    print(f"{len(statuses)} requests of bulk were answered in full.")
    print_setting(plan, rounds=args.rounds, queries=args.queries, clients_of_bulk=args.bulk, turns=args.turns)


if __name__ == "__main__":
    main()
