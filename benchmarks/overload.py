"""Overload: goodput, time to refusal and memory at ten times the capacity for a minute.

    python benchmarks/overload.py [--seconds 60] [--factor 10] [--texts 8] [--dtype auto] [--serve ARGUMENTS]

The server is `python -m whimbrel serve` of the packaged all-MiniLM-L6-v2. By default it refuses nothing, so it gets
`--max-queue-seconds 30`. All requests have `--texts` mixed texts and take base64. First the capacity is measured, closed-loop:
`--connections` clients send one request after another. Then comes the overload, open-loop: requests arrive at random (Poisson)
times, `--factor` times as many per second as the capacity. Each takes an idle connection or opens one. Clients do not retry.

Goodput is the texts per second of 200 responses after the first tenth of the time, without those that come after the last
arrival. The seconds of an accepted request run from its scheduled arrival. Those of a refused request run from the moment it
was sent on an open connection, because the generator may be late; the delay is reported. Generator and server share the cores.
The generator's part is reported, and counts against the server. All 200 responses are compared with the vectors of the
in-process Engine, bit by bit. The slope of the memory is that of Theil and Sen over the second half of the overload
(`leaks.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from time import perf_counter
from typing import Final

import numpy as np
import uvloop
from common import MIXED, NUM_CORES, chunks, cpu_seconds, default_plan, make_texts, note, print_setting, print_table
from driver import Answer, Connection, Serving, body_of, read_metrics, request_of, serving, total, vectors_of
from leaks import Family, Sample, trends

from whimbrel import Engine

NUM_REQUESTS: Final = 64
"""Number of different requests."""
_PATIENCE: Final = 120.0
_NUM_SAMPLES: Final = 60
_WARM_UP_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one request."""

    number: int
    """Index of the request among the different ones."""
    due: float
    sent: float
    ended: float
    what: str
    """Status, or name of an error."""
    retry_after: str = ""


@dataclass(slots=True)
class Load:
    """Requests, connections and outcomes."""

    port: int
    requests: Sequence[bytes]
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    bodies: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """First response body of each request."""
    digests: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    most_connections: int = 0
    _free: list[Connection] = field(default_factory=list[Connection])
    _busy: int = 0

    async def send(self, number: int, due: float) -> None:
        """Send one request on an idle connection or a new one."""
        sent = perf_counter()
        answer: Answer | None = None
        self._busy += 1
        self.most_connections = max(self.most_connections, self._busy + len(self._free))
        connection: Connection | None = None
        try:
            async with asyncio.timeout(_PATIENCE):
                connection = await self._connection()
                sent = perf_counter()
                answer = await connection.ask(self.requests[number])
            what = str(answer.status)
        except (OSError, EOFError, TimeoutError) as error:
            what = type(error).__name__
        self._busy -= 1
        retry_after = answer.headers.get("retry-after", "") if answer is not None else ""
        self.outcomes.append(Outcome(number, due, sent, perf_counter(), what, retry_after))
        if answer is not None and answer.status == 200:
            self.bodies.setdefault(number, answer.body)
            self.digests[number].add(blake2b(answer.body).digest())
        await self._put_back(connection, kept=answer is not None and answer.headers.get("connection") != "close")

    async def close(self) -> None:
        """Close the idle connections."""
        while self._free:
            await self._free.pop().close()

    async def _connection(self) -> Connection:
        """Return the idle connection that was used last, or a new one."""
        while self._free:
            if not (connection := self._free.pop()).closed:
                return connection
            await connection.close()
        return await Connection.open(self.port)

    async def _put_back(self, connection: Connection | None, *, kept: bool) -> None:
        if connection is not None and kept:
            self._free.append(connection)
        elif connection is not None:
            await connection.close()


