"""A real server in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Server:
    """`python -m whimbrel serve --port 0 ...`; `url` once it answers."""

    def __init__(
        self, *args: str, wait: bool = True, start_new_session: bool = False, preexec_fn: Any = None, **env: str
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "whimbrel", "serve", "--port", "0", *args],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | env,
            start_new_session=start_new_session,
            preexec_fn=preexec_fn,  # noqa: PLW1509
        )
        assert self.process.stderr is not None
        self.log = ""
        for line in self.process.stderr if wait else ():
            self.log += line
            if line.startswith("print(") or re.match("curl .*/v1/(embed|rerank) ", line):  # the banner's last line
                break
        else:
            assert not wait, f"the server did not start:\n{self.log}"
        if wait:
            self.url = re.search(r"URL\s+(\S+)", self.log)[1]  # pyright: ignore[reportOptionalSubscript]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def children(self, kind: str = "") -> list[int]:
        """Process ids of its engines or workers, or of both."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = sorted(int(pid) for task in tasks for pid in _text(task).split())
        program = f"whimbrel.server.processes.bootstrap\0{kind}"
        return [pid for pid in pids if program in _text(Path(f"/proc/{pid}/cmdline"))]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def stop(self, name: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(name)
        code = self.process.wait(30)
        self._reader.join(5)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stderr is not None
        self._reader.join(5)
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line


def _text(file: Path) -> str:
    """Return the text of a file of a process or a thread, empty if that has just ended."""
    try:
        return file.read_text()
    except OSError:
        return ""
