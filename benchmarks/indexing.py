"""Indexing as it is done: many threads of public clients in their defaults, with single queries and other work beside them.

    python benchmarks/indexing.py [--clients openai,langchain,llamaindex,haystack] [--threads 8,32,128] [--chunks 20000]
                                  [--beside 1] [--idle 200] [--python PATH] [--serve ARGUMENTS]

The server is `whimbrel serve` in its defaults, with the packaged model. Each run embeds `--chunks` chunks of some 230 tokens,
100 in a call (indexing_client.py), with the clients' own sizes of requests, timeouts and retries. `--beside` processes compute
without end meanwhile. `--python` is the interpreter that has the clients (`make recipes` installs them).

A query of four words is sent every quarter of a second on a connection of its own: for `--idle` seconds without a job, to a
server of its own, and then beside each job. All rows are compared with that one measurement.
The memory is the proportional set size of all processes of the server, sampled every second. Its bound is what the server
sets aside for waiting requests, above the memory at rest.
"""

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import httpx2
import numpy as np
from common import default_plan, note, options, print_setting, print_table

from whimbrel.types.machine_limits import share_waiting_memory, usable_memory
from whimbrel_bench.processes import mebibytes
from whimbrel_bench.server import Serving, serving

_CLIENT: Final = Path(__file__).parent / "indexing_client.py"
_EVERY: Final = 0.25
_MEMORY: Final = "smaps_rollup", "Pss"
_QUERY: Final = {"input": "where do curlews winter", "encoding_format": "base64"}


@dataclass(slots=True)
class Watch:
    """Latencies of the single queries in seconds, and the memory of the server in MiB."""

    seconds: list[float] = field(default_factory=list[float])
    failed: int = 0
    most_memory: float = 0.0

    def milliseconds(self, percentile: float) -> float:
        return float(np.percentile(self.seconds, percentile)) * 1e3

    async def run(self, server: Serving) -> None:
        memory = asyncio.create_task(self._memory(server))
        async with httpx2.AsyncClient(base_url=server.url, timeout=600) as client:
            try:
                while True:
                    started = perf_counter()
                    answer = await client.post("/v1/embeddings", json=_QUERY)
                    self.seconds.append(perf_counter() - started)
                    self.failed += answer.status_code != 200
                    await asyncio.sleep(max(0.0, started + _EVERY - perf_counter()))
            finally:
                memory.cancel()

    async def _memory(self, server: Serving) -> None:
        while True:
            self.most_memory = max(self.most_memory, await asyncio.to_thread(mebibytes, server.pid, *_MEMORY))
            await asyncio.sleep(1.0)


async def watch_alone(server: Serving, seconds: float) -> Watch:
    """Watch queries without a job."""
    watch = Watch()
    with suppress(TimeoutError):
        await asyncio.wait_for(watch.run(server), seconds)
    return watch


async def watch_job(server: Serving, name: str, threads: int, args: argparse.Namespace) -> tuple[Watch, dict[str, Any]]:
    """Watch queries beside a job. Return them, and what the job says of itself."""
    watch = Watch()
    watching = asyncio.create_task(watch.run(server))
    model = "sentence-transformers/all-MiniLM-L6-v2"
    command = [args.python, str(_CLIENT), name, server.url, str(threads), str(args.chunks), model]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"the client {name} ended with {process.returncode}")
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching  # raises what went wrong
    return watch, json.loads(out)


@contextmanager
def other_work(count: int) -> Generator[None]:
    """Keep `count` cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Run the benchmark."""
    defaults = {"clients": "openai,langchain,llamaindex,haystack", "threads": "8,32,128", "chunks": 20_000}
    args = options(__doc__, **defaults, beside=1, idle=200.0, python=sys.executable, serve="").parse_args()
    plan, bound = default_plan("auto"), share_waiting_memory(usable_memory()).total
    serve = (None, "--dtype", plan.dtype, *shlex.split(args.serve))
    with serving(*serve) as server, other_work(args.beside):
        alone = asyncio.run(watch_alone(server, args.idle))
    note(f"alone: {len(alone.seconds):,} queries, p50 {alone.milliseconds(50):.1f} ms, p99 {alone.milliseconds(99):.1f} ms")
    rows: list[list[str]] = []
    for name in args.clients.split(","):
        for threads in map(int, args.threads.split(",")):
            with serving(*serve) as server, other_work(args.beside):
                at_rest = mebibytes(server.pid, *_MEMORY)
                beside, told = asyncio.run(watch_job(server, name, threads, args))
            for reason, count in told["reasons"].items():
                note(f"{name}, {threads} threads: {count} times {reason}")
            p99, ratio = beside.milliseconds(99), beside.milliseconds(99) / alone.milliseconds(99)
            rows.append([
                name, f"{threads}", f"{told['calls']:,}", f"{told['failed']:,}", f"{told['seconds']:,.0f}",
                f"{args.chunks / told['seconds']:,.1f}", f"{len(beside.seconds):,}", f"{beside.failed}",
                f"{beside.milliseconds(50):,.0f}", f"{p99:,.0f}", f"{ratio:.2f}",
                f"{beside.most_memory - at_rest:,.0f}", f"{bound / 2**20:,.0f}",
            ])  # fmt: skip
            note(" | ".join(rows[-1]))
    print_table(
        [
            "client", "threads", "calls", "failed", "seconds", "chunks/s", "queries", "failed",
            "p50, ms", "p99, ms", "to p99 alone", "memory above rest, MiB", "bound, MiB",
        ],
        rows,
    )  # fmt: skip
    print_setting(plan, chunks=args.chunks, beside=args.beside)


if __name__ == "__main__":
    main()
