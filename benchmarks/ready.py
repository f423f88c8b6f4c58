"""A server whose engine costs nothing: it gives ready arrays.

`python benchmarks/ready.py DIMENSIONS` prints its port and serves.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from whimbrel.types import AsyncEmbedder, Float32Array, Outputs, Request, Result, Timings

MODEL: Final = "ready"
_MAX_TEXTS: Final = 2048


@dataclass
class Plan:
    """What routes ask of it."""

    served_name: str = MODEL
    max_length: int = 512
    aliases: tuple[str, ...] = ()


class Ready:
    """Answers with the first rows of one array."""

    def __init__(self, dimensions: int) -> None:
        self.card: Any = None
        self.plan: Any = Plan()
        self.ready, self.status, self.queued_tokens = True, "ready", 0
        self._vectors = vectors_of(dimensions)

    async def run(self, request: Request) -> Result:
        count = len(request.texts)
        return Result(Outputs(self._vectors[:count]), num_tokens=5 * count, num_truncated=0, timings=Timings())


def vectors_of(dimensions: int) -> Float32Array:
    """What it answers with."""
    return np.random.default_rng(0).standard_normal((_MAX_TEXTS, dimensions)).astype(np.float32)


@contextmanager
def ready_server(dimensions: int) -> Generator[tuple[str, Float32Array]]:
    """Its URL, in a process of its own, and its vectors."""
    command = [sys.executable, __file__, str(dimensions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", vectors_of(dimensions)
        finally:
            process.kill()


def main() -> None:
    from whimbrel.serve import listen
    from whimbrel.server.app import create_app
    from whimbrel.server.options import GuardOptions
    from whimbrel.server.run import make_server
    from whimbrel.server.served import Served

    guards = GuardOptions()
    with listen("127.0.0.1", 0) as listener:

        async def serve() -> None:
            served = Served(cast(AsyncEmbedder, Ready(int(sys.argv[1]))))
            server = make_server(create_app(served, guards=guards), listener.fileno(), guards)
            print(listener.getsockname()[1], flush=True)
            await server.serve()

        asyncio.run(serve())


if __name__ == "__main__":
    main()
