"""Mixed load on a real server for minutes or hours: every answer right, nothing leaks, all metrics add up, nothing is left.

    python benchmarks/soak.py [--seconds 300] [--round 10] [--clients 6] [--kill-every 4] [--seed 0] [--serve ARGUMENTS]

The server is `python -m whimbrel serve` of the packaged all-MiniLM-L6-v2. In rounds of `--round` seconds clients do one thing
after another, chosen at random: requests of 1 to 300 texts as base64 and as floats, every kind of wrong request, deadlines
from 0 to 60 seconds; they leave (politely or by reset) before, while or after they send, reset in the middle of an answer, or
read it slowly; probes and metrics in between. In every `--kill-every`th round, from the second on and in the first half of the
run, the engine is killed with SIGKILL. Clients keep a connection for a while, and close it at the end of the round.

After each round the server rests: everything that was sent must be found in its metrics, with the status that the client saw,
nothing may wait, and what its processes hold is noted. At the end the server is asked to stop; it must have left nothing, no
process, file or shared memory, its exit code must be 0, and its log must tell of the kills and of no other fault. What the
processes held at the rests must not grow: it leaks if it grows by more than one limit of the table per 1,000 requests and by
more than the other altogether. So a short run finds great leaks only; see `leaks`.

Every vector is compared with that of the in-process Engine, bit by bit. A request may be refused by 429 and 503 with a
Retry-After, and by 504 if it named a deadline; that must stay rare. Anything else is a failure, and the exit code is 1.
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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, isnan, log
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import uvloop
from common import MIXED, SHORT, default_plan, make_texts, note, print_setting, print_table
from driver import (
    PATH,
    Answer,
    Connection,
    Serving,
    body_of,
    has,
    is_ready,
    read_metrics,
    request_of,
    serving,
    total,
    vectors_of,
)
from leaks import LIMITS, Family, Limit, Sample, Trend, trends
from prometheus_client import Metric

from whimbrel import Engine
from whimbrel.types import Float32Array

REFUSALS: Final = (429, 503)
MAX_REFUSED: Final = 0.05
"""Of patient requests."""
_MAX_TEXTS: Final = 300
_PATIENCE: Final = 120.0
"""Seconds after which an answer is missing."""
_SETTLE_SECONDS: Final = 60.0
_ALIKE: Final = 60
"""Complaints that begin with the same so many characters are shown once."""
_MOST_COMPLAINTS: Final = 1000
_LEAST_ROUNDS: Final = 12
_KILLED: Final = "it was killed by SIGKILL; it is started again."
_BAD: Final = re.compile(r"Traceback|This is a bug|started again|\b(ERROR|CRITICAL)\b")
_REQUESTS: Final = "whimbrel_requests_total"
_SAME: Final = ("whimbrel_requests_received_total", "whimbrel_request_seconds_count")
"""Where they exist, as many as `_REQUESTS` when the server is at rest."""


@dataclass(frozen=True, slots=True)
class Options:
    """How long, and what."""

    seconds: float = 300.0
    round_seconds: float = 10.0
    clients: int = 6
    kill_every: int = 4
    seed: int = 0
    dtype: str = "auto"
    serve: tuple[str, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=lambda: LIMITS)
    series: Path | None = None
    """Every sample is written here, as JSON Lines."""


@dataclass(slots=True)
class Tally:
    """What clients saw."""

    statuses: Counter[int] = field(default_factory=Counter[int])
    """Answers of POST /v1/embeddings."""
    unseen: int = 0
    """Such requests whose answer, if there was one, the client did not wait for."""
    texts: int = 0
    """In answers of 200."""
    unseen_texts: int = 0
    patient: int = 0
    """Right requests that would have waited."""
    done: Counter[str] = field(default_factory=Counter[str])
    """Of each kind of deed."""
    kills: int = 0
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list[str])

    @property
    def requests(self) -> int:
        return self.done.total()

    def complain(self, text: str) -> None:
        """Something is not as promised."""
        if len(self.wrong) < _MOST_COMPLAINTS:
            self.wrong.append(text[:500])


class Client:
    """One client; `run` until a time."""

    def __init__(self, port: int, texts: Sequence[str], expected: Float32Array, tally: Tally, rng: random.Random) -> None:
        self._port = port
        self._texts = texts
        self._expected = expected
        self._tally = tally
        self._rng = rng
        self._kept: Connection | None = None

    async def run(self, end: float) -> None:
        """Do one thing after another. What goes wrong is noted."""
        kinds, weights = zip(*KINDS.items(), strict=True)
        while perf_counter() < end:
            (kind,) = self._rng.choices(kinds, weights)
            try:
                async with asyncio.timeout(_PATIENCE):
                    await kind(self)
            except TimeoutError:
                self._tally.complain(f"{kind.__name__}: no answer in {_PATIENCE:.0f} s")
                await self._hang_up()
            except (OSError, EOFError, ValueError) as error:
                self._tally.complain(f"{kind.__name__}: {error!r}")
                await self._hang_up()
            self._tally.done[kind.__name__] += 1
        await self._hang_up()

    async def _connection(self) -> Connection:
        if self._kept is not None and (self._kept.closed or self._rng.random() < 0.1):
            await self._hang_up()
        if self._kept is None:
            self._kept = await Connection.open(self._port)
        return self._kept

    async def _hang_up(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await kept.close()

    def _choose(self, most: int = _MAX_TEXTS) -> list[int]:
        """Numbers of texts: often one, else any order of magnitude."""
        size = 1 if self._rng.random() < 0.6 else round(exp(self._rng.uniform(0, log(most))))
        return self._rng.choices(range(len(self._texts)), k=size)

    def _body(self, chosen: list[int], **fields: Any) -> bytes:
        kind = self._rng.choice(["base64", "float"])
        return body_of([self._texts[i] for i in chosen], **{"encoding_format": kind} | fields)

    def _check(self, answer: Answer, chosen: list[int], *, deadline: bool = False) -> None:
        """An answer to a right request: the right vectors, or a refusal that is allowed."""
        tally = self._tally
        tally.statuses[answer.status] += 1
        tally.patient += not deadline
        if answer.status == 200:
            tally.texts += len(chosen)
            if not np.array_equal(vectors_of(answer.body), self._expected[chosen]):
                tally.complain(f"other vectors for texts {chosen[:20]}")
        elif answer.status in REFUSALS:
            if not answer.headers.get("retry-after", "").isdecimal():
                tally.complain(f"{answer.status} without Retry-After: {answer.body[:300]!r}")
        elif not (deadline and answer.status == 504):
            tally.complain(f"{answer.status}: {answer.body[:300]!r}")

    # What clients do

    async def embed(self) -> None:
        """A right request, and all patience."""
        chosen = self._choose()
        started = perf_counter()
        answer = await (await self._connection()).ask(request_of(self._body(chosen)))
        self._tally.slowest = max(self._tally.slowest, perf_counter() - started)
        self._check(answer, chosen)

    async def hurry(self) -> None:
        """A right request with a deadline; the last can be met."""
        chosen = self._choose(100)
        seconds = self._rng.choice(["0", "0.005", "0.05", "0.5", "5", "60"])
        request = request_of(self._body(chosen), x_request_timeout=seconds)
        self._check(await (await self._connection()).ask(request), chosen, deadline=seconds != "60")

    async def err(self) -> None:
        """A wrong request."""
        request, status = self._rng.choice(WRONG)
        answer = await (await self._connection()).ask(request)
        if request.startswith(b"POST " + PATH.encode() + b" "):
            self._tally.statuses[answer.status] += 1
        if answer.status != status or b'"error"' not in answer.body:
            self._tally.complain(f"{answer.status} instead of {status} for {_shown(request)}: {answer.body[:300]!r}")
        if answer.headers.get("connection") == "close":
            await self._hang_up()

    async def probe(self) -> None:
        """What watches a server asks."""
        path, statuses = self._rng.choice(PROBES)
        answer = await (await self._connection()).ask(request_of(method="GET", path=path))
        if answer.status not in statuses:
            self._tally.complain(f"{answer.status} of {path}: {answer.body[:300]!r}")

    async def leave(self) -> None:
        """Send nothing, a part or everything, and leave a little later."""
        chosen = self._choose()
        request = request_of(self._body(chosen))
        self._lose(chosen)
        connection = await Connection.open(self._port)
        connection.writer.write(request[: int(len(request) * self._rng.choice([0, 0.02, 0.5, 1, 1, 1]))])
        await asyncio.sleep(self._rng.uniform(0, 0.3))
        await connection.close(reset=self._rng.random() < 0.5)

    async def half_read(self) -> None:
        """Read the half of a large answer, and reset."""
        chosen = self._rng.choices(range(len(self._texts)), k=_MAX_TEXTS)
        self._lose(chosen)
        connection = await Connection.open(self._port, receive_buffer=2**15)
        try:
            connection.writer.write(request_of(self._body(chosen, encoding_format="float")))
            status, headers = await connection.head()
            if status == 200:
                await connection.reader.readexactly(int(headers["content-length"]) // 2)
        finally:
            await connection.close(reset=True)

    async def read_slowly(self) -> None:
        """Read a large answer bit by bit."""
        chosen = self._rng.choices(range(len(self._texts)), k=_MAX_TEXTS)
        connection = await Connection.open(self._port, receive_buffer=2**15)
        try:
            connection.writer.write(request_of(self._body(chosen, encoding_format="float")))
            status, headers = await connection.head()
            body = bytearray()
            while len(body) < int(headers["content-length"]) and (piece := await connection.reader.read(2**15)):
                body += piece
                await asyncio.sleep(0.02)
            self._check(Answer(status, headers, bytes(body)), chosen)
        finally:
            await connection.close()

    def _lose(self, chosen: list[int]) -> None:
        self._tally.unseen += 1
        self._tally.unseen_texts += len(chosen)


def _shown(request: bytes) -> str:
    """The first line of a request, and how its body begins."""
    head, _, body = request.partition(b"\r\n\r\n")
    return f"{head.partition(b' HTTP')[0].decode()} {body[:40]!r}"


Kind: TypeAlias = Callable[[Client], Awaitable[None]]

KINDS: Final[dict[Kind, float]] = {
    Client.embed: 40,
    Client.err: 30,
    Client.probe: 12,
    Client.hurry: 8,
    Client.leave: 8,
    Client.half_read: 0.5,
    Client.read_slowly: 0.5,
}
"""How often clients do what."""

PROBES: Final = [
    ("/health/live", (200,)), ("/health/ready", (200, 503)), ("/metrics", (200,)), ("/v1/models", (200,)), ("/info", (200,)),
    ("/openapi.json", (200,)), ("/docs", (200,)),
]  # fmt: skip

_WRONG_BODIES: Final[list[tuple[bytes, int]]] = [
    (b"", 400), (b"{}", 400), (b'{"input": ["a"', 400), (b"[1, 2]", 400), (b'{"input": "\xff"}', 400),
    (b'{"input": "\\ud800"}', 400), (b'{"input": "a", "user": ' + b"[" * 10_000, 400),
    (b'{"input": []}', 400), (b'{"input": ["a", 1]}', 400), (b'{"input": [30522]}', 400),
    (body_of(["a"], dimensions=0), 400), (body_of(["a"], encoding_format="int7"), 400), (body_of(["a"], model="nope"), 404),
    (body_of(["a"], prompt_name="nope"), 400), (body_of(["a"], truncate_prompt_tokens=-2), 400),
    (body_of(["word " * 400], truncate=False), 400), (body_of(["a"] * 2049), 413), (body_of(["x" * 1_100_000]), 413),
]  # fmt: skip

WRONG: Final = [
    *((request_of(body), status) for body, status in _WRONG_BODIES),
    (request_of(b'{"input": "a"}', content_type="text/plain"), 415),
    (request_of(b'{"input": "a"}', x_request_timeout="soon"), 400),
    (request_of(method="GET", path="/nope"), 404),
    (request_of(b"{}", path="/info"), 405),
]
"""Requests and the status that each gets."""


@dataclass(frozen=True, slots=True)
class Report:
    """How it went."""

    tally: Tally
    trends: list[Trend]
    rounds: int
    seconds: float

    @property
    def failures(self) -> list[str]:
        """All that is wrong; empty after a good soak."""
        leaking = [
            f"{each.process} leaks {each.quantity}: {each.first:,.1f} to {each.last:,.1f}" for each in self.trends if each.leaks
        ]
        refused = sum(self.tally.statuses[status] for status in REFUSALS)
        many = [f"{refused} of {self.tally.patient} were refused"] if refused > MAX_REFUSED * self.tally.patient else []
        return [*self.tally.wrong, *leaking, *many]


def soak(options: Options) -> Report:
    """Run it."""
    texts = [*make_texts(480, words=SHORT), *make_texts(32, words=MIXED, seed=1)]
    plan = default_plan(options.dtype)
    with Engine(dtype=plan.dtype) as engine:
        expected = engine.embed(texts)
    tally = Tally()
    rng = random.Random(options.seed)
    started = perf_counter()
    with serving(plan.dtype, *options.serve) as server:
        family = Family(server.pid, "supervisor")
        samples: list[Sample] = []
        while (run := perf_counter() - started) < options.seconds or len(samples) < _LEAST_ROUNDS:
            clients = [Client(server.port, texts, expected, tally, rng) for _ in range(options.clients)]
            kill = len(samples) % options.kill_every == 1 and (run < options.seconds / 2 or not tally.kills)
            uvloop.run(_round(clients, server, options.round_seconds, tally, kill_after=rng.random() if kill else None))
            samples.append(_rest(server, family, tally))
            if options.series is not None:
                with options.series.open("ab") as file:
                    file.write(msgspec.json.encode(samples[-1]) + b"\n")
            note(f"{run:6.0f} s  {tally.requests:,} requests, {tally.kills} kills, {len(tally.wrong)} wrong")
        _stop(server, family, tally)
    return Report(tally, trends(samples, options.limits), len(samples), perf_counter() - started)


async def _round(clients: Sequence[Client], server: Serving, seconds: float, tally: Tally, *, kill_after: float | None) -> None:
    """All clients at once; with `kill_after`, the engine is killed after this part of the time."""
    end = perf_counter() + seconds
    running = asyncio.gather(*(client.run(end) for client in clients))
    if kill_after is not None:
        await asyncio.sleep(seconds * kill_after)
        for pid in server.engines()[:1]:
            os.kill(pid, signal.SIGKILL)
            tally.kills += 1
    await running


def _rest(server: Serving, family: Family, tally: Tally) -> Sample:
    """Wait until the server has nothing to do, and look."""
    end = time.monotonic() + _SETTLE_SECONDS
    while (problem := _unsettled(server, tally)) and time.monotonic() < end:
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
    """All but memory."""
    return {
        name: {quantity: amount for quantity, amount in held.amounts.items() if "MiB" not in quantity}
        for name, held in sample.held.items()
    }


def _unsettled(server: Serving, tally: Tally) -> str:
    """What keeps the server from being at rest, or its metrics from adding up; empty if nothing does."""
    if not is_ready(server.port):
        return "it is not ready"
    metrics = read_metrics(server.port)
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
    return _open_ends(metrics, counted["requests"])


def _open_ends(metrics: Sequence[Metric], ended: float) -> str:
    """Whether other metrics of the same requests say something else."""
    others = {name: total(metrics, name, route=PATH) for name in _SAME if has(metrics, name)}
    wrong = [f"{name} is {number:,.0f}" for name, number in others.items() if number != ended]
    if under_way := total(metrics, "whimbrel_requests_in_flight", route=PATH):
        wrong.append(f"{under_way:,.0f} requests are under way")
    return ", ".join([*wrong, f"{ended:,.0f} requests ended"]) if wrong else ""


def _stop(server: Serving, family: Family, tally: Tally) -> None:
    """The end of the server, and what it leaves."""
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
    """The tables."""
    tally = found.tally
    header = ["process", "quantity", "first", "last", "per 1,000 requests", "limit", "growth", "or", ""]
    print_table(header, [_row(each) for each in found.trends])
    print("\n| status of POST /v1/embeddings | requests |\n|---|---:|")
    for status, number in [*sorted(tally.statuses.items()), ("not waited for", tally.unseen)]:
        print(f"| {status} | {number:,} |")
    deeds = ", ".join(f"{kind} {number:,}" for kind, number in tally.done.most_common())
    print(f"\n{tally.requests:,} deeds of clients in {found.seconds:,.0f} s and {found.rounds} rounds: {deeds}.")
    print(f"{tally.texts:,} vectors were compared. {tally.kills} kills. The slowest answer took {tally.slowest:.1f} s.")
    print(f"Failures: {len(found.failures)}.")
    alike = Counter(failure[:_ALIKE] for failure in found.failures)
    for failure in found.failures:
        if number := alike.pop(failure[:_ALIKE], 0):
            print(f"- {number:,} x {failure}")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Options()
    parser.add_argument("--seconds", type=float, default=defaults.seconds)
    parser.add_argument("--round", type=float, default=defaults.round_seconds, help="seconds of load between two rests")
    parser.add_argument("--clients", type=int, default=defaults.clients)
    parser.add_argument("--kill-every", type=int, default=defaults.kill_every, help="rounds from one kill to the next")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--dtype", default=defaults.dtype, choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--serve", default="", help="further arguments of `whimbrel serve`, in one string")
    parser.add_argument("--series", type=Path, help="write what was held at each rest here, as JSON Lines")
    args = parser.parse_args()
    options = Options(
        seconds=args.seconds,
        round_seconds=args.round,
        clients=args.clients,
        kill_every=args.kill_every,
        seed=args.seed,
        dtype=args.dtype,
        serve=tuple(shlex.split(args.serve)),
        series=args.series,
    )
    found = soak(options)
    report(found)
    print_setting(default_plan(args.dtype), clients=args.clients, round=f"{args.round:g} s", seed=args.seed)
    sys.exit(1 if found.failures else 0)


if __name__ == "__main__":
    main()
