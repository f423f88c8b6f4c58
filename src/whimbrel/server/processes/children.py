"""Child processes of the supervisor: start, messages, end, and the backoff between two lives. Policy is the supervisor's."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from whimbrel.errors import SetupError
from whimbrel.server.processes import bootstrap
from whimbrel.server.processes.channel import AsyncChannel, ProtocolError, close_fds, pair
from whimbrel.server.processes.messages import EngineDown, Planned, ReportEngine, ReportWorker
from whimbrel.server.processes.shared_memory import StatusBoard
from whimbrel.server.settings_table import KEY_VARIABLE, PASSWORD_VARIABLE
from whimbrel.telemetry import metrics

_EOF_GRACE_SECONDS: Final = 1.0

_STABLE_SECONDS: Final = 30.0
"""Seconds of life after which earlier deaths are forgotten."""
_FREE_DEATHS: Final = 10
_FREE_LOADS: Final = 1
_FIRST_SECONDS: Final = 0.5
_MAX_SECONDS: Final = 30.0
_FAILING_DEATHS: Final = 14
_FAILING_LOADS: Final = 3
_HUB_TOKENS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Variables that huggingface_hub reads. Only engines download."""


class Backoff:
    """The delay before a process that died is started again. Pure.

    The search for a text that crashes engines takes several deaths in quick succession, so the first deaths after the process
    was ready cost no delay. A process that dies before it is ready, or keeps dying, waits longer each time.
    """

    def __init__(self) -> None:
        self._deaths = 0
        self._failed_loads = 0

    @property
    def failing(self) -> bool:
        """True if the process has died so often that no request should wait for it."""
        return self._deaths >= _FAILING_DEATHS or self._failed_loads >= _FAILING_LOADS

    def ready(self) -> None:
        self._failed_loads = 0

    def explained(self) -> None:
        """Forget the deaths, as a text that is refused now caused them."""
        self._deaths = 0

    def died(self, *, lived: float | None) -> float:
        """Record a death `lived` seconds after the process was ready, or before (None). Return the seconds to wait."""
        if lived is None:
            self._failed_loads += 1
            beyond = self._failed_loads - _FREE_LOADS
        else:
            self._deaths = 1 if lived > _STABLE_SECONDS else self._deaths + 1
            beyond = self._deaths - _FREE_DEATHS
        return min(_MAX_SECONDS, _FIRST_SECONDS * 2 ** min(beyond - 1, 16)) if beyond > 0 else 0.0


@dataclass(slots=True, eq=False)
class Child:
    """A child process over all its lives, and the state of the present one."""

    kind: ClassVar[str]
    reports: ClassVar[Any]
    """Union of the messages that the process sends."""
    hidden: ClassVar[Collection[str]] = (KEY_VARIABLE, PASSWORD_VARIABLE)
    """Variables of the supervisor's environment that the process does not get."""

    name: str
    backoff: Backoff = field(default_factory=Backoff)
    process: Process | None = None
    channel: AsyncChannel[Any] | None = None
    eof: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the end of the channel, when all its messages are handled."""
    ready: bool = False
    ready_since: float = 0.0
    kill_reason: str | None = None
    error: SetupError | None = None

    async def start(self, metrics_folder: Path, on_message: Callable[[Any], None], *, secrets: Collection[str]) -> None:
        """Begin a life. Raises OSError. Its environment does not hold the `secrets`."""
        self.kill_reason = self.error = None
        self.ready = False
        self.eof.clear()
        optimize = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
        command = [sys.executable, *optimize, "-P", "-m", bootstrap.__name__, self.kind, str(os.getpid())]
        ours, theirs = pair()
        with theirs:
            fd = theirs.fileno()
            own = {bootstrap.CONTROL_FD: str(fd), metrics.DIRECTORY: str(metrics_folder)}
            public = {
                name: value for name, value in os.environ.items() if name not in self.hidden and value.strip() not in secrets
            }
            try:
                self.process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, pass_fds=[fd], env=public | own)
            except OSError:
                ours.close()
                raise
        self.channel = AsyncChannel[Any](ours, self.reports, on_message=on_message, on_end=self._on_end)

    async def wait(self) -> int:
        """Wait until the process has ended and its messages are handled. Return the exit code, negative for a signal."""
        assert self.process is not None
        code = await self.process.wait()
        try:
            await asyncio.wait_for(self.eof.wait(), _EOF_GRACE_SECONDS)
        except TimeoutError:  # a process that it started holds its end of the channel
            if self.channel is not None:
                self.channel.close()
        self.channel = None
        return code

    def send(self, message: msgspec.Struct, *fds: int) -> None:
        """Send a message with descriptors, which are closed then. Without a channel it is dropped."""
        if self.channel is not None:
            self.channel.send(message, fds)
        else:
            close_fds(fds)

    def kill(self, reason: str | None = None) -> None:
        if self.process is not None and self.process.returncode is None:
            self.kill_reason = reason
            self.process.kill()

    def _on_end(self, error: ProtocolError | None) -> None:
        self.channel = None
        self.eof.set()
        if error is not None:
            self.kill(f"it sent what cannot be read ({error})")


@dataclass(slots=True, eq=False)
class EngineChild(Child):
    kind: ClassVar[str] = "engine"
    reports: ClassVar[Any] = ReportEngine

    model: int = 0
    replica: int = 0
    planned: Planned | None = None
    board: StatusBoard | None = None
    board_fd: int = -1
    last_down: EngineDown | None = None
    started_at: float = 0.0
    load_seconds: float = 5.0

    @property
    def served_name(self) -> str:
        return self.planned.plan.served_name if self.planned is not None else ""


@dataclass(slots=True, eq=False)
class WorkerChild(Child):
    kind: ClassVar[str] = "worker"
    reports: ClassVar[Any] = ReportWorker
    hidden: ClassVar[Collection[str]] = (KEY_VARIABLE, PASSWORD_VARIABLE, *_HUB_TOKENS)

    index: int = 0
    last_message: float = 0.0
    """Time of its last message, or of its start."""
    drained: bool = False
    connected: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Model and replica of the engines to which it sends requests."""


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"it was killed by {names.get(-code, f'signal {-code}')}"
