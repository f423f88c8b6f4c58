"""Soak test: mixed load on a real server for minutes or hours, with checks of responses, leaks, metrics and remains.

    python tests/support/soak.py [--seconds 300] [--round 10] [--clients 6] [--kill-every 4] [--seed 0] [--serve ARGUMENTS]

The server is `python -m whimbrel serve` of the packaged all-MiniLM-L6-v2. In rounds of `--round` seconds, clients do random
actions: requests of 1 to 300 texts as base64 and as floats, every kind of invalid request, and deadlines from 0 to 60 seconds.
They disconnect or reset before, while or after they send, reset in the middle of a response, or read it slowly. Probes and
metrics come in between. In every `--kill-every`th round, from the second on and in the first half of the run, the engine gets
SIGKILL. Clients keep a connection for a while, and close it at the end of the round.

After each round the server becomes idle. Its metrics must then have every request with the status that the client saw, its
queue must be empty, and the resources of its processes are sampled. At the end the server is stopped. It must leave no
process, file or shared memory, its exit code must be 0, and its log must have the kills and no other fault. The samples must
not grow: a quantity leaks if it grows faster per 1,000 requests than one limit of the table and further in total than the
other. A short run finds large leaks only (`tests/support/leaks.py`).

Every vector is compared with that of the in-process Engine, bit by bit. Requests may be refused with 429 or 503 and a
Retry-After, and with 504 if they have a deadline, but rarely. Anything else is a failure, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from time import perf_counter
from typing import Final

import uvloop
from prometheus_client import Metric

from leaks import LIMITS, Family, Limit, Sample, Trend, trends
from soak_clients import PATH, REFUSALS, Client, Tally
from whimbrel import Engine
from whimbrel_bench.datasets import DatasetOptions, make_samples
from whimbrel_bench.machine import describe_machine, describe_software
from whimbrel_bench.server import Serving, serving, total
from whimbrel_bench.tables import table
from whimbrel_bench.words import local_words

MAX_REFUSED: Final = 0.05
"""Maximum fraction of refused requests without a deadline."""
_SETTLE_SECONDS: Final = 60.0
_PREFIX_LENGTH: Final = 60
"""Number of leading characters by which complaints count as the same, and are shown once."""
_MIN_ROUNDS: Final = 12
_KILLED: Final = "it was killed by SIGKILL; it is started again."
_BAD: Final = re.compile(r"Traceback|This is a bug|started again|\b(ERROR|CRITICAL)\b")
_REQUESTS: Final = "whimbrel_requests_total"
_EQUAL_COUNTERS: Final = ("whimbrel_requests_received_total", "whimbrel_request_seconds_count")
"""Metrics that equal `_REQUESTS` when the server is at rest, if they exist."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the soak test."""

    seconds: float = 300.0
    round_seconds: float = 10.0
    clients: int = 6
    kill_every: int = 4
    seed: int = 0
    dtype: str = "auto"
    serve: tuple[str, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=lambda: LIMITS)


@dataclass(frozen=True, slots=True)
class Report:
    """Result of the soak test."""

    tally: Tally
    trends: list[Trend]
    rounds: int
    seconds: float

    @property
    def failures(self) -> list[str]:
        """Return all failures; empty after a good soak."""
        leaking = [
            f"{each.process} leaks {each.quantity}: {each.first:,.1f} to {each.last:,.1f}" for each in self.trends if each.leaks
        ]
        refused = sum(self.tally.statuses[status] for status in REFUSALS)
        many = [f"{refused} of {self.tally.patient} were refused"] if refused > MAX_REFUSED * self.tally.patient else []
        return [*self.tally.wrong, *leaking, *many]


def soak(options: Options) -> Report:
    """Run the soak test."""
    short, mixed = (
        DatasetOptions(num_prompts=480, input_len=16, range_ratio=0.7),
        DatasetOptions(num_prompts=32, range_ratio=0.95),
    )
    texts = [sample.texts[0] for dataset in (short, mixed) for sample in make_samples(dataset, local_words(None))]
    with Engine(dtype=options.dtype) as engine:
        expected, dtype = engine.embed(texts), engine.plan.dtype
    tally = Tally()
    rng = random.Random(options.seed)
    started = perf_counter()
    with serving(None, "--dtype", dtype, *options.serve) as server:
        family = Family(server.pid, "supervisor")
        samples: list[Sample] = []
        while (run := perf_counter() - started) < options.seconds or len(samples) < _MIN_ROUNDS:
            clients = [Client(server.port, texts, expected, tally, rng) for _ in range(options.clients)]
            kill = len(samples) % options.kill_every == 1 and (run < options.seconds / 2 or not tally.kills)
            uvloop.run(_round(clients, server, options.round_seconds, tally, kill_after=rng.random() if kill else None))
            samples.append(_rest(server, family, tally))
            said = f"{run:6.0f} s  {tally.requests:,} requests, {tally.kills} kills, {len(tally.wrong)} wrong"
            print(said, file=sys.stderr, flush=True)
        _stop(server, family, tally)
    return Report(tally, trends(samples, options.limits), len(samples), perf_counter() - started)


async def _round(clients: Sequence[Client], server: Serving, seconds: float, tally: Tally, *, kill_after: float | None) -> None:
    """Run all clients at once. `kill_after` is the fraction of the time after which the engine is killed."""
    end = perf_counter() + seconds
    running = asyncio.gather(*(client.run(end) for client in clients))
    if kill_after is not None:
        await asyncio.sleep(seconds * kill_after)
        for pid in server.engines()[:1]:
            os.kill(pid, signal.SIGKILL)
            tally.kills += 1
    await running


