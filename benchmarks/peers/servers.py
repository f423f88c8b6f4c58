"""Servers of peers, each on its own port, under load."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from common import SHORT, chunks, make_texts, note
from environments import OURS, Builder, Peer, reason_of
from measure import Round, Rows, Run, measure

from whimbrel.errors import SetupError, WhimbrelError
from whimbrel_bench.backends import Sample
from whimbrel_bench.server import Serving, running
from whimbrel_bench.target import Load, Target, TargetOptions

_START_SECONDS: Final = 600
SERVED: Final = {"dense": "minilm", "rerank": "cross-encoder"}
"""Checkpoint that servers get for each task."""


class Work(NamedTuple):
    """Requests of a round, the connections on which they are sent, and the format of the vectors."""

    samples: Sequence[Sample]
    connections: int
    backend: str
    encoding_format: str | None = None


class Server:
    """Server of one peer with its workloads."""

    def __init__(self, peer: Peer, server: Serving, path: str, works: Sequence[Work]) -> None:
        self.peer = peer
        self.pid = server.pid
        self._works: list[tuple[Work, Target]] = []
        for work in works:
            extra = {"truncate_prompt_tokens": None, "encoding_format": work.encoding_format}
            options = TargetOptions(work.backend, path, "model", extra_body=extra)
            self._works.append((work, Target(server.url, options, name=peer.name)))

    def check(self, number: int) -> Rows:
        work, target = self._works[number]
        result = target.run(work.samples, Load(concurrency=work.connections, processes=1, keep_bodies=True)).all_answered()
        rows = np.stack([row for _, answer in sorted(target.rows(result).items()) for row in answer])
        return Rows(rows, np.ones(len(rows), np.int64))

    def time(self, number: int) -> Round:
        work, target = self._works[number]
        result = target.run(work.samples, Load(concurrency=work.connections, processes=1)).all_answered()
        return Round(result.duration, result.latencies.tolist(), result.client.busiest)

    def stop(self) -> None:
        """Leave the server to `started`."""


@contextmanager
def started(peer: Peer, builder: Builder, folder: Path) -> Generator[Serving]:
    """Run the server of a peer. Raises WhimbrelError."""
    note(f"starting the server {peer.name}")
    python = builder.python(peer.environment)
    places = {"python": python, "bin": python.parent, "model": folder}

    def command(port: int) -> list[str]:
        return [part.format(**places, port=port) for part in peer.server["command"]]

    variables = builder.variables(peer.environment)
    try:
        with running(command, variables, ready=peer.server["ready"], seconds=_START_SECONDS) as server:
            yield server
    except SetupError as error:
        raise WhimbrelError(f"start: {reason_of(error.message)}") from error


def make_works(task: str, *, quick: bool) -> dict[str, Work]:
    """Return the workloads of a task."""
    if task == "rerank":
        query, documents = make_texts(1, words=(8, 12), seed=4)[0], make_texts(80 if quick else 160, seed=5)
        samples = [Sample(tuple(each), query) for each in chunks(documents, len(documents) // 8)]
        return {"rerank, 8 connections, one request each": Work(samples, 8, "rerank")}
    mixed = [Sample(tuple(each)) for each in chunks(make_texts(256 if quick else 512), 32)]
    short = [Sample((each,)) for each in make_texts(64 if quick else 320, words=SHORT, seed=2)]
    return {
        "8 connections, 32 mixed texts, base64": Work(mixed, 8, "openai-embeddings", "base64"),
        "8 connections, 32 mixed texts, JSON": Work(mixed, 8, "openai-embeddings", "float"),
        "16 connections, one short text": Work(short, 16, "openai-embeddings", "base64"),
    }


def measure_servers(run: Run, task: str, folder: Path, peers: Sequence[Peer]) -> None:
    """Measure all servers with one task. The reference is ours."""
    works = make_works(task, quick=run.quick)
    with ExitStack() as stack:
        servers: list[Server] = []
        for peer in peers:
            if path := peer.server.get("paths", {}).get(task):
                with run.noting(f"{peer.name}, server, {task}"):
                    server = stack.enter_context(started(peer, run.builder, folder))
                    servers.append(Server(peer, server, path, list(works.values())))
        sizes = [(name, folder.name, sum(len(sample.texts) for sample in work.samples)) for name, work in works.items()]
        measure(run, "servers", servers, sizes, reference=OURS)
