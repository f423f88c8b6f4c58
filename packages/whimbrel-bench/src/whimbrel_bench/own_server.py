"""A server that a benchmark starts for itself: `whimbrel serve` on a free port of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import IO, Final

import httpx2

from whimbrel.errors import SetupError

_POLL: Final = 0.2
_LOG_LINES: Final = 12
_MANY_CONNECTIONS: Final = "8192"
"""Limit of the server for loads that send all requests at once."""


@contextmanager
def own_server(
    model: str | None, arguments: Sequence[str] = (), *, seconds: float = 1800.0, say: Callable[[str], None] | None = None
) -> Generator[str]:
    """Run `whimbrel serve` with a model, and yield its URL once it is ready. Raises SetupError with the end of its log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "whimbrel", "serve", *([model] if model else []), "--port", str(port), *arguments]
    if say is not None:
        say("$ " + " ".join(["whimbrel", *command[3:]]))
    environment = {"WHIMBREL_MAX_CONNECTIONS": _MANY_CONNECTIONS} | os.environ
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: S603
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}", log, seconds)
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: IO[bytes], seconds: float) -> None:
    deadline = monotonic() + seconds
    with httpx2.Client(timeout=5, trust_env=False) as client:
        while True:
            try:
                if client.get(f"{url}/health/ready").status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            if (code := process.poll()) is not None:
                raise SetupError(f"the server ended with exit code {code}.\n{_end_of(log)}")
            if monotonic() > deadline:
                raise SetupError(f"the server is not ready after {seconds:g} s.\n{_end_of(log)}")
            sleep(_POLL)


def _end_of(log: IO[bytes]) -> str:
    text = os.pread(log.fileno(), 2**20, 0).decode("utf-8", "replace")
    return "\n".join(text.rstrip().splitlines()[-_LOG_LINES:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