def _rest(server: Serving, family: Family, tally: Tally) -> Sample:
    """Wait until the server is idle, and take a sample."""
    end = time.monotonic() + _SETTLE_SECONDS
    while (problem := _unsettled_reason(server, tally)) and time.monotonic() < end:
        time.sleep(0.1)
    if problem:
        tally.complain(f"{_SETTLE_SECONDS:.0f} s after a round: {problem}")
    sample = family.sample(tally.requests)
    while time.monotonic() < end:  # closed connections take a moment to go
        time.sleep(0.25)
        before, sample = sample, family.sample(tally.requests)
        if _counts(before) == _counts(sample):
            break
    return sample


def _counts(sample: Sample) -> dict[str, dict[str, float]]:
    """Return all quantities but memory."""
    return {
        name: {quantity: amount for quantity, amount in held.amounts.items() if "MiB" not in quantity}
        for name, held in sample.held.items()
    }


def _unsettled_reason(server: Serving, tally: Tally) -> str:
    """Return why the server is not idle or its metrics do not add up; empty if all is well."""
    if not server.is_ready():
        return "it is not ready"
    metrics = server.metrics()
    if waiting := total(metrics, "whimbrel_queue_tokens"):
        return f"{waiting:,.0f} tokens wait"
    seen = {f"requests of status {status}": number for status, number in tally.statuses.items()}
    counted = {what: total(metrics, _REQUESTS, route=PATH, status=what.rpartition(" ")[2]) for what in seen}
    seen |= {"requests": tally.statuses.total(), "texts": tally.texts}
    counted |= {"requests": total(metrics, _REQUESTS, route=PATH), "texts": total(metrics, "whimbrel_texts_total")}
    for what, number in counted.items():
        unseen = tally.unseen_texts if what == "texts" else tally.unseen
        if not seen[what] <= number <= seen[what] + unseen:
            return f"{number:,.0f} {what} are counted, clients saw {seen[what]:,} and did not wait for {unseen:,}"
    return _metric_conflicts(metrics, counted["requests"])


def _metric_conflicts(metrics: Sequence[Metric], ended: float) -> str:
    """Return the metrics that disagree about the number of requests; empty if none do."""
    known = {sample.name for metric in metrics for sample in metric.samples}
    others = {name: total(metrics, name, route=PATH) for name in _EQUAL_COUNTERS if name in known}
    wrong = [f"{name} is {number:,.0f}" for name, number in others.items() if number != ended]
    if under_way := total(metrics, "whimbrel_requests_in_flight", route=PATH):
        wrong.append(f"{under_way:,.0f} requests are under way")
    return ", ".join([*wrong, f"{ended:,.0f} requests ended"]) if wrong else ""


def _stop(server: Serving, family: Family, tally: Tally) -> None:
    """Stop the server, and record its remains and unexpected log lines."""
    try:
        if (code := server.stop()) != 0:
            tally.complain(f"exit code {code}")
    except subprocess.TimeoutExpired:
        tally.complain("it did not stop")
        server.process.kill()
        server.process.wait()
    for left in [*family.left(), *(f"file {path}" for path in sorted(server.folder.iterdir()))]:
        tally.complain(f"left behind: {left}")
    kills = 0
    for line in server.log.splitlines():
        if line.endswith(_KILLED):
            kills += 1
        elif _BAD.search(line):
            tally.complain(f"in the log: {line}")
    if kills != tally.kills:
        tally.complain(f"the log tells of {kills} kills; there were {tally.kills}")


def _row(trend: Trend) -> list[str]:
    limit = trend.limit
    amounts = [f"{trend.first:,.1f}", f"{trend.last:,.1f}", f"{trend.slope:+.3f}", f"{limit.per_thousand:g}"]
    verdict = "not measured" if isnan(trend.slope) else "LEAKS" if trend.leaks else "ok"
    return [trend.process, trend.quantity, *amounts, f"{trend.growth:+.1f}", f"{limit.altogether:g}", verdict]


def report(found: Report) -> None:
    """Print the tables."""
    tally = found.tally
    header = ["process", "quantity", "first", "last", "per 1,000 requests", "limit", "growth", "or", ""]
    print(f"\n{table(header, [_row(each) for each in found.trends])}")
    print("\n| status of POST /v1/embeddings | requests |\n|---|---:|")
    for status, number in [*sorted(tally.statuses.items()), ("not waited for", tally.unseen)]:
        print(f"| {status} | {number:,} |")
    deeds = ", ".join(f"{kind} {number:,}" for kind, number in tally.done.most_common())
    print(f"\n{tally.requests:,} deeds of clients in {found.seconds:,.0f} s and {found.rounds} rounds: {deeds}.")
    print(f"{tally.texts:,} vectors were compared. {tally.kills} kills. The slowest answer took {tally.slowest:.1f} s.")
    print(f"Failures: {len(found.failures)}.")
    alike = Counter(failure[:_PREFIX_LENGTH] for failure in found.failures)
    for failure in found.failures:
        if number := alike.pop(failure[:_PREFIX_LENGTH], 0):
            print(f"- {number:,} x {failure}")


def main() -> None:
    """Run the soak test from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("seconds", 300.0),
        ("round", 10.0),
        ("clients", 6),
        ("kill-every", 4),
        ("seed", 0),
        ("dtype", "auto"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help="default: %(default)s")
    parser.add_argument("--serve", type=shlex.split, default=[], help="further arguments of `whimbrel serve`")
    args = parser.parse_args()
    found = soak(Options(args.seconds, args.round, args.clients, args.kill_every, args.seed, args.dtype, tuple(args.serve)))
    report(found)
    print(f"\n{describe_machine()}, {describe_software()}, clients {args.clients}, round {args.round:g} s, seed {args.seed}")
    sys.exit(1 if found.failures else 0)


if __name__ == "__main__":
    main()
