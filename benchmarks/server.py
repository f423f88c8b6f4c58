"""Server under load against the engine alone: tokens/s for the same texts, on the packaged all-MiniLM-L6-v2.

    python benchmarks/server.py [--connections 16] [--requests 2] [--format base64|float] [--dtype auto] [--rounds 7]

The server is `python -m whimbrel serve` in its own process. In a round each connection (a thread of this process, with
keep-alive) sends its requests of 32 texts of 4 to 200 words, one after another, to POST /v1/embeddings. Bodies are made
beforehand, and responses are read but not parsed. The engine alone runs in another process over the same texts, in two ways:
all texts in one call, and a thread per connection that calls embed on 32 texts. The server is compared with the faster one.
The three take turns, after a round that is not counted and that compares the vectors. The ratio is that of the medians, server
over engine. The ratio of the fastest rounds is more telling if other work uses the cores. Load generator and server share the
cores. The generator's part is reported, and counts against the server.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Final, TypeAlias

import numpy as np
from common import (
    MIXED,
    NUM_CORES,
    Worker,
    chunks,
    count_tokens,
    cpu_seconds,
    default_plan,
    make_texts,
    min_cosine,
    note,
    peak_mebibytes,
    print_setting,
    print_table,
)
from driver import Serving, body_of, send_all, serving, vectors_of

from whimbrel.types.arrays import Float32Array

Calls: TypeAlias = list[list[str]]
Timed: TypeAlias = tuple[float, Float32Array]

TEXTS_PER_REQUEST: Final = 32


@dataclass(frozen=True, slots=True)
class Round:
    """Responses of the server in one round."""

    seconds: float
    latencies: list[float]
    bodies: list[bytes]
    cpu: tuple[float, float]
    """Processor seconds of the server, and of this process."""


def make_engine(dtype: str) -> Callable[[list[Calls]], Timed]:
    """Load the Engine."""
    from whimbrel import Engine

    embed = Engine(dtype=dtype).embed

    def embed_each(calls: Calls) -> list[Float32Array]:
        return [embed(texts) for texts in calls]

    def run(threads: list[Calls]) -> Timed:
        """Return the seconds and the vectors of all calls. Each list of calls has its own thread."""
        with ThreadPoolExecutor(len(threads)) as pool:
            started = perf_counter()
            parts = list(pool.map(embed_each, threads))
            seconds = perf_counter() - started
        return seconds, np.concatenate([vectors for part in parts for vectors in part])

    return run


def load(server: Serving, connections: list[list[bytes]]) -> Round:
    """Run one round of the server."""
    with ThreadPoolExecutor(len(connections)) as threads:
        before, client, started = cpu_seconds(server.pid), time.process_time(), perf_counter()
        parts = list(threads.map(partial(send_all, server.port), connections))
        seconds = perf_counter() - started
    answers = [answer for part in parts for answer in part]
    cpu = cpu_seconds(server.pid) - before, time.process_time() - client
    return Round(seconds, [latency for latency, _ in answers], [body for _, body in answers], cpu)


def report(rounds: list[tuple[Round, float, float]], tokens: int, *, num_connections: int) -> None:
    """Print the table and other results of the server."""
    served = [each[0] for each in rounds]
    seconds = {
        f"server, {num_connections} connections": [each.seconds for each in served],
        "engine, one call": [each[1] for each in rounds],
        f"engine, {num_connections} threads": [each[2] for each in rounds],
    }
    rates = {name: sorted(tokens / each for each in every) for name, every in seconds.items()}
    alone = [rate for name, rate in rates.items() if name.startswith("engine")]
    middle, fastest = max(map(median, alone)), max(map(max, alone))
    header = ["", "tokens/s", "slowest round", "fastest round", "ratio of medians", "ratio of fastest"]
    rows: list[list[str]] = []
    for name, rate in rates.items():
        ratios = median(rate) / middle, rate[-1] / fastest
        rows.append([name, *(f"{x:,.0f}" for x in (median(rate), rate[0], rate[-1])), *(f"{x:.3f}" for x in ratios)])
    print_table(header, rows)
    percentiles = quantiles([x for each in served for x in each.latencies], n=100, method="inclusive")
    cores = [sum(cpu) / sum(each.seconds for each in served) for cpu in zip(*(each.cpu for each in served), strict=True)]
    print(f"\nLatency of a request: p50 {percentiles[49] * 1e3:,.0f} ms, p99 {percentiles[98] * 1e3:,.0f} ms.")
    print(f"Cores busy: server {cores[0]:.2f}, load generator {cores[1]:.3f}, of {NUM_CORES}.")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2, help="requests of each connection in a round")
    parser.add_argument("--format", default="base64", choices=["base64", "float"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    plan = default_plan(args.dtype)
    texts = make_texts(args.connections * args.requests * TEXTS_PER_REQUEST, words=MIXED)
    calls = chunks(chunks(texts, TEXTS_PER_REQUEST), args.requests)
    bodies = [[body_of(call, encoding_format=args.format) for call in each] for each in calls]
    engine = Worker(make_engine, plan.dtype)
    with serving(plan.dtype) as server:
        note("warm-up")
        expected = engine.ask([[texts]])[1]
        engine.ask(calls)
        answers = load(server, bodies).bodies
        cosine = min_cosine(np.concatenate([vectors_of(answer) for answer in answers]), expected)
        rounds: list[tuple[Round, float, float]] = []
        for i in range(args.rounds):
            note(f"round {i + 1} of {args.rounds}")
            rounds.append((load(server, bodies), engine.ask([[texts]])[0], engine.ask(calls)[0]))
        peak = peak_mebibytes(server.pid)
    report(rounds, count_tokens(texts), num_connections=args.connections)
    print(f"Peak memory of the server: {peak:,.0f} MiB. Smallest cosine to the engine's vectors: {cosine:.6f}.")
    print_setting(plan, format=args.format, requests_per_connection=args.requests, rounds=args.rounds)


if __name__ == "__main__":
    main()
