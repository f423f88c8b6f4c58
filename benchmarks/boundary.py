"""Cost of the process boundary: a request through an engine process, against the same request in this process.

    python benchmarks/boundary.py [--rounds 40] [--dtype auto]

Both engines run the packaged all-MiniLM-L6-v2 with the same plan. An event loop calls them, as in a server: `AsyncEngine`,
whose lanes are threads of this process, and `RemoteEngine`, whose engine is another process. There is one request at a time.
The two take turns, and one is idle while the other works. The table has the medians of the seconds per request, and their
difference. Requests are 1 text of 16 tokens, and 128 texts of 128 tokens, without padding or truncation.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np
import uvloop
from common import default_plan, note, print_setting, print_table

from whimbrel import AsyncEngine
from whimbrel.checkpoint.reader import read_card
from whimbrel.server.app.routing import AsyncEmbedder
from whimbrel.server.processes.channel import Channel, pair
from whimbrel.server.processes.child_process import CONTROL_FD
from whimbrel.server.processes.messages import Attach, Load, ModelOptions, Planned, Ready, ReportEngine
from whimbrel.server.processes.remote_engine import RemoteEngine
from whimbrel.server.processes.shared_memory import StatusBoard, map_memory
from whimbrel.telemetry.logs import LogOptions
from whimbrel.types.plan import Options
from whimbrel.types.request import Request

REQUESTS: Final = {"1 x 16 tokens": (1, 16, 50), "128 x 128 tokens": (128, 128, 1)}
"""Texts, tokens per text, and requests per turn."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """Engine process, and this end of its channel."""

    process: subprocess.Popen[bytes]
    control: Channel[ReportEngine]
    planned: Planned
    board: StatusBoard
    sock: socket.socket


def start(options: Options) -> EngineProcess:
    """Start an engine process as the supervisor does."""
    ours, theirs = pair()
    command = [sys.executable, "-P", "-m", "whimbrel.server.processes.bootstrap", "engine", str(os.getpid())]
    environment = os.environ | {CONTROL_FD: str(theirs.fileno())}
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    control = Channel[ReportEngine](ours, ReportEngine)
    control.send(Load(ModelOptions(None, None, options), "engine-0-0", LogOptions()))
    planned: Planned | None = None
    for message in control:
        if isinstance(message, Planned):
            planned = message
        elif isinstance(message, Ready) and planned is not None:
            board = StatusBoard(map_memory(control.take_fd(), message.board_bytes))
            near, far = pair()
            control.send(Attach(0), [far.detach()])
            return EngineProcess(process, control, planned, board, near)
    raise SystemExit("the engine process did not start")


def token_request(num_texts: int, num_tokens: int) -> Request:
    """Return a request of token ids ([CLS], words, [SEP]), so that both sides do exactly the same work."""
    rng = np.random.default_rng(0)
    words = rng.integers(2000, 20000, (num_texts, num_tokens - 2))
    return Request([np.concatenate(([101], row, [102])) for row in words])


async def turn(embedder: AsyncEmbedder, request: Request, count: int) -> list[float]:
    """Return the seconds of each of `count` requests, one after another."""
    seconds: list[float] = []
    for _ in range(count):
        started = perf_counter()
        await embedder.run(request)
        seconds.append(perf_counter() - started)
    return seconds


async def measure(dtype: str, rounds: int) -> None:
    """Run both sides in turns and print the result."""
    plan = default_plan(dtype)
    options = Options(dtype=plan.dtype)
    note("loading")
    there = start(options)
    local = AsyncEngine(dtype=plan.dtype)
    folder = Path(there.planned.folder)
    remote = RemoteEngine(
        0,
        read_card(folder, there.planned.card_name),
        there.planned.plan,
        folder,
        num_replicas=1,
        max_segments=64,
        on_quarantine=lambda _: None,
        broken=lambda error: sys.exit(str(error)),
    )
    remote.attach(0, there.sock, there.board)
    rows: list[list[str]] = []
    for name, (num_texts, num_tokens, count) in REQUESTS.items():
        note(name)
        request = token_request(num_texts, num_tokens)
        near, far = (await local.run(request)).dense, (await remote.run(request)).dense
        if not np.array_equal(near, far):
            raise SystemExit("the two engines disagree")
        seconds: dict[str, list[float]] = {"in this process": [], "engine process": []}
        for _ in range(rounds):
            seconds["in this process"] += await turn(local, request, count)
            seconds["engine process"] += await turn(remote, request, count)
        a, b = (median(each) for each in seconds.values())
        rows.append([name, f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", f"{(b - a) * 1e6:+,.0f}", f"{b / a:.3f}"])
    print_table(["request", "in-process ms", "engine process ms", "difference us", "ratio"], rows)
    print_setting(plan, rounds=rounds)
    there.process.kill()
    await local.close()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    args = parser.parse_args()
    uvloop.run(measure(args.dtype, args.rounds))
    os._exit(0)


if __name__ == "__main__":
    main()
