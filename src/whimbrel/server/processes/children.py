"""The supervisor's child processes: how one is started, spoken to, and ended. Policy is the supervisor's."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from whimbrel.server.processes.backoff import Backoff
from whimbrel.server.processes.channel import AsyncChannel, ProtocolError, pair
from whimbrel.server.processes.child_process import CONTROL_FD
from whimbrel.server.processes.messages import CannotStart, EngineDown, Planned
from whimbrel.server.processes.shared_memory import StatusBoard
from whimbrel.telemetry import metrics

_EOF_GRACE_SECONDS: Final = 1.0


@dataclass(slots=True, eq=False)
class Child:
    """A process that is ours, over all its lives, and what is known of the present one."""

    kind: ClassVar[str]

    name: str
    backoff: Backoff = field(default_factory=Backoff)
    process: Process | None = None
    channel: AsyncChannel[Any] | None = None
    eof: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the line has ended: it has said all that it will say."""
    ready: bool = False
    ready_since: float = 0.0
    killed_for: str | None = None
    error: CannotStart | None = None

    async def start(self, kind: Any, metrics_folder: Path, on_message: Callable[[Any], None]) -> None:
        """Begin a life; `kind` is the union of the messages that it sends. Raises OSError."""
        self.killed_for = self.error = None
        self.ready = False
        self.eof.clear()
        optimize = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
        ours, theirs = pair()
        with theirs:
            environment = os.environ | {CONTROL_FD: str(theirs.fileno()), metrics.DIRECTORY: str(metrics_folder)}
            command = [
                sys.executable,
                *optimize,
                "-P",
                "-m",
                "whimbrel.server.processes.bootstrap",
                self.kind,
                str(os.getpid()),
            ]
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *command, stdin=DEVNULL, pass_fds=[theirs.fileno()], env=environment
                )
            except OSError:
                ours.close()
                raise
        self.channel = AsyncChannel[Any](ours, kind, on_message=on_message, on_end=self._line_ended)

    async def ended(self) -> int:
        """Wait for the end of a life and its last words. Returns the exit code, negative for a signal."""
        assert self.process is not None
        code = await self.process.wait()
        try:
            await asyncio.wait_for(self.eof.wait(), _EOF_GRACE_SECONDS)
        except TimeoutError:  # something that it started holds its end of the line
            if self.channel is not None:
                self.channel.close()
        self.channel = None
        return code

    def send(self, message: msgspec.Struct, *fds: int) -> None:
        """Say something, with descriptors that are closed then; nothing happens if it is not there."""
        if self.channel is not None:
            self.channel.send(message, fds)
        else:
            for fd in fds:
                os.close(fd)

    def kill(self, reason: str | None = None) -> None:
        """End its life at once."""
        if self.process is not None and self.process.returncode is None:
            self.killed_for = reason
            self.process.kill()

    def _line_ended(self, error: ProtocolError | None) -> None:
        self.channel = None
        self.eof.set()
        if error is not None:
            self.kill(f"it sent what cannot be read ({error})")


@dataclass(slots=True, eq=False)
class EngineChild(Child):
    """An engine process."""

    kind: ClassVar[str] = "engine"

    model: int = 0
    replica: int = 0
    planned: Planned | None = None
    board: StatusBoard | None = None
    board_fd: int = -1
    board_bytes: int = 0
    last_down: EngineDown | None = None
    begun: float = 0.0
    load_seconds: float = 5.0
    """Seconds that loading took the last time."""

    @property
    def served_name(self) -> str:
        return self.planned.plan.served_name if self.planned is not None else ""


@dataclass(slots=True, eq=False)
class WorkerChild(Child):
    """An HTTP worker."""

    kind: ClassVar[str] = "worker"

    index: int = 0
    heard: float = 0.0
    drained: bool = False


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"
