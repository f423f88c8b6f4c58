"""Latency of single queries under bulk load: their p99 beside 2,048-text requests of two clients, over that on an idle server.

    python benchmarks/latency.py [--rounds 5] [--queries 300] [--bulk 2] [--dtype auto] [--serve ARGUMENTS]

The server is `whimbrel serve` of the packaged all-MiniLM-L6-v2, with a queue without limits. In a round the same queries, texts
of 12 words, are sent one after another on a kept connection: first while the server is otherwise idle, then, in the time that
this took at least and again and again, beside bulk clients. Each of these sends requests of 2,048 texts of 4 to 60 words as
base64, one after another. Queries begin once bulk is queued, and each round has its own.

All responses to queries are compared with the vectors of the in-process Engine, bit by bit. Percentiles are over the queries of
all rounds. The last column has the smallest and the largest percentile of one round. Clients and server share the cores.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from common import chunks, default_plan, make_texts, note, options, print_setting, print_table

from whimbrel import Engine
from whimbrel_bench.backends import Sample
from whimbrel_bench.results import Result
from whimbrel_bench.server import Serving, serving, total
from whimbrel_bench.target import Load, Target, TargetOptions

_BULK_TEXTS: Final = 2048
_MIN_SECONDS: Final = 15.0
"""Seconds beside bulk, so that bulk is also read, tokenized and written meanwhile."""
_PATIENCE: Final = 120.0
MAX_RATIO: Final = 4.0


def wait_for_queue(server: Serving, *, busy: bool) -> None:
    """Return once bulk is queued, or once nothing is queued."""
    end = time.monotonic() + _PATIENCE
    while (total(server.metrics(), "whimbrel_queue_tokens") > 0) != busy:
        if time.monotonic() > end:
            raise SystemExit(f"the queue did not become {'busy' if busy else 'empty'}")
        time.sleep(0.1)
    time.sleep(1.0)  # running batches end, and new ones begin


def good(result: Result) -> Result:
    """Return a result. Ends the program if any request failed."""
    if result.failed:
        raise SystemExit(f"a request failed: {next(filter(None, result.errors))}")
    return result


def check(target: Target, result: Result, texts: Sequence[str], engine: Engine) -> None:
    """End the program if a vector is not the engine's."""
    expected = engine.embed(list(texts))
    for index, rows in target.rows(result).items():
        if not np.array_equal(rows[0], expected[index]):
            raise SystemExit("the server's vectors are not the engine's")


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__, rounds=5, queries=300, bulk=2, serve="").parse_args()
    plan = default_plan(args.dtype)
    found: dict[str, list[Result]] = {"idle": [], "beside bulk": []}
    bulk: list[Result] = []
    patient = ("--max-queue-seconds", "3600")
    with (
        Engine(dtype=plan.dtype) as engine,
        serving(None, "--dtype", plan.dtype, *patient, *shlex.split(args.serve)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        target = Target(server.url, TargetOptions(extra_body={"encoding_format": "base64"}))
        target.connect()
        alone = Load(concurrency=1, num_warmups=20, keep_bodies=True, processes=1)
        for number in range(args.rounds):
            note(f"round {number + 1} of {args.rounds}")
            queries = make_texts(args.queries, words=(12, 12), seed=number)
            samples = [Sample((query,)) for query in queries]
            target.warm_up(samples, alone)
            found["idle"].append(good(target.run(samples, alone)))
            seconds = max(found["idle"][-1].duration, _MIN_SECONDS)
            many = chunks(make_texts(_BULK_TEXTS * args.bulk, words=(4, 60), seed=1000 + number), _BULK_TEXTS)
            load = Load(concurrency=args.bulk, duration=seconds + 2.0, processes=1)
            running = pool.submit(target.run, [Sample(tuple(each)) for each in many], load)
            wait_for_queue(server, busy=True)
            beside = Load(concurrency=1, duration=seconds, keep_bodies=True, processes=1)
            found["beside bulk"].append(good(target.run(samples, beside)))
            bulk.append(good(running.result()))
            wait_for_queue(server, busy=False)
            for each in found.values():
                check(target, each[-1], queries, engine)
    report(found)
    print(f"{sum(each.completed for each in bulk)} requests of bulk were answered in full.")
    print_setting(plan, rounds=args.rounds, queries=args.queries, clients_of_bulk=args.bulk)


def report(found: dict[str, list[Result]]) -> None:
    """Print the table and the target."""
    rows: list[list[str]] = []
    percentiles: dict[str, tuple[float, float]] = {}
    for name, results in found.items():
        all_ms = 1e3 * np.concatenate([each.latencies for each in results])
        p50, p99 = (float(each) for each in np.percentile(all_ms, [50, 99]))
        percentiles[name] = p50, p99
        each_p99 = [1e3 * float(np.percentile(each.latencies, 99)) for each in results]
        numbers = f"{all_ms.size:,}", f"{p50:,.1f}", f"{p99:,.1f}", f"{all_ms.max():,.1f}"
        rows.append([name, *numbers, f"{min(each_p99):,.1f} to {max(each_p99):,.1f}"])
    ratios = [beside / idle for idle, beside in zip(*percentiles.values(), strict=True)]
    rows.append(["ratio", "", *(f"{ratio:.2f}" for ratio in ratios), "", ""])
    print_table(["queries, ms", "number", "p50", "p99", "slowest", "p99 of rounds"], rows)
    print(f"\nThe p99 grows {ratios[1]:.2f}-fold (target: at most {MAX_RATIO:g}).")


if __name__ == "__main__":
    main()
