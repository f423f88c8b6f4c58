"""Load generation: requests at given times (open loop), or as soon as others are answered (closed loop).

In an open loop the latency counts from the moment for which a request was scheduled, so a server that stalls delays the
requests behind it and cannot hide that. The generator measures how late its own event loop turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from ssl import SSLContext
from time import monotonic, process_time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.arrays import Int64Array
from whimbrel_bench.answers import ROW_MARK, Shape, refusal
from whimbrel_bench.connection import CLOSED, Answer, Connection
from whimbrel_bench.usage import USAGES

NO_STATUS: Final = 0
_TICK: Final = 0.01


@dataclass(frozen=True)
class Job:
    """Work of one client process."""

    host: str
    port: int
    payloads: list[bytes]
    """Requests with their heads."""
    num_texts: list[int] = field(default_factory=list[int])
    """Texts of each request."""
    shape: Shape | None = None
    """Shape of answers; None: it is not known."""
    schedule: list[float] | None = None
    """Seconds after the start at which each is due; None: at once, or as soon as there is room."""
    concurrency: int | None = None
    """Maximum number of requests on their way."""
    timeout: float = 600.0
    """Seconds after which a request has failed."""
    new_connections: bool = False
    """Every request has a connection of its own."""
    duration: float | None = None
    """Seconds for which the payloads are repeated, with a concurrency; None: each is sent once."""
    usage: str = "openai"
    """Place of the number of tokens in an answer: a key of USAGES."""
    keep_bodies: bool = False
    """The report has the first answer to each payload, and the payloads whose later answers were others."""
    tls: SSLContext | None = None
    """Built in the process that uses it."""
    verify_tls: bool | None = None
    """None for plain HTTP; else whether the server's certificate is checked."""

    def __post_init__(self) -> None:
        if self.duration is not None and self.concurrency is None:
            raise ValueError("a duration needs a concurrency: requests that are sent at once have no end")


@dataclass
class Report:
    """Outcome of a job: its requests in the order in which they ended. Times are seconds after the start."""

    index: list[int] = field(default_factory=list[int])
    scheduled: list[float] = field(default_factory=list[float])
    sent: list[float] = field(default_factory=list[float])
    done: list[float] = field(default_factory=list[float])
    status: list[int] = field(default_factory=list[int])
    size: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    """Tokens by the server's count, or -1."""
    bodies: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """First answer to each payload, if they are kept."""
    changed: set[int] = field(default_factory=set[int])
    """Payloads with different answers, if they are kept."""
    started: float = 0.0
    """The start by the monotonic clock, which all processes of a machine share."""
    errors: dict[int, str] = field(default_factory=dict[int, str])
    """Reasons by position in the lists."""
    num_resent: int = 0
    """Requests that were sent again, since the server had closed the idle connection."""
    unfinished: int = 0
    """Requests that were on their way when the run was stopped."""
    cpu_share: float = 0.0
    """Processor time by wall time of the client process."""
    lag: list[float] = field(default_factory=list[float])
    """Seconds by which the event loop turned late, at each tick."""
    interrupted: bool = False

    def arrays(self) -> tuple[NDArray[np.float64], Int64Array]:
        """Return latencies in seconds, and statuses."""
        return np.array(self.done) - np.array(self.scheduled), np.array(self.status, np.int64)


