"""A server that a benchmark starts for itself, on a free port of this machine, and its metrics."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Final

import httpx2
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from whimbrel.errors import SetupError
from whimbrel_bench.processes import family, read_file

_POLL: Final = 0.1
_PATIENCE: Final = 60.0
"""Seconds in which a server must end."""
_LOG_LINES: Final = 12
_MANY_CONNECTIONS: Final = "8192"
"""Limit of the server for loads that send all requests at once."""


@dataclass(frozen=True)
class Serving:
    """Running server. It leads its own session, and its temporary files are in `folder`."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    _log: IO[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """Return the log so far."""
        return os.pread(self._log.fileno(), 2**26, 0).decode(errors="replace")

    def is_ready(self, path: str = "/health/ready") -> bool:
        with suppress(httpx2.HTTPError):
            return httpx2.get(self.url + path, timeout=5, trust_env=False).status_code == 200
        return False

    def engines(self) -> list[int]:
        """Return the engine processes."""
        return [pid for pid in family(self.pid) if "whimbrel.server.processes.bootstrap\0engine" in read_file(pid, "cmdline")]

    def metrics(self) -> list[Metric]:
        """Return the body of /metrics."""
        answer = httpx2.get(f"{self.url}/metrics", timeout=60, trust_env=False)
        return list(text_string_to_metric_families(answer.raise_for_status().text))

    def stop(self) -> int:
        """Stop the server and its processes, wait, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def total(metrics: Sequence[Metric], name: str, **labels: str) -> float:
    """Return the sum of the samples of a metric that have these labels, or 0 without samples."""
    samples = (sample for metric in metrics for sample in metric.samples if sample.name == name)
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


@contextmanager
def running(
    command: Callable[[int], Sequence[str]], variables: Mapping[str, str], *, ready: str, seconds: float = 1800.0
) -> Generator[Serving]:
    """Run the command for a port, and yield the server once it is ready. Raises SetupError with the end of its log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: S603
            command(port), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **variables, "TMPDIR": folder},
        )  # fmt: skip
        server = Serving(process, port, Path(folder), log)
        try:
            _wait(server, ready, monotonic() + seconds)
            yield server
        finally:
            with suppress(subprocess.TimeoutExpired):
                server.stop()


def _wait(server: Serving, ready: str, deadline: float) -> None:
    while not server.is_ready(ready):
        end = "\n".join(server.log.rstrip().splitlines()[-_LOG_LINES:])
        if (code := server.process.poll()) is not None:
            raise SetupError(f"the server ended with exit code {code}.\n{end}")
        if monotonic() > deadline:
            raise SetupError(f"the server is not ready in time.\n{end}")
        sleep(_POLL)


@contextmanager
def serving(model: str | None, *arguments: str) -> Generator[Serving]:
    """Run `whimbrel serve` with a model and further arguments; None is the packaged model. Raises SetupError."""
    command = [sys.executable, "-m", "whimbrel", "serve", *([model] if model else [])]
    limits = {"WHIMBREL_MAX_CONNECTIONS": os.environ.get("WHIMBREL_MAX_CONNECTIONS", _MANY_CONNECTIONS)}
    with running(lambda port: [*command, "--port", str(port), *arguments], limits, ready="/health/ready") as server:
        yield server
