"""Client processes of a load, started at the same moment, and their reports.

Ctrl-C reaches the parent alone. It stops the processes and returns what they have so far. A process ends with its parent.
"""

import asyncio
import gc
import signal
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf, isfinite
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any, Final, cast

import uvloop

from whimbrel.errors import WhimbrelError
from whimbrel.types.machine_limits import usable_processors
from whimbrel_bench.load import Driver, Job, Report
from whimbrel_bench.processes import start_deaf

Progress = Callable[[int, int], None]
"""Called with the numbers of requests that have ended and that have failed, of all processes."""

_RATE_PER_PROCESS: Final = 2000
"""Requests per second that one process sends without being late."""
_CONNECTIONS_PER_PROCESS: Final = 1024
_HEAD_START: Final = 0.05
_START_SECONDS: Final = 60.0
"""Seconds in which all processes must be ready."""
_PATIENCE: Final = 10.0
"""Seconds in which a process must report after it was stopped."""


def choose_processes(rate: float, concurrency: int | None, num_requests: int) -> int:
    """Return the number of client processes for a load, at most half of the processors."""
    wanted = (
        ceil(rate / _RATE_PER_PROCESS) if isfinite(rate) else ceil((concurrency or num_requests) / _CONNECTIONS_PER_PROCESS)
    )
    return max(1, min(wanted, usable_processors() // 2, num_requests))


def run_load(job: Job, *, processes: int = 1, progress: Progress | None = None) -> list[Report]:
    """Run a job in client processes and return their reports. Indices are those of the job's payloads. Raises WhimbrelError."""
    processes = min(processes, len(job.payloads), job.concurrency or processes)
    parts = [list(range(number, len(job.payloads), processes)) for number in range(processes)]
    context = get_context("spawn")
    ready = context.Barrier(processes)
    workers: dict[Connection, Any] = {}
    try:
        for number, part in enumerate(parts):
            pipe, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(theirs, _share(job, part, number, processes), ready), daemon=True)
            start_deaf(process)
            theirs.close()
            workers[cast(Connection, pipe)] = process
        reports = _collect(workers, progress)
    finally:
        for pipe, process in workers.items():
            process.terminate()
            process.join(_PATIENCE)
            pipe.close()
    for report, part in zip(reports, parts, strict=True):
        report.outcomes = [each._replace(payload=part[each.payload]) for each in report.outcomes]
        report.bodies = {part[each]: body for each, body in report.bodies.items()}
        report.changed = {part[each] for each in report.changed}
    return reports


def _share(job: Job, part: Sequence[int], number: int, processes: int) -> Job:
    """Return the part of a job that one process does."""
    concurrency = job.concurrency
    if concurrency is not None:
        concurrency = concurrency // processes + (number < concurrency % processes)
    schedule = None if job.schedule is None else [job.schedule[each] for each in part]
    payloads = [job.payloads[each] for each in part]
    num_texts = [job.num_texts[each] for each in part] if job.num_texts else []
    return replace(job, payloads=payloads, num_texts=num_texts, schedule=schedule, concurrency=concurrency)


def _collect(workers: Mapping[Connection, Any], progress: Progress | None) -> list[Report]:
    """Return the reports of the processes, given by the pipes through which they come. Raises WhimbrelError."""
    reports: dict[Connection, Report] = {}
    counts: dict[Connection, tuple[int, int]] = {}
    deadline = inf
    while left := [pipe for pipe in workers if pipe not in reports]:
        try:
            for pipe in cast("list[Connection]", wait(left, timeout=0.5)):
                message = _receive(pipe, workers[pipe], is_stopped=deadline < inf)
                if isinstance(message, Report):
                    reports[pipe] = message
                elif progress is not None:
                    counts[pipe] = message
                    progress(sum(done for done, _ in counts.values()), sum(failed for _, failed in counts.values()))
            if monotonic() > deadline:
                raise WhimbrelError("a client process does not stop.")
        except KeyboardInterrupt:
            if deadline < inf:
                raise
            deadline = monotonic() + _PATIENCE
            for process in workers.values():
                process.terminate()
    found = [reports[pipe] for pipe in workers]
    if deadline < inf:  # also if the clients had just ended by themselves
        found[0] = replace(found[0], interrupted=True)
    return found


def _receive(pipe: Connection, process: Any, *, is_stopped: bool) -> Report | tuple[int, int]:
    """Return the report, or the numbers of requests that have ended and that have failed. Raises WhimbrelError."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        process.join(_PATIENCE)
        if is_stopped:  # before it had begun
            return Report(interrupted=True)
        raise WhimbrelError(f"a client process died (exit code {process.exitcode}).") from None


# In a client process


def _work(pipe: Connection, job: Job, ready: Any) -> None:
    _raise_file_limit()
    tls = None if job.verify_tls is None else _tls_context(verify=job.verify_tls)
    gc.collect()
    gc.freeze()
    gc.disable()  # a pause would count as latency
    ready.wait(_START_SECONDS)
    report = uvloop.run(_drive(job, tls, pipe))
    with suppress(BrokenPipeError):
        pipe.send(report)


async def _drive(job: Job, tls: ssl.SSLContext | None, pipe: Connection) -> Report:
    def tell(done: int, failed: int) -> None:
        with suppress(BrokenPipeError):
            pipe.send((done, failed))

    driver, loop, parent = Driver(job, tls=tls, on_progress=tell), asyncio.get_running_loop(), parent_process()
    assert parent is not None
    running = asyncio.ensure_future(driver.run(monotonic() + _HEAD_START))
    loop.add_signal_handler(signal.SIGTERM, driver.stop)
    loop.add_reader(parent.sentinel, driver.stop)  # the parent has ended
    try:
        return await running
    finally:
        loop.remove_reader(parent.sentinel)


def _tls_context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _raise_file_limit() -> None:
    """Allow as many connections as the system does."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
