"""Child processes of the supervisor: start, messages, end, the backoff between two lives, and the watchdog of those that hang.

An engine hangs if its status board stands still, if a batch takes too long, or if it does not load again. A worker hangs if its
event loop does not turn. If the watchdog itself stood still, as the machine slept, all have time to recover. Policy is the
supervisor's.
"""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Final

import msgspec

from whimbrel.errors import SetupError
from whimbrel.server.processes import bootstrap
from whimbrel.server.processes.channel import AsyncChannel, ProtocolError, close_fds, pair
from whimbrel.server.processes.child_process import CONTROL_FD
from whimbrel.server.processes.messages import EngineDown, Planned, ReportEngine, ReportWorker
from whimbrel.server.processes.shared_memory import StatusBoard
from whimbrel.server.settings_table import KEY_VARIABLE, PASSWORD_VARIABLE
from whimbrel.telemetry import metrics

_log = logging.getLogger("whimbrel")

TICK_SECONDS: Final = 0.25
_SILENCE_SECONDS: Final = 20.0
"""Seconds without a sign of life after which a process counts as hung; fewer for an engine with a shorter `step_seconds`."""
_MIN_SILENCE_SECONDS: Final = 5.0
_LOAD_SECONDS: Final = 60.0
"""Seconds that a worker may take to start, and an engine to load again, unless ten times its last load is more."""
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
"""Variables that huggingface_hub reads. Workers download nothing."""


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
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if it is not started again: an engine whose model is unloaded, or could not be loaded."""
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
            own = {CONTROL_FD: str(fd), metrics.DIRECTORY: str(metrics_folder)}
            public = {
                name: value for name, value in os.environ.items() if name not in self.hidden and value.strip() not in secrets
            }
            try:
                self.process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, pass_fds=[fd], env=public | own)
            except BaseException:
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
    life: asyncio.Task[None] | None = None
    """All its lives until it is unloaded."""
    memory: int = 0
    """Bytes on its device that it takes, or is about to take; 0: it is not loaded."""
    measured: int = 0
    """Bytes that it took when it was loaded last; 0: never."""
    device_bytes: int = 0
    """Bytes on a GPU that it has reported."""

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
    prepared: set[int] = field(default_factory=set[int])
    """Models whose tokenizers it has."""
    connected: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Model and replica of the engines to which it sends requests."""


class Watchdog:
    """Watchdog of all children. Call `tick` every `TICK_SECONDS`, and then `hang_reason` for every child."""

    def __init__(self, step_seconds: float) -> None:
        """A batch hangs if it takes longer than `step_seconds`, and ten times longer than at the measured throughput."""
        self._step_seconds = step_seconds
        self._silence = min(_SILENCE_SECONDS, max(_MIN_SILENCE_SECONDS, step_seconds))
        self._now = perf_counter()
        self._pardon_until = 0.0

    def tick(self) -> None:
        before, self._now = self._now, perf_counter()
        if self._now - before > 8 * TICK_SECONDS:
            _log.warning("the supervisor has stood still for %.1f s", self._now - before)
            self._pardon_until = self._now + _SILENCE_SECONDS

    def hang_reason(self, child: EngineChild | WorkerChild) -> str | None:
        """Return the reason why a child counts as hung, or None."""
        if self._now < self._pardon_until or child.process is None or child.process.returncode is not None:
            return None
        if isinstance(child, WorkerChild):
            limit = _SILENCE_SECONDS if child.ready else _LOAD_SECONDS
            return f"it stood still for {limit:.0f} s" if self._now - child.last_message > limit else None
        if child.ready:
            return self._engine_hang_reason(child)
        limit = max(_LOAD_SECONDS, 10 * child.load_seconds)
        loads_again = child.ready_since > 0.0  # the first load may take any time: it may download, and its progress is shown
        return f"it has been loading for {limit:.0f} s" if loads_again and self._now - child.started_at > limit else None

    def _engine_hang_reason(self, engine: EngineChild) -> str | None:
        board = engine.board
        if board is None or self._now - engine.ready_since < TICK_SECONDS:
            return None
        if self._now - max(board.last_beat, engine.ready_since) > self._silence:
            return f"it stood still for {self._silence:.0f} s"
        for batch in board.in_flight():
            lanes = engine.planned.plan.num_lanes if engine.planned is not None else 1
            expected = batch.num_tokens * lanes / board.rate if board.rate else 0.0  # the rate is that of all lanes
            limit = max(self._step_seconds, 10 * expected)
            if self._now - batch.started > limit:
                return f"a batch of {batch.num_tokens:,} tokens took longer than {limit:.0f} s"
        return None


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"it was killed by {names.get(-code, f'signal {-code}')}"
