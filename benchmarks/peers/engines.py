"""Engines against engines: each peer in a process of its own, rounds in rotating order, and vectors compared first."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from signal import SIGCONT, SIGSTOP, Signals
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np
from common import NUM_CORES, count_tokens, min_cosine, note
from environments import ADAPTERS, REFERENCE, Builder, Peer, PeerFailure, reason_in
from models import MAX_TOKENS
from numpy.typing import NDArray
from workloads import MODELS, Workload

from whimbrel_bench.processes import cpu_seconds

MIN_COSINES: Final = {"float32": 0.98, "bfloat16": 0.98, "its default": 0.98, "int8": 0.9}
"""Limits below which a result counts as wrong, by dtype."""
_START_SECONDS: Final = 600
_ANSWER_SECONDS: Final = 900


class Engine:
    """Process of one peer with one checkpoint. It is stopped while it has nothing to do: some peers wait in a busy loop."""

    def __init__(self, peer: Peer, builder: Builder, folder: Path, workloads: Path) -> None:
        self.peer = peer
        self._log = builder.build / "logs" / f"engine-{folder.name}-{peer.name.replace(' ', '-')}.log"
        options = json.dumps(peer.options | {"threads": NUM_CORES})
        worker = [str(builder.python(peer.environment)), str(ADAPTERS / "worker.py"), peer.adapter, str(folder)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*worker, MODELS[folder.name], options, str(workloads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=builder.variables(peer.environment),
                start_new_session=True,
            )  # fmt: skip
        try:
            self._read(_START_SECONDS)
            self._signal(SIGSTOP)
        except BaseException:  # also Ctrl-C while it loads
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str) -> str:
        """Send a command and return its answer. Raises PeerFailure if the process ends or is silent for too long."""
        assert self._process.stdin is not None
        self._signal(SIGCONT)
        with suppress(BrokenPipeError):  # reading says why
            self._process.stdin.write(f"{command}\n".encode())
            self._process.stdin.flush()
        answer = self._read(_ANSWER_SECONDS)
        self._signal(SIGSTOP)
        return answer

    def _signal(self, number: Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.pid, number)

    def _read(self, seconds: float) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline().decode().strip() if ready else ""
        if line:
            return line
        raise PeerFailure(f"run: {reason_in(self._log)}" if ready else f"run: no answer in {seconds:.0f} s")

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._signal(SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(slots=True)
class Measured:
    """Seconds of one peer with one workload."""

    peer: Peer
    workload: Workload
    tokens: int
    cosine: float | None
    """Smallest cosine to the reference, or for scores their correlation with it."""
    seconds: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    """Processor seconds of the peer's process, which other work on the machine changes less."""
    idle_cores: float = 0.0
    """Most cores that the waiting peers took meanwhile."""

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def is_wrong(self) -> bool:
        return self.cosine is not None and not self.cosine >= MIN_COSINES[self.peer.dtype]


def measure_model(
    folder: Path,
    peers: Sequence[Peer],
    builder: Builder,
    workloads: Sequence[Workload],
    rounds: int,
    *,
    found: list[Measured],
    failures: dict[str, str],
) -> None:
    """Measure the peers with the workloads of one checkpoint.

    Rows are added to `found` and filled round by round, so that an interrupted run keeps its complete part. The reasons of
    peers that fail go to `failures`.
    """
    path = builder.build / f"workloads-{folder.name}.json"
    path.write_text(json.dumps([each.calls for each in workloads]))
    engines: dict[str, Engine] = {}
    try:
        _start(engines, failures, peers, builder, folder, path)
        rows = [_compare(engines, failures, number, each, builder.build) for number, each in enumerate(workloads)]
        found += [row for part in rows for row in part]
        for turn in range(rounds):
            for number, part in enumerate(rows):
                note(f"{folder.name}, {workloads[number].name}: round {turn + 1} of {rounds}")
                _time(engines, failures, number, [*part[turn % len(part) :], *part[: turn % len(part)]] if part else [])
    finally:
        for engine in engines.values():
            engine.stop()


def _start(
    engines: dict[str, Engine], failures: dict[str, str], peers: Sequence[Peer], builder: Builder, folder: Path, workloads: Path
) -> None:
    for peer in peers:
        note(f"{folder.name}: loading {peer.name}")
        try:
            engines[peer.name] = Engine(peer, builder, folder, workloads)
        except PeerFailure as failure:
            failures[f"{peer.name}, {folder.name}"] = str(failure)


def _time(engines: dict[str, Engine], failures: dict[str, str], number: int, rows: Sequence[Measured]) -> None:
    """Time one round of one workload. A peer that fails leaves `engines`."""
    for row in rows:
        if row.peer.name not in engines:
            continue
        others = [each.pid for each in engines.values() if each.peer is not row.peer]
        own, before, started = cpu_seconds(engines[row.peer.name].pid), sum(map(cpu_seconds, others)), perf_counter()
        try:
            row.seconds.append(float(engines[row.peer.name].ask(f"time {number}")))
            row.cpu.append(cpu_seconds(engines[row.peer.name].pid) - own)
        except PeerFailure as failure:
            _drop(engines, failures, row, failure)
            continue
        idle = (sum(map(cpu_seconds, others)) - before) / (perf_counter() - started)
        row.idle_cores = max(row.idle_cores, idle)


def _compare(
    engines: dict[str, Engine], failures: dict[str, str], number: int, workload: Workload, folder: Path
) -> list[Measured]:
    """Warm all peers up, and compare their results with those of the reference, float32 Sentence Transformers."""
    note(f"{workload.model}, {workload.name}: comparing")
    saved: dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]] = {}
    rows: list[Measured] = []
    tokens = count_tokens(workload.texts, MAX_TOKENS)
    for engine in list(engines.values()):
        file, row = folder / f"rows-{os.getpid()}.npz", Measured(engine.peer, workload, tokens, None)
        try:
            engine.ask(f"check {number} {file}")
        except PeerFailure as failure:
            _drop(engines, failures, row, failure)
            continue
        rows.append(row)
        with np.load(file) as arrays:
            saved[engine.peer.name] = arrays["rows"], arrays["sizes"]
        file.unlink()
    reference = saved.get(REFERENCE)
    if reference is not None:
        for row in rows:
            rows_ND, sizes = saved[row.peer.name]
            row.cosine = min_cosine(rows_ND, reference[0]) if np.array_equal(sizes, reference[1]) else float("nan")
    return rows


def _drop(engines: dict[str, Engine], failures: dict[str, str], row: Measured, failure: PeerFailure) -> None:
    failures[f"{row.peer.name}, {row.workload.name}"] = str(failure)
    engines.pop(row.peer.name).stop()
