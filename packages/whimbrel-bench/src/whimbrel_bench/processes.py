"""Processes of a benchmark: workers of its own, and the processor time and memory of others, from /proc of Linux."""

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, Final

from whimbrel.errors import WhimbrelError

_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Worker:
    """Process that calls `make(*args)` once, and the returned function once per `ask`.

    `make` must be a top-level function of a module. The process ends with its parent, which alone heeds Ctrl-C.
    """

    def __init__(self, make: Callable[..., Callable[[Any], Any]], *args: Any) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, make, args), daemon=True)
        start_deaf(self._process)
        theirs.close()

    def ask(self, message: Any = None) -> Any:
        """Call the function with `message` and wait. Raises its WhimbrelError, or one if the process died."""
        try:
            self._pipe.send(message)
            answer = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join()
            raise WhimbrelError(f"a process died (exit code {self._process.exitcode}), perhaps for want of memory.") from None
        if isinstance(answer, WhimbrelError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process at once."""
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def start_deaf(process: Any) -> None:
    """Start a spawned process that never hears Ctrl-C, also while its interpreter starts: its parent heeds it, afterwards."""
    ensure_running()  # it would unblock the signal
    with _later(signal.SIGINT):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # the process inherits this
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _later(number: signal.Signals) -> Generator[None]:
    """Handle a signal that another thread receives meanwhile at the end, where only the main thread would be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = threading.Event()

    def remember(_number: int, _frame: FrameType | None) -> None:
        received.set()

    handler = signal.signal(number, remember)
    try:
        yield
    finally:
        signal.signal(number, handler)
        if received.is_set():
            signal.raise_signal(number)


def _work(pipe: Connection, make: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...]) -> None:
    try:
        function = make(*args)
        while True:
            pipe.send(function(pipe.recv()))
    except WhimbrelError as error:
        pipe.send(error)
    except EOFError:  # the parent has ended
        return


def read_file(pid: int, name: str) -> str:
    """Return the contents of a file of a process in /proc, or "" if the process has just ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    tasks = (path.name for path in Path(f"/proc/{pid}/task").glob("*"))
    children = [int(child) for task in tasks for child in read_file(pid, f"task/{task}/children").split()]
    return [pid, *(each for child in children for each in family(child))]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, including those that ended."""
    stats = [read_file(i, "stat").rpartition(")")[2].split() for i in family(pid)]
    return sum(int(ticks) for stat in stats for ticks in stat[11:15]) / _TICKS


def mebibytes(pid: int, file: str, name: str) -> float:
    """Return the sum of a line of /proc/PID/FILE over a process and its descendants: VmHWM of status, Pss of smaps_rollup."""
    lines = [line for i in family(pid) for line in read_file(i, file).splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def _others_seconds() -> float:
    """Return the processor time of the machine outside this process and its descendants."""
    user, nice, system, _idle, _iowait, *more = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(more)) / _TICKS - cpu_seconds(os.getpid())


_AT_START: Final = perf_counter(), _others_seconds() if Path("/proc/stat").exists() else 0.0


def others_cores() -> float:
    """Return the cores that other work has taken on average since this process started."""
    return (_others_seconds() - _AT_START[1]) / (perf_counter() - _AT_START[0])