async def closed_loop(load: Load, num_connections: int, seconds: float) -> float:
    """Return the answered requests per second with all connections always busy."""
    numbers = count()

    async def client(end: float) -> None:
        while (now := perf_counter()) < end:
            await load.send(next(numbers) % len(load.requests), now)

    started = perf_counter()
    end = started + _WARM_UP_SECONDS + seconds
    await asyncio.gather(*(client(end) for _ in range(num_connections)))
    wrong = {outcome.what for outcome in load.outcomes} - {"200"}
    if wrong:
        raise SystemExit(f"the maximum could not be measured; there were also: {', '.join(wrong)}")
    return sum(started + _WARM_UP_SECONDS <= outcome.ended < end for outcome in load.outcomes) / seconds


async def open_loop(load: Load, rate: float, seconds: float, samples: list[Sample], family: Family) -> tuple[float, float]:
    """Send requests by the schedule. Return its start and end, once all are answered."""
    rng = random.Random(0)
    sending: set[asyncio.Task[None]] = set()
    started = due = perf_counter()
    sampling = asyncio.create_task(_sample(load, samples, family, every=seconds / _NUM_SAMPLES))
    for number in count():
        due += rng.expovariate(rate)
        if due >= started + seconds:
            break
        await asyncio.sleep(max(0.0, due - perf_counter()))
        task = asyncio.create_task(load.send(number % len(load.requests), due))
        sending.add(task)
        task.add_done_callback(sending.discard)
    ended = perf_counter()
    sampling.cancel()
    note(f"{len(sending):,} requests are under way at the end")
    if sending:
        await asyncio.wait(sending)
    return started, ended


async def _sample(load: Load, samples: list[Sample], family: Family, *, every: float) -> None:
    while True:
        samples.append(family.sample(len(load.outcomes)))
        await asyncio.sleep(every)


@dataclass(frozen=True, slots=True)
class Overload:
    """Measurements of the overload."""

    outcomes: list[Outcome]
    started: float
    ended: float
    maximum: float
    """Requests per second, closed-loop."""
    rate: float
    """Scheduled requests per second."""
    samples: list[Sample]
    cores: dict[str, float]
    most_connections: int

    @property
    def goodput(self) -> float:
        """Return the requests per second."""
        begin = self.started + (self.ended - self.started) / 10
        good = sum(begin <= outcome.ended < self.ended for outcome in self.outcomes if outcome.what == "200")
        return good / (self.ended - begin)


async def measure(server: Serving, load: Load, args: argparse.Namespace) -> Overload:
    """Measure the maximum, then the overload."""
    family = Family(server.pid, "supervisor")
    note("the maximum")
    maximum = await closed_loop(load, args.connections, args.seconds / 3)
    load.outcomes.clear()
    rate = args.factor * maximum
    note(f"{maximum:.1f} requests/s; now {rate:.1f}/s for {args.seconds:g} s")
    before, own = _cpu(server), time.process_time()
    samples: list[Sample] = []
    started, ended = await open_loop(load, rate, args.seconds, samples, family)
    whole = perf_counter() - started
    cores = {name: (seconds - before[name]) / whole for name, seconds in _cpu(server).items()}
    cores["load generator"] = (time.process_time() - own) / whole
    await load.close()
    return Overload(load.outcomes, started, ended, maximum, rate, samples, cores, load.most_connections)


def _cpu(server: Serving) -> dict[str, float]:
    """Return the processor time of the server, and of its workers."""
    name = "process_cpu_seconds_total"
    metrics = read_metrics(server.port)
    processes = {sample.labels.get("process", "") for metric in metrics for sample in metric.samples if sample.name == name}
    return {"server": cpu_seconds(server.pid)} | {
        process: total(metrics, name, process=process) for process in sorted(processes) if process.startswith("worker")
    }


def check(load: Load, texts: Sequence[Sequence[str]], dtype: str) -> str:
    """Return the faults of the responses; empty if there are none."""
    with Engine(dtype=dtype) as engine:
        wrong = [
            number
            for number, body in load.bodies.items()
            if len(load.digests[number]) > 1 or not np.array_equal(vectors_of(body), engine.embed(texts[number]))
        ]
    return f"requests {wrong} had other vectors than the engine gives" if wrong else ""


