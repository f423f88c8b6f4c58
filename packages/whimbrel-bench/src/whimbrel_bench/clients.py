"""Client processes of a load, started at the same moment, and their reports.

Ctrl-C reaches the parent alone. It stops the processes and returns what they have so far. A process ends with its parent.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, isfinite
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any, Final, cast

from whimbrel.errors import WhimbrelError
from whimbrel.types.machine_limits import usable_processors
from whimbrel_bench.load import Driver, Job, Report

Progress = Callable[[int, int], None]
"""Called with the numbers of requests that have ended and that have failed, of all processes."""

_RATE_PER_PROCESS: Final = 2000
"""Requests per second that one process sends without being late."""
_CONNECTIONS_PER_PROCESS: Final = 1024
_HEAD_START: Final = 0.05
_PATIENCE: Final = 10.0
"""Seconds in which a process must report after it was stopped."""


def choose_processes(rate: float, concurrency: int | None, num_requests: int) -> int:
    """Return the number of client processes for a load, at most half of the processors."""
    wanted = (
        ceil(rate / _RATE_PER_PROCESS) if isfinite(rate) else ceil((concurrency or num_requests) / _CONNECTIONS_PER_PROCESS)
    )
    return max(1, min(wanted, usable_processors() // 2, num_requests))


@dataclass(frozen=True)
class _Worker:
    """A client process, seen from the parent."""

    process: Any
    commands: Connection
    reports: Connection
    """The other way: an event loop makes the end that it watches non-blocking, and a report must not be cut off."""

    def receive(self) -> Any:
        try:
            return self.reports.recv()
        except (EOFError, OSError):
            self.process.join(_PATIENCE)
            raise WhimbrelError(f"a client process died (exit code {self.process.exitcode}).") from None

    def tell(self, message: object) -> None:
        with suppress(OSError):
            self.commands.send(message)

    def close(self) -> None:
        self.commands.close()
        self.process.join(_PATIENCE)
        self.reports.close()


def run_load(job: Job, *, processes: int = 1, progress: Progress | None = None) -> list[Report]:
    """Run a job in client processes and return their reports. Indices are those of the job's payloads. Raises WhimbrelError."""
    processes = min(processes, len(job.payloads), job.concurrency or processes)
    parts = [list(range(number, len(job.payloads), processes)) for number in range(processes)]
    workers: list[_Worker] = []
    try:
        for number, part in enumerate(parts):
            workers.append(_start())
            workers[-1].tell(_share(job, part, number, processes))
        reports = _collect(workers, progress)
    finally:
        for worker in workers:
            worker.close()
    for report, part in zip(reports, parts, strict=True):
        report.index = [part[each] for each in report.index]
        report.bodies = {part[each]: body for each, body in report.bodies.items()}
        report.changed = {part[each] for each in report.changed}
    return reports


def _start() -> _Worker:
    context = get_context("spawn")
    their_commands, commands = context.Pipe(duplex=False)
    reports, their_reports = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(their_commands, their_reports), daemon=True)
    process.start()
    their_commands.close()
    their_reports.close()
    return _Worker(process, cast(Connection, commands), cast(Connection, reports))


def _share(job: Job, part: Sequence[int], number: int, processes: int) -> Job:
    """Return the part of a job that one process does."""
    concurrency = job.concurrency
    if concurrency is not None:
        concurrency = concurrency // processes + (number < concurrency % processes)
    schedule = None if job.schedule is None else [job.schedule[each] for each in part]
    payloads = [job.payloads[each] for each in part]
    num_texts = [job.num_texts[each] for each in part] if job.num_texts else []
    return replace(job, payloads=payloads, num_texts=num_texts, schedule=schedule, concurrency=concurrency)


def _collect(workers: Sequence[_Worker], progress: Progress | None) -> list[Report]:
    by_pipe = {worker.reports: worker for worker in workers}
    reports: dict[Connection, Report] = {}
    counts = dict.fromkeys(by_pipe, (0, 0))
    ready: set[Connection] = set()
    deadline: float | None = None
    while len(reports) < len(workers):
        try:
            for pipe in cast("list[Connection]", wait([each for each in by_pipe if each not in reports], timeout=0.5)):
                message = by_pipe[pipe].receive()
                if isinstance(message, Report):
                    reports[pipe] = message
                elif message == "ready":
                    ready.add(pipe)
                    if len(ready) == len(workers):
                        _tell_all(workers, monotonic() + _HEAD_START)
                else:
                    counts[pipe] = message
                    if progress is not None:
                        progress(sum(each[0] for each in counts.values()), sum(each[1] for each in counts.values()))
            if deadline is not None and monotonic() > deadline:
                raise WhimbrelError("a client process does not stop.")
        except KeyboardInterrupt:
            if deadline is not None:
                raise
            deadline = monotonic() + _PATIENCE
            _tell_all(workers, "stop")
    found = [reports[worker.reports] for worker in workers]
    return found if deadline is None else _interrupted(found)


def _interrupted(reports: list[Report]) -> list[Report]:
    """Return the reports with one that was interrupted, also if the clients had just ended by themselves."""
    if any(report.interrupted for report in reports):
        return reports
    return [replace(reports[0], interrupted=True), *reports[1:]]


def _tell_all(workers: Sequence[_Worker], message: object) -> None:
    for worker in workers:
        worker.tell(message)


# In a client process


def _work(commands: Connection, reports: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_file_limit()
    job: Job = commands.recv()
    if job.verify_tls is not None:
        job = replace(job, tls=_tls_context(verify=job.verify_tls))
    gc.collect()
    gc.freeze()
    gc.disable()  # a pause would count as latency
    report = _run(_drive(job, commands, reports))
    with suppress(BrokenPipeError):
        reports.send(report)


def _run(main: Any) -> Report:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


async def _drive(job: Job, commands: Connection, reports: Connection) -> Report:
    def tell(done: int, failed: int) -> None:
        with suppress(BrokenPipeError):
            reports.send((done, failed))

    driver = Driver(job, on_progress=tell)
    reports.send("ready")
    start = commands.recv()
    if start == "stop":
        return Report(interrupted=True, unfinished=len(job.payloads))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(commands.fileno())
        driver.stop()

    loop.add_reader(commands.fileno(), stop)  # the parent says stop, or has ended
    try:
        return await driver.run(start)
    finally:
        loop.remove_reader(commands.fileno())


def _tls_context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _raise_file_limit() -> None:
    """Allow as many connections as the system does."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
