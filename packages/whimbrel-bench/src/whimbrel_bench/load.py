"""Load generation: requests at given times (open loop), or as soon as others are answered (closed loop).

In an open loop the latency counts from the moment for which a request was scheduled, so a server that stalls delays the
requests behind it and cannot hide that. The generator measures how late its own event loop turns.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from ssl import SSLContext
from time import monotonic, process_time
from typing import Final, NamedTuple

from whimbrel_bench.answers import ROW_MARK, UNKNOWN, Shape, read_tokens, refusal
from whimbrel_bench.connection import CLOSED, Answer, Connection, NoAnswer

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
    usage: str = "prompt_tokens"
    """Key of the number of tokens in an answer; "" where a header states it."""
    keep_bodies: bool = False
    """The report has the first answer to each payload, and the payloads whose later answers were others."""
    verify_tls: bool | None = None
    """None for plain HTTP; else whether the server's certificate is checked."""

    def __post_init__(self) -> None:
        if self.duration is not None and self.concurrency is None:
            raise ValueError("a duration needs a concurrency: requests that are sent at once have no end")


class Outcome(NamedTuple):
    """End of one request. Times are seconds after the start."""

    payload: int
    """Index of the payload."""
    scheduled: float
    sent: float
    done: float
    status: int = NO_STATUS
    size: int = 0
    """Bytes of the body."""
    tokens: int = UNKNOWN
    """Tokens by the server's count."""
    reason: str = ""
    """Reason of a failure."""


