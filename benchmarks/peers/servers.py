"""Servers of peers, each on its own port, under load."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from common import MIXED, SHORT, chunks, make_texts, note
from environments import OURS, Builder, Peer, PeerFailure, reason_of
from measure import Measured, Round, Rows, measure

from whimbrel.errors import SetupError
from whimbrel_bench.backends import Sample
from whimbrel_bench.results import Result
from whimbrel_bench.server import Serving, running
from whimbrel_bench.target import Load, Target, TargetOptions

_START_SECONDS: Final = 600
SERVED: Final = {"dense": "minilm", "rerank": "cross-encoder"}
"""Checkpoint that servers get for each task."""


class Work(NamedTuple):
    """Requests of a round, and the connections on which they are sent."""

    rounds: Sequence[Sequence[Sample]]
    """Requests of each round, the first of which is compared; they are repeated."""
    connections: int
    backend: str
    path: str | None = None
    extra: Mapping[str, Any] = {}
    """Further fields of the bodies."""
    decode: Callable[[np.ndarray], np.ndarray] = np.asarray
    """Rows to compare of those that the server gives."""


class Server:
    """Server of one peer with its workloads."""

    def __init__(self, peer: Peer, server: Serving, works: Sequence[Work]) -> None:
        self.peer = peer
        self.pid = server.pid
        self._works = works
        self._url = server.url
        self._turns = [0] * len(works)

    def _run(self, number: int, *, keep_bodies: bool) -> tuple[Target, Result]:
        work, turn = self._works[number], self._turns[number]
        self._turns[number] += 1
        extra = {"truncate_prompt_tokens": None, **work.extra}
        target = Target(self._url, TargetOptions(work.backend, work.path, "model", extra_body=extra), name=self.peer.name)
        load = Load(concurrency=work.connections, processes=1, keep_bodies=keep_bodies)
        return target, target.run(work.rounds[turn % len(work.rounds)], load).all_answered()

    def check(self, number: int) -> Rows:
        target, result = self._run(number, keep_bodies=True)
        rows = [np.atleast_2d(row) for _, answer in sorted(target.rows(result).items()) for row in answer]
        return Rows(self._works[number].decode(np.concatenate(rows)), np.array([len(each) for each in rows]))

    def time(self, number: int) -> Round:
        _, result = self._run(number, keep_bodies=False)
        return Round(result.duration, result.latencies.tolist(), result.client.busiest)

    def stop(self) -> None:
        """Leave the server to `started`."""


@contextmanager
def started(peer: Peer, builder: Builder, folder: Path) -> Generator[Serving]:
    """Run the server of a peer. Raises PeerFailure."""
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
        raise PeerFailure(f"start: {reason_of(error.message)}") from error


def make_work(task: str, path: str, *, quick: bool) -> dict[str, Work]:
    """Return each workload of a task."""
    if task == "rerank":
        query, documents = make_texts(1, words=(8, 12), seed=4)[0], make_texts(80 if quick else 160, words=MIXED, seed=5)
        samples = [Sample(tuple(each), query) for each in chunks(documents, len(documents) // 8)]
        return {"rerank, 8 connections, one request each": Work([samples], 8, "rerank", path)}
    mixed = [Sample(tuple(each)) for each in chunks(make_texts(256 if quick else 512, words=MIXED), 32)]
    short = [Sample((each,)) for each in make_texts(64 if quick else 320, words=SHORT, seed=2)]
    rows = (
        ("8 connections, 32 mixed texts, base64", mixed, 8, "base64"),
        ("8 connections, 32 mixed texts, JSON", mixed, 8, "float"),
        ("16 connections, one short text", short, 16, "base64"),
    )
    return {
        name: Work([samples], connections, "openai-embeddings", path, {"encoding_format": encoding})
        for name, samples, connections, encoding in rows
    }


def measure_servers(
    task: str,
    folder: Path,
    peers: Sequence[Peer],
    builder: Builder,
    rounds: int,
    *,
    quick: bool,
    found: list[Measured],
    failures: dict[str, str],
) -> None:
    """Measure all servers with one task. The reference is ours."""
    with ExitStack() as stack:
        servers: list[Server] = []
        works = make_work(task, "", quick=quick)
        for peer in peers:
            if task in peer.server.get("paths", ()):
                own = make_work(task, peer.server["paths"][task], quick=quick)
                try:
                    servers.append(Server(peer, stack.enter_context(started(peer, builder, folder)), list(own.values())))
                except PeerFailure as failure:
                    failures[f"{peer.name}, server, {task}"] = str(failure)
        sizes = [(name, folder.name, sum(len(each.texts) for each in work.rounds[0])) for name, work in works.items()]
        measure(servers, sizes, rounds, reference=OURS, found=found, failures=failures)
