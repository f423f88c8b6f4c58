"""Overload: goodput and time to refusal at ten times the capacity for a minute.

    python benchmarks/overload.py [--seconds 60] [--factor 10] [--texts 8] [--dtype auto] [--serve ARGUMENTS]

The server is `whimbrel serve` of the packaged all-MiniLM-L6-v2. By default it refuses nothing, so it gets
`--max-queue-seconds 30`. All requests have `--texts` mixed texts and take base64. First the capacity is measured, closed-loop:
`--connections` clients send one request after another. Then comes the overload, open-loop: requests arrive at random (Poisson)
times, `--factor` times as many per second as the capacity. Clients do not retry.

Goodput is the texts per second of 200 responses after the first tenth of the time, without those that come after the last
arrival. The seconds of an accepted request run from its scheduled arrival. Those of a refused request run from the moment it
was sent on an open connection, because the generator may be late. Generator and server share the cores; the generator's part is
reported, and counts against the server. All 200 responses are compared with the vectors of the in-process Engine, bit by bit.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from statistics import mean
from typing import Final

import numpy as np
from common import MIXED, chunks, default_plan, make_texts, note, options, print_setting, print_table

from whimbrel import Engine
from whimbrel_bench.backends import Sample
from whimbrel_bench.load import NO_STATUS, Report
from whimbrel_bench.processes import cpu_seconds
from whimbrel_bench.server import serving
from whimbrel_bench.target import Load, Target, TargetOptions

NUM_REQUESTS: Final = 64
"""Number of different requests."""


def seconds_by_outcome(reports: list[Report]) -> dict[str, list[float]]:
    """Return the seconds of all requests by status: of accepted ones since they were due, of others since they were sent."""
    found: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for due, sent, done, status in zip(report.scheduled, report.sent, report.done, report.status, strict=True):
            name = "no answer" if status == NO_STATUS else str(status)
            found[name].append(done - (due if status == 200 else sent))
    return found


def main() -> None:
    """Run the benchmark."""
    defaults = {"seconds": 60.0, "factor": 10.0, "texts": 8, "connections": 16, "serve": "--max-queue-seconds 30"}
    args = options(__doc__, **defaults).parse_args()
    plan = default_plan(args.dtype)
    texts = chunks(make_texts(NUM_REQUESTS * args.texts, words=MIXED), args.texts)
    samples = [Sample(tuple(each)) for each in texts]
    with serving(None, "--dtype", plan.dtype, *shlex.split(args.serve)) as server:
        target = Target(server.url, TargetOptions(extra_body={"encoding_format": "base64"}))
        target.connect()
        target.warm_up(samples, Load(num_warmups=4 * args.connections, concurrency=args.connections))
        note("the capacity")
        closed = target.run(samples, Load(concurrency=args.connections, duration=args.seconds / 3, processes=1))
        if closed.failed:
            raise SystemExit(f"the capacity could not be measured: {next(filter(None, closed.errors))}")
        capacity = closed.request_throughput
        rate = args.factor * capacity
        note(f"{capacity:.1f} requests/s; now {rate:.1f}/s for {args.seconds:g} s")
        before = cpu_seconds(server.pid)
        arrivals = [samples[i % NUM_REQUESTS] for i in range(round(rate * args.seconds))]
        over = target.run(arrivals, Load(rate=rate, keep_bodies=True))
        cores = (cpu_seconds(server.pid) - before) / over.duration
        answers = target.rows(over)
    with Engine(dtype=plan.dtype) as engine:
        expected = [engine.embed(each, truncate=True) for each in texts]
    wrong = sum(not np.array_equal(np.stack(rows), expected[index % NUM_REQUESTS]) for index, rows in answers.items())
    reports = list(over.reports)
    outcomes = seconds_by_outcome(reports)
    rows = [
        [
            name,
            f"{len(each):,}",
            f"{len(each) / len(arrivals):.1%}",
            *(f"{1e3 * x:,.1f}" for x in np.percentile(each, [50, 99, 100])),
        ]
        for name, each in sorted(outcomes.items())
    ]
    print_table(["outcome", "requests", "share", "p50, ms", "p99, ms", "slowest, ms"], rows)
    ends = np.array(
        [done for report in reports for done, status in zip(report.done, report.status, strict=True) if status == 200]
    )
    begin = args.seconds / 10
    goodput = float(((ends >= begin) & (ends < args.seconds)).sum()) / (args.seconds - begin)
    maximum, good = capacity * args.texts, goodput * args.texts
    print(f"\nMaximum {maximum:,.0f} texts/s, goodput {good:,.0f}: **{goodput / capacity:.3f}** of it.")
    late = np.percentile(over.queue_times, [50, 99, 100]) * 1e3
    print(f"Sent late by: p50 {late[0]:,.1f} ms, p99 {late[1]:,.1f} ms, at most {late[2]:,.1f} ms.")
    print(f"Cores busy: server {cores:.2f}, load generator {mean(report.cpu_share for report in reports) * len(reports):.2f}.")
    print(f"Vectors: {wrong} of {len(answers):,} responses have others than the engine gives.")
    print_setting(plan, factor=args.factor, seconds=args.seconds, texts_per_request=args.texts, connections=args.connections)


if __name__ == "__main__":
    main()
