"""Latency of single queries under bulk load: their p99 beside 2,048-text requests of two clients, over that on an idle server.

    python benchmarks/latency.py [--rounds 5] [--queries 300] [--bulk 2] [--dtype auto] [--serve ARGUMENTS]

The server is `whimbrel serve` of the packaged all-MiniLM-L6-v2, with a queue without limits. In a round the same queries, texts
of 12 words, are sent one after another on a kept connection: first while the server is otherwise idle, then, in the time that
this took at least and again and again, beside bulk clients. Each of these sends requests of 2,048 texts of 4 to 60 words as
base64, one after another. Queries begin once bulk is queued, and each round has its own.

All responses to queries are compared with the vectors of the in-process Engine, bit by bit. Percentiles are over the queries of
all rounds. The last column has the smallest and the largest percentile of one round. Clients and server share the cores.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from common import chunks, count_wrong, default_plan, make_texts, note, options, print_setting, print_table, served

from whimbrel_bench.backends import Sample
from whimbrel_bench.results import Result
from whimbrel_bench.server import Serving, total
from whimbrel_bench.target import Load

_BULK_TEXTS: Final = 2048
_MIN_SECONDS: Final = 15.0
"""Seconds beside bulk, so that bulk is also read, tokenized and written meanwhile."""
_PATIENCE: Final = 120.0


def wait_for_queue(server: Serving, *, busy: bool) -> None:
    """Return once bulk is queued, or once nothing is queued."""
    end = time.monotonic() + _PATIENCE
    while (total(server.metrics(), "whimbrel_queue_tokens") > 0) != busy:
        if time.monotonic() > end:
            raise SystemExit(f"the queue did not become {'busy' if busy else 'empty'}")
        time.sleep(0.1)
    time.sleep(1.0)  # running batches end, and new ones begin


def main() -> None:
    args = options(__doc__, rounds=5, queries=300, bulk=2, serve="").parse_args()
    plan = default_plan(args.dtype)
    found: dict[str, list[tuple[Result, list[Sample]]]] = {"idle": [], "beside bulk": []}
    num_bulk = 0
    with served(plan.dtype, f"--max-queue-seconds 3600 {args.serve}") as (server, target), ThreadPoolExecutor(1) as pool:
        alone = Load(concurrency=1, num_warmups=20, keep_bodies=True, processes=1)
        for number in range(args.rounds):
            note(f"round {number + 1} of {args.rounds}")
            queries = [Sample((text,)) for text in make_texts(args.queries, words=(12, 12), seed=number)]
            target.warm_up(queries, alone)
            idle = target.run(queries, alone).all_answered()
            seconds = max(idle.duration, _MIN_SECONDS)
            texts = chunks(make_texts(_BULK_TEXTS * args.bulk, words=(4, 60), seed=1000 + number), _BULK_TEXTS)
            load = Load(concurrency=args.bulk, duration=seconds + 2.0, processes=1)
            bulk = pool.submit(target.run, [Sample(tuple(each)) for each in texts], load)
            wait_for_queue(server, busy=True)
            beside = target.run(queries, Load(concurrency=1, duration=seconds, keep_bodies=True, processes=1)).all_answered()
            num_bulk += bulk.result().all_answered().completed
            wait_for_queue(server, busy=False)
            for name, result in zip(found, (idle, beside), strict=True):
                found[name].append((result, queries))
    wrong, _ = count_wrong(target, [run for runs in found.values() for run in runs], plan.dtype)
    if wrong:
        raise SystemExit(f"{wrong} vectors of the server are not the engine's")
    report({name: [1e3 * result.latencies for result, _ in runs] for name, runs in found.items()})
    print(f"\n{num_bulk} requests of bulk were answered in full.")
    print_setting(plan, rounds=args.rounds, queries=args.queries, clients_of_bulk=args.bulk)


def report(latencies: dict[str, list[np.ndarray]]) -> None:
    """Print the table of milliseconds, by name and round."""
    rows: list[list[str]] = []
    percentiles: list[np.ndarray] = []
    for name, rounds in latencies.items():
        together = np.concatenate(rounds)
        percentiles.append(np.percentile(together, [50, 99]))
        each = [np.percentile(one, 99) for one in rounds]
        p50, p99 = (f"{value:,.1f}" for value in percentiles[-1])
        rows.append([name, f"{together.size:,}", p50, p99, f"{together.max():,.1f}", f"{min(each):,.1f} to {max(each):,.1f}"])
    rows.append(["ratio", "", *(f"{ratio:.2f}" for ratio in percentiles[1] / percentiles[0]), "", ""])
    print_table(["queries, ms", "number", "p50", "p99", "slowest", "p99 of rounds"], rows)


if __name__ == "__main__":
    main()