@dataclass
class Report:
    """Outcome of a job."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    """Its requests in the order in which they ended."""
    bodies: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """First answer to each payload, if they are kept."""
    changed: set[int] = field(default_factory=set[int])
    """Payloads with different answers, if they are kept."""
    started: float = 0.0
    """The start by the monotonic clock, which all processes of a machine share."""
    num_resent: int = 0
    """Requests that were sent again, since the server had closed the idle connection."""
    unfinished: int = 0
    """Requests that were on their way when the run was stopped."""
    cpu_share: float = 0.0
    """Processor time by wall time of the client process."""
    lag: list[float] = field(default_factory=list[float])
    """Seconds by which the event loop turned late, at each tick."""
    interrupted: bool = False


class _Exchange(NamedTuple):
    """Times at which a request was sent and ended, by the monotonic clock, and its answer or the reason why there is none."""

    sent: float
    done: float
    answer: Answer | None
    reason: str


class Driver:
    """Runs one job in the present event loop."""

    def __init__(
        self, job: Job, *, tls: SSLContext | None = None, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.report = Report()
        self._tls = tls
        self._job = job
        self._on_progress = on_progress
        self._idle: list[Connection] = []
        self._connections: set[Connection] = set()
        self._room = asyncio.Semaphore(job.concurrency or 2**31)
        self._num_running = 0
        """Requests that are due and have not ended."""
        self._num_failed = 0

    async def run(self, start: float) -> Report:
        """Begin at `start` (monotonic), and return when all requests have ended or `stop` was called."""
        self._start = max(start, monotonic())
        self._sending = asyncio.create_task(self._send_all())
        ticker = asyncio.create_task(self._tick())
        cpu = process_time()
        await asyncio.wait([self._sending])
        ticker.cancel()
        self.report.started = self._start
        self.report.cpu_share = (process_time() - cpu) / max(self._now(), 1e-9)
        for connection in self._connections:
            connection.close()
        if not self._sending.cancelled():
            self._sending.result()
        return self.report

    def stop(self) -> None:
        """End now. Requests on their way are dropped and counted."""
        self.report.interrupted = True
        self.report.unfinished = self._num_running
        self._sending.cancel()

    def _now(self) -> float:
        return monotonic() - self._start

    async def _send_all(self) -> None:
        """Send the requests: each when it is due, or all at once, or one after another on as many ways as may be taken."""
        job = self._job
        await asyncio.sleep(-self._now())
        async with asyncio.TaskGroup() as group:
            if job.schedule is not None:
                for number, due in enumerate(job.schedule):
                    await asyncio.sleep(due - self._now())
                    group.create_task(self._request(number, due))
            elif job.concurrency is None:
                for number in range(len(job.payloads)):
                    group.create_task(self._request(number, None))
            else:
                numbers = iter(range(len(job.payloads))) if job.duration is None else count()
                for _ in range(job.concurrency):
                    group.create_task(self._repeat(numbers))

    async def _repeat(self, numbers: Iterator[int]) -> None:
        """Send the next request when the one before has ended."""
        for number in numbers:
            if self._job.duration is not None and self._now() >= self._job.duration:
                return
            await self._request(number, self._now())

    async def _request(self, number: int, due: float | None) -> None:
        """Send a request once there is room, and record its end. If it is due at no time, it is due when it is sent."""
        index = number % len(self._job.payloads)
        self._num_running += 1
        async with self._room:
            found = await self._exchange(self._job.payloads[index])
        self._num_running -= 1
        self._record(index, due, found)

    async def _exchange(self, payload: bytes) -> _Exchange:
        job, asked = self._job, monotonic()
        try:
            async with asyncio.timeout(job.timeout):
                connection = self._idle_connection() or await self._connect()
        except TimeoutError:
            return _Exchange(asked, monotonic(), None, f"no connection within {job.timeout:g} s")
        except (OSError, ValueError) as error:
            return _Exchange(asked, monotonic(), None, f"cannot connect: {getattr(error, 'strerror', None) or error}")
        try:
            async with asyncio.timeout(job.timeout):
                answer = await connection.send(payload)
        except (TimeoutError, NoAnswer) as error:
            reason = f"no answer within {job.timeout:g} s" if isinstance(error, TimeoutError) else str(error)
            self._close(connection)
            if reason != CLOSED or not connection.was_stale:
                return _Exchange(connection.sent, monotonic(), None, reason)
            self.report.num_resent += 1
            return await self._exchange(payload)
        if connection.keep_alive and not job.new_connections:
            self._idle.append(connection)
        else:
            self._close(connection)
        return _Exchange(connection.sent, connection.ended, answer, "")

    def _idle_connection(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            self._connections.discard(connection)
        return None

    async def _connect(self) -> Connection:
        job = self._job
        mark = ROW_MARK if job.shape is not None and job.shape.counts_rows else b""
        make = partial(Connection, keep_bodies=job.keep_bodies, row_mark=mark)
        _, connection = await asyncio.get_running_loop().create_connection(make, job.host, job.port, ssl=self._tls)
        self._connections.add(connection)
        return connection

    def _close(self, connection: Connection) -> None:
        self._connections.discard(connection)
        connection.close()

    def _record(self, index: int, due: float | None, found: _Exchange) -> None:
        job, answer, reason, sent = self._job, found.answer, found.reason, found.sent - self._start
        outcome = Outcome(index, sent if due is None else due, sent, found.done - self._start, reason=reason)
        if answer is not None:
            reason = refusal(answer, job.shape, job.num_texts[index] if job.num_texts else 0)
            tokens = UNKNOWN if reason else read_tokens(answer, job.usage)
            outcome = outcome._replace(status=answer.status, size=answer.size, tokens=tokens, reason=reason)
            if job.keep_bodies and not reason:
                self._keep(index, b"".join(answer.body))
        self._num_failed += bool(reason)
        self.report.outcomes.append(outcome)

    def _keep(self, index: int, body: bytes) -> None:
        """Keep the first answer to a payload. Others are compared from the first list on: ids and dates come before."""
        first = self.report.bodies.setdefault(index, body)
        if first[first.find(b"[") :] != body[body.find(b"[") :]:
            self.report.changed.add(index)

    async def _tick(self) -> None:
        """Measure the lateness of the loop, and report progress."""
        for ticks in count(1):
            before = monotonic()
            await asyncio.sleep(_TICK)
            self.report.lag.append(max(0.0, monotonic() - before - _TICK))
            if ticks % 20 == 0 and self._on_progress is not None:
                self._on_progress(len(self.report.outcomes), self._num_failed)
