"""AsyncClient against AsyncOpenAI: 50,000 short texts, to one server whose engine costs nothing.

    python benchmarks/client.py [--texts 50000] [--rounds 5] [--quick]

The engine returns ready arrays of 1,024 columns (`wire_servers.py`), so the wire and the client are measured. Client and
server share the machine. AsyncOpenAI has its defaults (base64, 2 retries), and all its requests are gathered, with a fixed
number of texts in each. AsyncClient has its defaults. They take turns, after a round that is not counted. Processor time is
that of the client's process.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

import numpy as np
import openai
from common import note, print_setting, print_table
from wire import start
from wire_servers import vectors

from whimbrel import AsyncClient

_BATCHES: Final = (2048, 512, 32)
_LONE: Final = 500
"""Texts in the case of one text per request, which is too slow for all of them."""


async def ours(url: str, texts: list[str]) -> Any:
    async with AsyncClient(url) as client:
        return await client.embed(texts)


async def theirs(size: int, url: str, texts: list[str]) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        parts = [texts[start : start + size] for start in range(0, len(texts), size)]
        answers = await asyncio.gather(*(client.embeddings.create(model="ready", input=part) for part in parts))
    return [row.embedding for answer in answers for row in answer.data]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small, to see that all runs; its numbers mean nothing")
    args = parser.parse_args()
    if args.quick:
        args.texts, args.rounds = 2000, 1
    texts = [f"text number {number}" for number in range(args.texts)]
    contenders: dict[str, tuple[Callable[[str, list[str]], Awaitable[Any]], list[str]]] = {"AsyncClient": (ours, texts)}
    for size in _BATCHES:
        contenders[f"AsyncOpenAI, {size:,} texts in a request"] = (lambda url, some, size=size: theirs(size, url, some), texts)
    lone = texts[:_LONE]
    contenders["AsyncOpenAI, a text in a request"] = (lambda url, some: theirs(1, url, some), lone)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    processor: dict[str, list[float]] = {name: [] for name in contenders}
    with ExitStack() as stack:
        url = f"http://127.0.0.1:{start('whimbrel', stack)}"
        for number in range(args.rounds + 1):
            note(f"round {number} of {args.rounds}")
            for name, (ask, some) in contenders.items():
                started, before = perf_counter(), process_time()
                found = asyncio.run(ask(url, some))  # type: ignore[arg-type]
                if number:
                    seconds[name].append((perf_counter() - started) / len(some))
                    processor[name].append((process_time() - before) / len(some))
                check(found, len(some))
    base = median(seconds["AsyncClient"])
    rows = [
        [
            name,
            f"{1 / median(each):,.0f}",
            f"{1 / min(each):,.0f}",
            f"{base / median(each):.3f}",
            f"{1e6 * median(processor[name]):.2f}",
        ]
        for name, each in seconds.items()
    ]
    print_table(["", "texts/s", "fastest", "of AsyncClient", "client's processor time, ms per 1,000 texts"], rows)
    print_setting(None, texts=args.texts, rounds=args.rounds)


def check(found: Any, count: int) -> None:
    """Raise if the first vectors of the requests differ."""
    assert len(found) == count
    np.testing.assert_array_equal(np.asarray(found[0], np.float32), vectors(1)[0])


if __name__ == "__main__":
    main()