class Driver:
    """Runs one job in the present event loop."""

    def __init__(self, job: Job, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.report = Report()
        self._job = job
        self._on_progress = on_progress
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._waiting: deque[tuple[int, float]] = deque()
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._due: dict[int, float] = {}
        self._next = 0
        self._stopped = False
        self._start = 0.0
        self._failed = 0
        self._timers: deque[asyncio.TimerHandle] = deque()

    async def run(self, start: float) -> Report:
        """Begin at `start` (monotonic), and return when all requests have ended or `stop` was called."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._end = loop.create_future()
        await asyncio.sleep(max(0.0, start - monotonic()))
        self._start, cpu = monotonic(), process_time()
        if abs(self._start - start) < 1.0:
            self._start = start
        self.report.started = self._start
        ticker = asyncio.create_task(self._tick())
        if self._job.schedule is not None:
            self._schedule_next()
        else:
            for _ in range(self._first_wave()):
                self._take_next()
        self._check_end()
        await self._end
        ticker.cancel()
        wall = monotonic() - self._start
        self.report.cpu_share = (process_time() - cpu) / max(wall, 1e-9)
        self._close_all()
        return self.report

    def stop(self) -> None:
        """End now. Requests on their way are dropped and counted."""
        self.report.interrupted = True
        self.report.unfinished = len(self._busy) + len(self._opening) + len(self._waiting)
        self._finish()

    def _finish(self) -> None:
        self._stopped = True
        if not self._end.done():
            self._end.set_result(None)

    def _first_wave(self) -> int:
        job = self._job
        return len(job.payloads) if job.concurrency is None else min(job.concurrency, self._total())

    def _total(self) -> int:
        return len(self._job.payloads) if self._job.duration is None else 2**62

    # Which request is next

    def _schedule_next(self) -> None:
        """Send the requests that are due, and set a timer for the next. One timer at a time keeps the loop's heap small."""
        schedule = self._job.schedule
        assert schedule is not None
        now = monotonic() - self._start
        while self._next < len(schedule) and schedule[self._next] <= now:
            self._admit(self._next, schedule[self._next])
            self._next += 1
        if self._next < len(schedule) and not self._stopped:
            self._loop.call_later(schedule[self._next] - now, self._schedule_next)

    def _take_next(self) -> None:
        """Send the next request of a closed loop."""
        over = self._job.duration is not None and monotonic() - self._start >= self._job.duration
        if self._stopped or over or self._next >= self._total():
            return
        number, self._next = self._next, self._next + 1
        self._admit(number, 0.0 if self._job.concurrency is None else monotonic() - self._start)

    def _admit(self, number: int, scheduled: float) -> None:
        limit = self._job.concurrency
        if limit is not None and len(self._busy) + len(self._opening) >= limit:
            self._waiting.append((number, scheduled))
        else:
            self._send(number, scheduled)

    def _send(self, number: int, scheduled: float) -> None:
        self._due[number] = scheduled
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                self._write(connection, number)
                return
        task = self._loop.create_task(self._open(number))
        self._opening[number] = task
        task.add_done_callback(partial(self._opened, number))

    async def _open(self, number: int) -> None:
        job = self._job
        mark = ROW_MARK if job.shape is not None and job.shape.counts_rows else b""
        make = partial(Connection, self._finished, keep_bodies=job.keep_bodies, row_mark=mark)
        async with asyncio.timeout(job.timeout):
            _, connection = await self._loop.create_connection(make, job.host, job.port, ssl=job.tls)
        del self._opening[number]  # `_opened` is called later: until then it would count twice, and take another's room
        self._write(connection, number)

    def _opened(self, number: int, task: asyncio.Task[None]) -> None:
        self._opening.pop(number, None)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, TimeoutError):
            self._record(number, monotonic(), None, f"no connection within {self._job.timeout:g} s")
        elif error is not None:
            self._record(number, monotonic(), None, f"cannot connect: {getattr(error, 'strerror', None) or error}")

    def _write(self, connection: Connection, number: int) -> None:
        self._busy.add(connection)
        payloads = self._job.payloads
        connection.send(number, payloads[number % len(payloads)], monotonic())

    # Ends

    def _finished(self, connection: Connection, answer: Answer | None, reason: str) -> None:
        number, connection.index = connection.index, -1
        self._busy.discard(connection)
        if self._stopped:
            return
        if answer is None and reason == CLOSED and connection.was_stale:
            self.report.num_resent += 1
            self._send(number, self._due[number])
            return
        connection.ended = monotonic()
        if answer is not None and connection.keep_alive and not self._job.new_connections:
            self._idle.append(connection)
        elif connection.is_open:
            connection.close()
        self._record(number, connection.since, answer, reason)

    def _record(self, number: int, sent: float, answer: Answer | None, reason: str) -> None:
        report = self.report
        tokens = -1
        if answer is not None:
            num_texts = self._job.num_texts[number % len(self._job.payloads)] if self._job.num_texts else 0
            reason = refusal(answer, self._job.shape, num_texts)
            tokens = -1 if reason else USAGES[self._job.usage](answer)
        if reason:
            report.errors[len(report.index)] = reason
            self._failed += 1
        elif answer is not None and self._job.keep_bodies:
            self._keep(number % len(self._job.payloads), b"".join(answer.body))
        scheduled = self._due.pop(number)
        sent -= self._start
        report.index.append(number % len(self._job.payloads))
        report.sent.append(sent)
        report.scheduled.append(scheduled if self._job.schedule is not None or self._job.concurrency is None else sent)
        report.done.append(monotonic() - self._start)
        report.status.append(NO_STATUS if answer is None else answer.status)
        report.size.append(0 if answer is None else answer.size)
        report.tokens.append(tokens)
        if self._job.schedule is None and self._job.concurrency is not None:
            self._loop.call_soon(self._continue)
        elif self._waiting:
            self._send(*self._waiting.popleft())
        self._check_end()

    def _keep(self, index: int, body: bytes) -> None:
        """Keep the first answer to a payload. Others are compared from the first list on: ids and dates come before."""
        first = self.report.bodies.setdefault(index, body)
        if first[first.find(b"[") :] != body[body.find(b"[") :]:
            self.report.changed.add(index)

    def _continue(self) -> None:
        self._take_next()
        self._check_end()

    def _check_end(self) -> None:
        over = self._job.duration is not None and monotonic() - self._start >= self._job.duration
        left = 0 if over else self._total() - self._next
        if not (left or self._busy or self._opening or self._waiting or self._due):
            self._finish()

    async def _tick(self) -> None:
        """Measure the lateness of the loop, report progress, and end requests that take too long."""
        ticks = 0
        while True:
            before = monotonic()
            await asyncio.sleep(_TICK)
            now = monotonic()
            self.report.lag.append(max(0.0, now - before - _TICK))
            ticks += 1
            if ticks % 20 == 0:
                for connection in [each for each in self._busy if now - each.since > self._job.timeout]:
                    connection.close(f"no answer within {self._job.timeout:g} s")
                if self._on_progress is not None:
                    self._on_progress(len(self.report.index), self._failed)

    def _close_all(self) -> None:
        self._stopped = True
        for task in self._opening.values():
            task.cancel()
        for connection in [*self._idle, *self._busy]:
            connection.close()
