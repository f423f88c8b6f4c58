"""An embedder without a model, and a server process around it.

    python tests/support/fake_embedder.py '{"write_pause": 2}'

serves with these limits, and prints its port once it answers.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import orjson

from whimbrel.dialects.common.route import Parsed
from whimbrel.server.app.routing import AsyncEmbedder
from whimbrel.types.card import Card, Encoder, Output, TokenizerCard
from whimbrel.types.request import Request
from whimbrel.types.residence import Residence
from whimbrel.types.result import Outputs, Result, Timings
from whimbrel.types.scheduling import Scheduling


@dataclass
class FakePlan:
    served_name: str = "fake"
    max_length: int = 256
    aliases: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: str = "float32"
    max_batch_tokens: int = 512
    max_queue_tokens: int = 2**20
    commit: str = ""
    revision: str = ""
    adapters: dict[str, str] = field(default_factory=dict[str, str])


CARD = Card(
    name="fake",
    path="",
    encoder=Encoder("bert", 100, 4, 8, (), 1, 256, 1e-12, "gelu"),
    outputs={"dense": Output(4, modes=("mean",), activation="normalize")},
    max_length=256,
    tokenizer=TokenizerCard(
        tokenizer_class="tokenizer.json",
        truncate="right",
        lowercase=False,
        do_lower_case=False,
        strip_accents=None,
        tokenize_chinese_chars=True,
        add_prefix_space=None,
        legacy=True,
        split_by_punct=False,
        ends=False,
        special_tokens={},
        extra_tokens=None,
        second_type=True,
        legacy_tokens=(),
        added_tokens=None,
    ),
)


@dataclass
class FakeModel:
    """The part of a model that a dialect sees."""

    plan: Any
    card: Any = None

    @classmethod
    def named(cls, name: str, card: Any = None) -> FakeModel:
        return cls(FakePlan(name), card)


def asked(parsed: Parsed[Any], card: Any = CARD) -> Any:
    """Return the request that a parsed body makes of a model with this card."""
    return parsed.request(FakeModel.named("m", card))


class FakeEmbedder:
    """Answers with ones, in the width asked for; keeps what it was asked, and waits while `go` is not set."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self.card = CARD
        self.plan: Any = FakePlan()
        self.ready = True
        self.status = "ready"
        self.residence = Residence()
        self.queued_tokens = 0
        self.requests: list[Request] = []
        self.schedulings: list[Scheduling] = []
        self.go = asyncio.Event()
        self.go.set()

    async def run(self, request: Request, scheduling: Scheduling, *, charge: Callable[[int], None] | None = None) -> Result:
        if charge is not None:
            charge(3 * len(request.texts))
        self.requests.append(request)
        self.schedulings.append(scheduling)
        await self.go.wait()
        if self._seconds:
            await asyncio.sleep(self._seconds)
        shape = len(request.texts), request.dimensions or 4
        return Result(Outputs(np.ones(shape, np.float32)), num_tokens=3 * shape[0], num_truncated=0, timings=Timings())


class FakeServer:
    """The HTTP part of a server, in a process that may open `max_files` files. A request takes `seconds`."""

    def __init__(self, max_files: int | None = None, **options: Any) -> None:
        command = [sys.executable, __file__, orjson.dumps(options).decode()]
        shell = ["bash", "-c", f'ulimit -n {max_files}; exec "$@"', "-"] if max_files else []
        self.process = subprocess.Popen([*shell, *command], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def main() -> None:
    from whimbrel.cli.serve import limit_silence, listen
    from whimbrel.server.app.app import create_app
    from whimbrel.server.app.limits import ServerLimits
    from whimbrel.server.app.routing import ModelRegistry, render_error
    from whimbrel.server.http.listener import Server

    options = orjson.loads(sys.argv[1])
    seconds = options.pop("seconds", 0.0)
    guards = replace(ServerLimits(), **options)
    with listen("127.0.0.1", 0) as listener:
        limit_silence(listener, guards.write_pause)

        async def serve() -> None:
            served = ModelRegistry(cast(AsyncEmbedder, FakeEmbedder(seconds)))
            app = create_app(served, guards=guards)
            if app.batches is not None:
                app.batches.store.prepare()
                app.batches.start()
            server = Server(app, listener.fileno(), guards, render_error)
            print(listener.getsockname()[1], flush=True)  # noqa: T201
            await server.serve()

        asyncio.run(serve())


if __name__ == "__main__":
    main()