def report(found: Overload, num_texts: int) -> None:
    """Print the table and the other results."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in found.outcomes:
        groups[outcome.what].append(outcome)
    rows: list[list[str]] = []
    for what, outcomes in sorted(groups.items()):
        accepted = what == "200"
        seconds = [outcome.ended - (outcome.due if accepted else outcome.sent) for outcome in outcomes]
        numbers = [*np.percentile(seconds, [50, 99]).tolist(), max(seconds)]
        share = f"{len(outcomes) / len(found.outcomes):.1%}"
        rows.append([what, f"{len(outcomes):,}", share, *(f"{x * 1e3:,.1f}" for x in numbers)])
    print_table(["outcome", "requests", "share", "p50, ms", "p99, ms", "slowest, ms"], rows)
    maximum, goodput = found.maximum * num_texts, found.goodput * num_texts
    arrived = len(found.outcomes) / (found.ended - found.started)
    print(f"\nMaximum {maximum:,.0f} texts/s, goodput {goodput:,.0f} texts/s: **{goodput / maximum:.3f}** of it", end=", ")
    print(f"while {arrived:,.1f} requests/s arrived, {arrived / found.maximum:.1f} times the maximum.")
    late = np.percentile([outcome.sent - outcome.due for outcome in found.outcomes], [50, 99, 100]) * 1e3
    print(f"Sent late by: p50 {late[0]:,.1f} ms, p99 {late[1]:,.1f} ms, at most {late[2]:,.1f} ms", end="; ")
    print(f"at most {found.most_connections:,} connections.")
    for what, outcomes in sorted(groups.items()):
        spread = Counter(int(outcome.retry_after) for outcome in outcomes if outcome.retry_after.isdecimal())
        if spread or what in ("429", "503"):
            print(f"Retry-After of {what}: {', '.join(f'{s} s {n:,}' for s, n in sorted(spread.items()))}", end="; ")
            print(f"without: {len(outcomes) - spread.total():,}.")
    print(f"Cores busy: {', '.join(f'{name} {cores:.2f}' for name, cores in found.cores.items())}, of {NUM_CORES}.")
    minutes = (found.ended - found.started) / 60
    per_minute = (found.samples[-1].requests - found.samples[0].requests) / minutes / 1000
    for trend in trends(found.samples):
        if trend.quantity == "memory, MiB":
            slope = f"{trend.slope:+.2f} MiB per 1,000 requests, {trend.slope * per_minute:+.1f} per minute"
            print(f"Memory of {trend.process}: {trend.first:,.0f} to {trend.last:,.0f} MiB, {slope}.")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload; the maximum is measured for a third")
    parser.add_argument("--factor", type=float, default=10.0, help="arrivals over the maximum")
    parser.add_argument("--texts", type=int, default=8, help="in each request")
    parser.add_argument("--connections", type=int, default=16, help="while the maximum is measured")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument(
        "--serve", default="--max-queue-seconds 30", help="further arguments of `whimbrel serve`, in one string"
    )
    args = parser.parse_args()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    plan = default_plan(args.dtype)
    texts = chunks(make_texts(NUM_REQUESTS * args.texts, words=MIXED), args.texts)
    requests = [request_of(body_of(each)) for each in texts]
    with serving(plan.dtype, *shlex.split(args.serve)) as server:
        load = Load(server.port, requests)
        found = uvloop.run(measure(server, load, args))
    wrong = check(load, texts, plan.dtype)
    report(found, args.texts)
    print(f"Vectors: {wrong or 'all as the engine gives them'}.")
    print_setting(plan, factor=args.factor, seconds=args.seconds, texts_per_request=args.texts, connections=args.connections)


if __name__ == "__main__":
    main()
