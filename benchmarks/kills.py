"""Recovery from engine crashes: failed requests and time to the next response, with repeated SIGKILL under load.

    python benchmarks/kills.py [--kills 10] [--clients 8] [--dtype auto] [--serve ARGUMENTS]

The server is `whimbrel serve` of the packaged all-MiniLM-L6-v2. Clients send requests of 1 to 40 mixed texts, each client one
after another on a kept connection. A while and a random part of a second after each recovery, the engine process gets SIGKILL
in the middle of its batches.

A request fails if it has no response, or one that is not 200 with the exact vectors of the in-process Engine. Clients do not
retry. `next answer` is the time from a kill until the first response to any client after the next engine process exists:
earlier responses are of the killed one. For comparison, the engine is first killed while there is no load, and the time until
the server is ready again is measured. Clients and server share the cores.
"""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Final

import numpy as np
from common import MIXED, count_wrong, default_plan, make_texts, note, options, print_setting, print_table, served

from whimbrel_bench.backends import Sample
from whimbrel_bench.server import Serving
from whimbrel_bench.target import Load

NUM_LOADS: Final = 3
_NUM_REQUESTS: Final = 200
_BETWEEN: Final = 5.0
"""Seconds of load between a recovery and the next kill, more or less."""


def kill(server: Serving) -> tuple[float, float]:
    """Kill the engine. Return the times of the kill and of the next engine's start."""
    (engine,) = server.engines()
    os.kill(engine, signal.SIGKILL)
    killed = time.monotonic()
    while server.engines() in ([], [engine]):
        time.sleep(0.01)
    return killed, time.monotonic()


def wait_ready(server: Serving) -> float:
    while not server.is_ready():
        time.sleep(0.02)
    return time.monotonic()


def main() -> None:
    args = options(__doc__, kills=10, clients=8, serve="").parse_args()
    plan, rng = default_plan(args.dtype), random.Random(0)
    texts = make_texts(512, words=MIXED)
    samples = [Sample(tuple(rng.choices(texts, k=rng.randint(1, 40)))) for _ in range(_NUM_REQUESTS)]
    kills: list[tuple[float, float]] = []
    with served(plan.dtype, args.serve) as (server, target), ThreadPoolExecutor(1) as pool:
        target.warm_up(samples, Load())
        loads: list[float] = []
        for _ in range(NUM_LOADS):
            killed, _ = kill(server)
            loads.append(wait_ready(server) - killed)
        seconds = args.kills * (median(loads) + _BETWEEN + 1.0) + _BETWEEN
        load = Load(concurrency=args.clients, duration=seconds, keep_bodies=True, processes=1)
        running = pool.submit(target.run, samples, load)
        for number in range(args.kills):
            note(f"kill {number + 1} of {args.kills}")
            time.sleep(_BETWEEN - 0.5 + rng.random())
            kills.append(kill(server))
            wait_ready(server)
        found = running.result()
    wrong, _ = count_wrong(target, [(found, samples)], plan.dtype)
    (report,) = found.reports
    ends = np.sort([report.started + each.done for each in report.outcomes if each.status == 200])
    nexts = [float(ends[np.searchsorted(ends, new)]) - killed for killed, new in kills]
    rows: list[list[str]] = []
    for name, each in (("killed without load, until ready", loads), ("killed under load, until the next answer", nexts)):
        numbers = median(each), min(each), max(each), median(each) / median(loads)
        rows.append([name, *(f"{number:.2f}" for number in numbers)])
    print_table(["seconds", "median", "least", "most", "median over the first"], rows)
    print(f"\nFailed requests over {args.kills} kills: {found.failed} of {found.failed + found.completed:,}.")
    print(f"Answers with other vectors than the engine's: {wrong}. The slowest took {found.latencies.max():.1f} s.")
    print_setting(plan, kills=args.kills, clients=args.clients)


if __name__ == "__main__":
    main()
