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

from collections import defaultdict
from itertools import cycle, islice
from typing import Final

import numpy as np
from common import chunks, count_wrong, default_plan, make_texts, note, options, print_setting, print_table, served

from whimbrel_bench.backends import Sample
from whimbrel_bench.load import NO_STATUS
from whimbrel_bench.processes import cpu_seconds
from whimbrel_bench.target import Load

NUM_REQUESTS: Final = 64
"""Number of different requests."""


def main() -> None:
    defaults = {"seconds": 60.0, "factor": 10.0, "texts": 8, "connections": 16, "serve": "--max-queue-seconds 30"}
    args = options(__doc__, **defaults).parse_args()
    plan = default_plan(args.dtype)
    samples = [Sample(tuple(each)) for each in chunks(make_texts(NUM_REQUESTS * args.texts), args.texts)]
    with served(plan.dtype, args.serve) as (server, target):
        target.warm_up(samples, Load(num_warmups=4 * args.connections, concurrency=args.connections))
        note("the capacity")
        closed = target.run(samples, Load(concurrency=args.connections, duration=args.seconds / 3, processes=1))
        capacity = closed.all_answered().request_throughput
        rate = args.factor * capacity
        note(f"{capacity:.1f} requests/s; now {rate:.1f}/s for {args.seconds:g} s")
        before = cpu_seconds(server.pid)
        arrivals = list(islice(cycle(samples), round(rate * args.seconds)))
        over = target.run(arrivals, Load(rate=rate, keep_bodies=True))
        cores = (cpu_seconds(server.pid) - before) / over.duration
    wrong, compared = count_wrong(target, [(over, arrivals)], plan.dtype)
    milliseconds: dict[str, list[float]] = defaultdict(list)
    for each in over.outcomes:
        name = "no answer" if each.status == NO_STATUS else str(each.status)
        milliseconds[name].append(1e3 * (each.done - (each.scheduled if each.status == 200 else each.sent)))
    rows: list[list[str]] = []
    for name, each in sorted(milliseconds.items()):
        percentiles = (f"{x:,.1f}" for x in np.percentile(each, [50, 99, 100]))
        rows.append([name, f"{len(each):,}", f"{len(each) / len(arrivals):.1%}", *percentiles])
    print_table(["outcome", "requests", "share", "p50, ms", "p99, ms", "slowest, ms"], rows)
    begin = args.seconds / 10
    goodput = sum(each.status == 200 and begin <= each.done < args.seconds for each in over.outcomes) / (args.seconds - begin)
    maximum, good = capacity * args.texts, goodput * args.texts
    print(f"\nMaximum {maximum:,.0f} texts/s, goodput {good:,.0f}: **{goodput / capacity:.3f}** of it.")
    late = np.percentile(over.queue_times, [50, 99, 100]) * 1e3
    print(f"Sent late by: p50 {late[0]:,.1f} ms, p99 {late[1]:,.1f} ms, at most {late[2]:,.1f} ms.")
    print(f"Cores busy: server {cores:.2f}, load generator {sum(report.cpu_share for report in over.reports):.2f}.")
    print(f"Vectors: {wrong} of {compared:,} responses have others than the engine gives.")
    print_setting(plan, factor=args.factor, seconds=args.seconds, texts_per_request=args.texts, connections=args.connections)


if __name__ == "__main__":
    main()
