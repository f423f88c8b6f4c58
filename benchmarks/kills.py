"""Recovery from engine crashes: failed requests and time to the next response, with repeated SIGKILL under load.

    python benchmarks/kills.py [--kills 10] [--clients 8] [--dtype auto] [--serve ARGUMENTS]

The server is `python -m whimbrel serve` of the packaged all-MiniLM-L6-v2. Clients send requests of 1 to 40 mixed texts, each
client one after another on a kept connection. After two responses per client since the last kill, and a random part of a
second, the engine process gets SIGKILL in the middle of its batches. At the same moment one further request, of one text, is
sent on its own connection.

A request fails without a response, or if the response is not 200 with the exact vectors of the in-process Engine. Clients do
not retry. `next answer` is the time from a kill until the first response to any client after the next engine process exists:
earlier responses are of the killed one. `request sent at the kill` is the time until the response to that request, which
cannot come from the killed engine. For comparison, the time from the start of an engine process until it is ready is measured
before the server starts. Clients and server share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shlex
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np
import uvloop
from boundary import start
from common import MIXED, default_plan, make_texts, note, print_setting, print_table
from driver import Connection, Serving, body_of, request_of, serving, vectors_of

from whimbrel import Engine
from whimbrel.types.arrays import Float32Array
from whimbrel.types.plan import Options

NUM_LOADS: Final = 3
_MAX_TEXTS: Final = 40
_PATIENCE: Final = 120.0


@dataclass(slots=True)
class Load:
    """Clients and their observations."""

    port: int
    texts: Sequence[str]
    expected: Float32Array
    outcomes: Counter[str] = field(default_factory=Counter[str])
    vectors: int = 0
    slowest: float = 0.0
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set at every response."""
    running: bool = True

    @property
    def total(self) -> int:
        return self.outcomes.total()

    async def client(self, rng: random.Random) -> None:
        """Send requests while `running`."""
        connection = await Connection.open(self.port)
        while self.running:
            chosen = rng.choices(range(len(self.texts)), k=rng.randint(1, _MAX_TEXTS))
            try:
                await self.ask(connection, chosen)
            except (OSError, EOFError, TimeoutError) as error:
                self.outcomes[type(error).__name__] += 1
                await connection.close()
                connection = await Connection.open(self.port)
        await connection.close()

    async def ask(self, connection: Connection, chosen: list[int]) -> None:
        """Send one request and check its response."""
        started = perf_counter()
        async with asyncio.timeout(_PATIENCE):
            answer = await connection.ask(request_of(body_of([self.texts[i] for i in chosen])))
        self.slowest = max(self.slowest, perf_counter() - started)
        right = answer.status == 200 and np.array_equal(vectors_of(answer.body), self.expected[chosen])
        self.outcomes["200" if right else "other vectors" if answer.status == 200 else str(answer.status)] += 1
        self.vectors += len(chosen) if right else 0
        self.answered.set()

    async def next_answer(self) -> None:
        """Return at the next response."""
        self.answered.clear()
        await self.answered.wait()


def load_seconds(dtype: str) -> float:
    """Return the seconds from the start of an engine process until it is ready."""
    started = perf_counter()
    engine = start(Options(dtype=dtype))
    seconds = perf_counter() - started
    engine.process.kill()
    engine.process.wait()
    return seconds


async def kill(server: Serving, load: Load) -> tuple[float, float]:
    """Kill the engine. Return the seconds until the next response, and until that to a request sent now."""
    (engine,) = server.engines()
    connection = await Connection.open(server.port)
    os.kill(engine, signal.SIGKILL)
    killed = perf_counter()

    async def ask() -> float:
        await load.ask(connection, [0])
        return perf_counter() - killed

    asking = asyncio.create_task(ask())
    while server.engines() in ([], [engine]):  # noqa: ASYNC110  # a process gets no event of another's children
        await asyncio.sleep(0.01)
    await load.next_answer()
    seconds = perf_counter() - killed
    own = await asking
    await connection.close()
    return seconds, own


async def measure(server: Serving, load: Load, num_kills: int, num_clients: int) -> list[tuple[float, float]]:
    """Run all kills under load."""
    rng = random.Random(0)
    clients = [asyncio.create_task(load.client(random.Random(i))) for i in range(num_clients)]
    seconds: list[tuple[float, float]] = []
    for i in range(num_kills):
        note(f"kill {i + 1} of {num_kills}")
        async with asyncio.timeout(_PATIENCE):
            before = load.total
            while load.total < before + 2 * num_clients:
                await load.next_answer()
            await asyncio.sleep(rng.random())
            seconds.append(await kill(server, load))
    load.running = False
    await asyncio.gather(*clients)
    return seconds


def report(loads: list[float], seconds: list[tuple[float, float]], load: Load) -> None:
    """Print the table and the failures."""
    nexts, owns = (list(column) for column in zip(*seconds, strict=True))
    rows = {"an engine process alone, until ready": loads, "kill to next answer": nexts, "request sent at the kill": owns}
    print_table(
        ["seconds", "median", "least", "most", "median over loading"],
        [
            [name, *(f"{each:.2f}" for each in (median(row), min(row), max(row))), f"{median(row) / median(loads):.2f}"]
            for name, row in rows.items()
        ],
    )
    failed = load.total - load.outcomes["200"]
    print(f"\nFailed requests over {len(seconds)} kills: {failed} of {load.total:,}. {load.vectors:,} vectors were compared.")
    print(f"Outcomes: {', '.join(f'{name} {number:,}' for name, number in load.outcomes.most_common())}.")
    print(f"The slowest answer took {load.slowest:.1f} s.")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--serve", default="", help="further arguments of `whimbrel serve`, in one string")
    args = parser.parse_args()
    plan = default_plan(args.dtype)
    texts = make_texts(512, words=MIXED)
    note("loading engines")
    loads = [load_seconds(plan.dtype) for _ in range(NUM_LOADS)]
    with Engine(dtype=plan.dtype) as engine:
        expected = engine.embed(texts)
    with serving(plan.dtype, *shlex.split(args.serve)) as server:
        load = Load(server.port, texts, expected)
        seconds = uvloop.run(measure(server, load, args.kills, args.clients))
    report(loads, seconds, load)
    print_setting(plan, kills=args.kills, clients=args.clients)


if __name__ == "__main__":
    main()
