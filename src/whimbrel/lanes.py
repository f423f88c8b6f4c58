"""The threads that run batches: seqs in, Futures resolved.

Theory of operation. Each lane is a thread: it takes a batch from the scheduler, launches it and at once takes the next; the
collector, one more thread, waits for launched batches in order, checks their rows and resolves Futures. At most two batches
per lane are on their way. One lock guards the scheduler and the set of jobs; whoever takes a job out of the set, and nobody
else, resolves its Future. A batch that fails, at launch or at collection, is halved and put back, until only the requests
fail that fail alone. A thread that dies of a bug takes the engine with it: every waiting request is told, none hangs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel.batch import Batch, pack
from whimbrel.card import Encoder
from whimbrel.errors import ComputeError, NonFinite, Overloaded, Unavailable, WhimbrelError
from whimbrel.plan import Plan
from whimbrel.runner import Pending, Runner
from whimbrel.scheduler import Scheduler
from whimbrel.trace import observe, trace
from whimbrel.types import Float32Array, Prepared, Result, Seq, Timings

_log = logging.getLogger("whimbrel")

_BATCHES_PER_LANE: Final = 2


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way: where its vectors go, and what is left to do."""

    future: Future[Result]
    prepared: Prepared
    vectors_ND: Float32Array
    queue: float = -1.0
    """Seconds until its first seq was taken; negative until then."""
    compute: float = 0.0
    tag: object = None
    waiting: int = field(init=False)
    """Texts not collected yet."""

    def __post_init__(self) -> None:
        self.waiting = len(self.prepared.seqs)

    def resolve(self) -> None:
        """Answer; the job is nobody else's any more."""
        prepared = self.prepared
        total = perf_counter() - prepared.received
        timings = Timings(prepared.tokenize, max(0.0, self.queue), self.compute, total)
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(Result(self.vectors_ND, prepared.num_tokens, prepared.num_truncated, timings))

    def fail(self, error: WhimbrelError) -> None:
        """Answer with an error; the job is nobody else's any more."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


Work: TypeAlias = list[tuple[Job, Seq]]


class Recorder(Protocol):
    """Is told what is on the device."""

    def started(self, work: Work) -> int: ...
    def ended(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    work: Work
    batch: Batch
    pending: Pending
    started: float
    slots: threading.Semaphore
    flight: int = -1


class Lanes:
    """The execution threads of one engine."""

    def __init__(self, runner: Runner, encoder: Encoder, plan: Plan, *, recorder: Recorder | None = None) -> None:
        self._recorder = recorder
        self._runner = runner
        self._encoder = encoder
        self._scheduler = Scheduler[Job](plan.max_batch_tokens)
        self._jobs: set[Job] = set()
        self._retries: deque[Work] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._process = os.getpid()
        self._idle = 0
        self._in_flight = 0
        self._closed = False
        self._broken = False
        self._tokens_done = 0
        self._busy_seconds = 0.0
        self._launched: SimpleQueue[_Launched | None] = SimpleQueue()
        self._slots = [threading.Semaphore(_BATCHES_PER_LANE) for _ in range(plan.num_lanes)]
        self._lanes = [self._thread(f"lane-{i}", lambda i=i: self._run_lane(self._slots[i])) for i in range(plan.num_lanes)]
        self._collector = self._thread("collector", self._run_collector)
        for thread in (*self._lanes, self._collector):
            thread.start()

    @property
    def ready(self) -> bool:
        return not self._closed

    @property
    def small_tokens(self) -> int:
        return 0

    @property
    def rate(self) -> float:
        return 0.0

    @property
    def queued_tokens(self) -> int:
        return self._scheduler.queued_tokens

    def add(self, job: Job, *, max_queue_tokens: int) -> None:
        """Queue a job. Raises Unavailable, or Overloaded if more than `max_queue_tokens` would wait."""
        with self._changed:
            if self._closed:
                raise Unavailable("the engine is closed.")
            if os.getpid() != self._process:
                raise Unavailable("the engine was loaded before a fork, and its threads stayed behind; load it afterwards.")
            self._admit(job.prepared.num_tokens, max_queue_tokens)
            self._jobs.add(job)
            self._scheduler.add(job, job.prepared.seqs)
            self._changed.notify(len(job.prepared.seqs))
        job.future.add_done_callback(lambda future: self._claim(job) if future.cancelled() else None)

    def admit(self, max_queue_tokens: int) -> None:
        """Raise Overloaded if the queue is full already, so that nothing more is done for a request that will be refused."""
        with self._lock:
            self._admit(1, max_queue_tokens)

    def close(self) -> None:
        """Finish what was accepted, refuse what comes, and end the threads. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for lane in self._lanes:
            lane.join()
        self._launched.put(None)
        self._collector.join()

    def _admit(self, num_tokens: int, max_queue_tokens: int) -> None:
        queued = self._scheduler.queued_tokens
        if queued and queued + num_tokens > max_queue_tokens:
            rate = self._tokens_done / self._busy_seconds * len(self._lanes) if self._busy_seconds else 1e4
            raise Overloaded(
                f"{queued:,} tokens wait already; the queue takes {max_queue_tokens:,}. Try again later.",
                retry_after=max(1.0, queued / rate),
            )

    def _claim(self, job: Job) -> bool:
        """Take a job out, if it is there: whoever gets True answers it."""
        with self._lock:
            self._scheduler.cancel(job)
            found = job in self._jobs
            self._jobs.discard(job)
            return found

    # Threads

    def _thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._guard, args=(body,), name=f"whimbrel-{name}", daemon=True)

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException:
            _log.critical("a thread of the engine died. This is a bug.", exc_info=True)
            self._abandon()

    def _abandon(self) -> None:
        """Answer everything with an error and let the other threads end."""
        with self._changed:
            self._closed = self._broken = True
            jobs = list(self._jobs)
            self._jobs.clear()
            for job in jobs:
                self._scheduler.cancel(job)
            self._changed.notify_all()
        for slots in self._slots:
            slots.release(_BATCHES_PER_LANE)
        for job in jobs:
            job.fail(Unavailable("the engine has stopped."))

    def _run_lane(self, slots: threading.Semaphore) -> None:
        self._runner.enter_lane()
        while True:
            slots.acquire()
            if not (work := self._take()):
                return
            self._launch(work, slots)

    def _run_collector(self) -> None:
        while (launched := self._launched.get()) is not None:
            self._collect(launched)
            if self._recorder:
                self._recorder.ended(launched.flight)
            self._done(launched.slots)

    def _take(self) -> Work:
        """Wait for work; empty when the lanes are closed and nothing is left or can come back."""
        with self._changed:
            self._idle += 1
            while not (work := self._next()) and not self._broken and not (self._closed and self._in_flight == 0):
                self._changed.wait()
            self._idle -= 1
            self._in_flight += 1 if work else 0
            now = perf_counter()
            fresh = {job for job, _ in work if job.queue < 0}
            for job in fresh:
                job.queue = now - job.prepared.received - job.prepared.tokenize
        for job in fresh:
            observe("queue", job.queue)
        return work

    def _next(self) -> Work:
        while self._retries:
            if work := [(job, seq) for job, seq in self._retries.popleft() if job in self._jobs]:
                return work
        return self._scheduler.take(self._idle)

    def _launch(self, work: Work, slots: threading.Semaphore) -> None:
        started = perf_counter()
        flight = self._recorder.started(work) if self._recorder else -1
        try:
            with trace("pack"):
                batch = pack(
                    [seq for _, seq in work], position_offset=self._encoder.position_offset, pad_id=self._encoder.pad_id
                )
                dimensions = np.array([job.prepared.dimensions for job, _ in work], np.int32)[batch.order_B]
                normalize = np.array([job.prepared.normalize for job, _ in work], np.bool_)[batch.order_B]
            pending = self._runner.launch(batch, dimensions, normalize)
        except BaseException as error:  # whatever it is, the requests get an answer and the lane lives
            if self._recorder:
                self._recorder.ended(flight)
            self._failed(work, error)
            self._done(slots)
        else:
            self._launched.put(_Launched(work, batch, pending, started, slots, flight))

    def _failed(self, work: Work, error: BaseException) -> None:
        """Put the halves back, so that only what fails alone fails."""
        _log.error("a batch of %d texts failed", len(work), exc_info=error)
        if len(work) == 1:
            job = work[0][0]
            if self._claim(job):
                job.fail(ComputeError(f"the computation failed ({type(error).__name__}); the server's log says more."))
            return
        middle = len(work) // 2
        with self._changed:
            self._retries += (work[:middle], work[middle:])
            self._changed.notify(2)

    def _done(self, slots: threading.Semaphore) -> None:
        """A batch was collected or has failed."""
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()
        slots.release()

    def _collect(self, launched: _Launched) -> None:
        try:
            with trace("collect"):
                vectors_BD = self._runner.collect(launched.pending)
            if len(vectors_BD) != launched.batch.num_seqs:
                raise RuntimeError(f"{len(vectors_BD)} rows for {launched.batch.num_seqs} seqs")
        except BaseException as error:
            self._failed(launched.work, error)
        else:
            self._deliver(launched, vectors_BD)

    def _deliver(self, launched: _Launched, vectors_BD: Float32Array) -> None:
        seconds = perf_counter() - launched.started
        observe("compute", seconds)
        self._tokens_done += launched.batch.num_tokens
        self._busy_seconds += seconds
        jobs = {job for job, _ in launched.work}
        for job in jobs:
            job.compute += seconds
        bad = _non_finite_rows(vectors_BD)
        places: list[int] = launched.batch.order_B.tolist()
        for row, place in enumerate(places):
            job, seq = launched.work[place]
            if row in bad:
                if self._claim(job):
                    job.fail(NonFinite("the model gave NaN or infinity for this text.", param=f"input[{seq.index}]"))
                continue
            job.vectors_ND[seq.index] = vectors_BD[row, : job.prepared.dimensions]
            job.waiting -= 1
            if job.waiting == 0 and self._claim(job):
                job.resolve()


def _non_finite_rows(vectors_BD: Float32Array) -> set[int]:
    finite: NDArray[np.bool_] = np.isfinite(vectors_BD)
    return set(np.flatnonzero(~finite.all(axis=1)).tolist())
