"""Engines of peers, each in a process of its own with one checkpoint."""

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from select import select
from signal import SIGCONT, SIGSTOP, Signals
from typing import Final

import numpy as np
from common import NUM_CORES, count_tokens, note
from environments import ADAPTERS, REFERENCE, Builder, Peer, reason_of
from measure import Round, Rows, Run, measure
from models import MAX_TOKENS
from workloads import MODELS, Workload

from whimbrel.errors import WhimbrelError

_START_SECONDS: Final = 600
_ANSWER_SECONDS: Final = 900


class Engine:
    """Process of one peer with one checkpoint. It is stopped while it has nothing to do: some peers wait in a busy loop."""

    def __init__(self, peer: Peer, builder: Builder, folder: Path, workloads: Path) -> None:
        self.peer = peer
        self._log = builder.build / "logs" / f"engine-{folder.name}-{peer.name.replace(' ', '-')}.log"
        self._rows = builder.build / f"rows-{os.getpid()}.npz"
        options = json.dumps(peer.options | {"threads": NUM_CORES})
        worker = [str(builder.python(peer.environment)), str(ADAPTERS / "worker.py"), peer.adapter, str(folder)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*worker, MODELS[folder.name], options, str(workloads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=builder.variables(peer.environment),
                start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        try:
            self._read(_START_SECONDS)
            self._signal(SIGSTOP)
        except BaseException:  # also Ctrl-C while it loads
            self.stop()
            raise

    def check(self, number: int) -> Rows:
        self._ask(f"check {number} {self._rows}")
        with np.load(self._rows) as arrays:
            found = Rows(arrays["rows"], arrays["sizes"])
        self._rows.unlink()
        return found

    def time(self, number: int) -> Round:
        return Round(float(self._ask(f"time {number}")))

    def _ask(self, command: str) -> str:
        """Send a command and return its answer. Raises WhimbrelError if the process ends or is silent for too long."""
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
        reason = reason_of(self._log.read_text(errors="replace")) if ready else f"no answer in {seconds:.0f} s"
        raise WhimbrelError(f"run: {reason}")

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


def measure_engines(run: Run, folder: Path, peers: Sequence[Peer], workloads: Sequence[Workload]) -> None:
    """Measure the peers with the workloads of one checkpoint. The reference is Sentence Transformers in float32."""
    path = run.builder.build / f"workloads-{folder.name}.json"
    path.write_text(json.dumps([each.calls for each in workloads]))
    engines: list[Engine] = []
    try:
        for peer in peers:
            note(f"{folder.name}: loading {peer.name}")
            with run.noting(f"{peer.name}, {folder.name}"):
                engines.append(Engine(peer, run.builder, folder, path))
        works = [(each.name, each.model, count_tokens(each.texts, MAX_TOKENS)) for each in workloads]
        measure(run, "engines", engines, works, reference=REFERENCE)
    finally:
        for engine in engines:
            engine.stop()
