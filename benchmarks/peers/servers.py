"""Servers against servers: each on its own port, one under load at a time, rounds in rotating order."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from common import MIXED, SHORT, chunks, make_texts, min_cosine, note
from environments import OURS, Builder, Peer, PeerFailure, reason_of

from whimbrel.errors import SetupError, WhimbrelError
from whimbrel_bench.backends import Sample
from whimbrel_bench.processes import cpu_seconds
from whimbrel_bench.results import Result
from whimbrel_bench.server import Serving, running
from whimbrel_bench.target import Load, Target, TargetOptions

_START_SECONDS: Final = 600
SERVED: Final = {"dense": "minilm", "rerank": "cross-encoder"}
"""Checkpoint that servers get for each task."""
_BACKENDS: Final = {"dense": "openai-embeddings", "rerank": "rerank"}


class Work(NamedTuple):
    """Requests, the connections on which they are sent, and the format of the vectors."""

    samples: list[Sample]
    connections: int
    encoding_format: str | None = None


@dataclass(slots=True)
class Served:
    """Rounds of one server with one workload."""

    peer: Peer
    workload: str
    texts: int
    cosine: float | None = None
    rounds: list[Result] = field(default_factory=list[Result])
    cpu: list[float] = field(default_factory=list[float])
    """Processor seconds of the server and its processes in each round."""

    @property
    def median(self) -> float:
        return median(each.duration for each in self.rounds)


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


def make_work(task: str, *, quick: bool) -> dict[str, Work]:
    """Return each workload of a task."""
    if task == "rerank":
        query, documents = make_texts(1, words=(8, 12), seed=4)[0], make_texts(80 if quick else 160, words=MIXED, seed=5)
        samples = [Sample(tuple(each), query) for each in chunks(documents, len(documents) // 8)]
        return {"rerank, 8 connections, one request each": Work(samples, 8)}
    mixed = [Sample(tuple(each)) for each in chunks(make_texts(256 if quick else 512, words=MIXED), 32)]
    short = [Sample((each,)) for each in make_texts(64 if quick else 320, words=SHORT, seed=2)]
    return {
        "8 connections, 32 mixed texts, base64": Work(mixed, 8, "base64"),
        "8 connections, 32 mixed texts, JSON": Work(mixed, 8, "float"),
        "16 connections, one short text": Work(short, 16, "base64"),
    }


def measure_servers(
    task: str,
    folder: Path,
    peers: Sequence[Peer],
    builder: Builder,
    rounds: int,
    *,
    quick: bool,
    found: list[Served],
    failures: dict[str, str],
) -> None:
    """Add the rounds of all servers with one task to `found`, and the reasons of those that fail to `failures`."""
    with ExitStack() as stack:
        servers: dict[str, Serving] = {}
        for peer in peers:
            if task in peer.server.get("paths", ()):
                try:
                    servers[peer.name] = stack.enter_context(started(peer, builder, folder))
                except PeerFailure as failure:
                    failures[f"{peer.name}, server, {task}"] = str(failure)
        for name, work in make_work(task, quick=quick).items():
            note(f"{task}, {name}")
            texts = sum(len(sample.texts) for sample in work.samples)
            rows = [Served(peer, name, texts) for peer in peers if peer.name in servers]
            targets = {row.peer.name: _target(task, row.peer, servers[row.peer.name], work) for row in rows}
            able = _compare(rows, targets, work, failures)
            found += able
            for turn in range(rounds):
                for row in [*able[turn % len(able) :], *able[: turn % len(able)]] if able else []:
                    before = cpu_seconds(servers[row.peer.name].pid)
                    row.rounds.append(run(targets[row.peer.name], work))
                    row.cpu.append(cpu_seconds(servers[row.peer.name].pid) - before)


def _target(task: str, peer: Peer, server: Serving, work: Work) -> Target:
    extra = {"encoding_format": work.encoding_format, "truncate_prompt_tokens": None}
    options = TargetOptions(_BACKENDS[task], peer.server["paths"][task], "model", extra_body=extra)
    return Target(server.url, options, name=peer.name)


def run(target: Target, work: Work, *, keep: bool = False) -> Result:
    """Send all requests once. Raises PeerFailure if one fails."""
    result = target.run(work.samples, Load(concurrency=work.connections, processes=1, keep_bodies=keep))
    if result.failed:
        raise PeerFailure(f"run: {next(filter(None, result.errors))}"[:240])
    return result


def _compare(rows: list[Served], targets: dict[str, Target], work: Work, failures: dict[str, str]) -> list[Served]:
    """Warm all servers up, and compare their answers with those of ours. Return the rows of those that answer."""
    answers: dict[str, np.ndarray] = {}
    for row in rows:
        try:
            found = targets[row.peer.name].rows(run(targets[row.peer.name], work, keep=True))
        except (PeerFailure, WhimbrelError) as failure:
            failures[f"{row.peer.name}, server, {row.workload}"] = str(failure)
        else:
            answers[row.peer.name] = np.stack([each for index in sorted(found) for each in found[index]])
    able = [row for row in rows if row.peer.name in answers]
    for row in able if OURS in answers else ():
        row.cosine = min_cosine(answers[row.peer.name], answers[OURS])
    return able
