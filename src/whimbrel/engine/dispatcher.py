"""What waits and what is on its way, under one lock: jobs in, batches out, every job answered once.

Theory of operation. The lock guards the scheduler, the set of unanswered jobs, and the counts of what is on its way. Whoever
takes a job out of the set, and nobody else, answers it; never while it holds the lock, since a Future runs its callbacks there.
A second lock is held while vectors are written, and passed once by whoever has taken a job out: so, when a Future is done,
nobody writes into its vectors any more, and their memory may be used again.

Vectors are compared and condensed in threads of their own: the collector has other batches to hand out.

Suspects, which were on the device when an engine died, run alone: they are taken when nothing else is on its way, and nothing
else is taken until they are done.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Final
from weakref import ref

import numpy as np

from whimbrel.engine.admission import QueueState, ThroughputEstimate, admit
from whimbrel.engine.job import BatchOutput, Job
from whimbrel.engine.scheduler import ScheduledBatch, Scheduler
from whimbrel.errors import ComputeError, DeadlineExceeded, OutOfMemory, Unavailable
from whimbrel.outputs.pair_scoring import Part
from whimbrel.telemetry.trace import count, observe
from whimbrel.types.plan import Plan

_log = logging.getLogger("whimbrel")

_UNCOMPARED_PER_LANE: Final = 8
"""So much of what batches gave may wait to be compared; then the collector waits too, so that vectors do not pile up."""


@dataclass(frozen=True, slots=True, eq=False)
class _Selection:
    """What a look at the queue gave: a batch, those of its jobs of which it is the first, and jobs that expired."""

    batch: ScheduledBatch[Job] | None
    started: list[Job]
    expired: list[Job]


class Dispatcher:
    """The queue of one engine and its bookkeeping. Safe to use from many threads."""

    def __init__(self, plan: Plan, enter_thread: Callable[[], None]) -> None:
        """`enter_thread` is called once by each thread that compares, before anything else."""
        self._plan = plan
        self._scheduler = Scheduler[Job](plan.max_batch_tokens)
        self._rate = ThroughputEstimate()
        self._jobs: set[Job] = set()
        self._num_bytes = 0
        self._retries: deque[ScheduledBatch[Job]] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # lanes wait here, and what runs beside them
        self._writing = threading.Lock()
        self._comparing = ThreadPoolExecutor(plan.num_lanes, "whimbrel-comparing", initializer=enter_thread)
        self._room = threading.Semaphore(_UNCOMPARED_PER_LANE * plan.num_lanes)
        self._process = os.getpid()
        self._idle = 0
        self._in_flight = 0
        self._exclusive = False
        self._closed = False
        self._broken = False

    @property
    def open(self) -> bool:
        return not self._closed

    @property
    def queued_tokens(self) -> int:
        return self._scheduler.queued_tokens

    @property
    def small_tokens(self) -> int:
        return self._scheduler.small_tokens

    @property
    def rate(self) -> float:
        return self._rate.value

    # What comes

    def add(self, job: Job, *, admitted: bool = False) -> None:
        """Queue a job. Raises Unavailable, DeadlineExceeded, and Overloaded unless it was `admitted` elsewhere."""
        prepared = job.request
        parts: Sequence[Part] = ()
        if job.scorer is not None:
            parts = job.scorer.take_parts()  # before a lane may add to it, so that each part runs once
        is_complete, first = not job.num_pending, job.run_first
        self._check_process()
        with self._lock:
            if self._closed:
                raise Unavailable("the engine is closed.")
            if prepared.deadline <= perf_counter():
                raise _too_late()
            if not admitted:
                self._check(job.num_tokens, prepared.priority, prepared.tenant, num_bytes=job.num_bytes)
            self._jobs.add(job)
            self._num_bytes += job.num_bytes
            self._scheduler.add(
                job,
                job.seqs,
                priority=prepared.priority,
                deadline=prepared.deadline,
                tenant=prepared.tenant,
                suspects=prepared.suspects,
                first=first,
            )
            self._changed.notify_all()
        self._run(job, parts)
        if is_complete:
            self._complete(job)
        held = ref(job)  # loosely: the Future must not keep the memory of the job that keeps the Future
        job.future.add_done_callback(lambda future: self._on_cancel(held()) if future.cancelled() else None)

    def check(self, num_seqs: int, priority: int, tenant: str) -> None:
        """Raise Overloaded if a request of so many texts will be refused, so that nothing more is done for it."""
        self._check_process()
        with self._lock:
            self._check(num_seqs, priority, tenant)

    def _check_process(self) -> None:
        """Before the lock is taken: in a forked child nobody may be there to release it."""
        if os.getpid() != self._process:
            raise Unavailable("the engine was loaded before a fork, and its threads stayed behind; load it afterwards.")

    def _check(self, tokens: int, priority: int, tenant: str, *, num_bytes: int = 0) -> None:
        scheduler = self._scheduler
        ahead = scheduler.tokens_ahead(tokens, priority, tenant=tenant)
        queue = QueueState(scheduler.queued_tokens, ahead, self._num_bytes, self._rate.value)
        small = scheduler.is_small(tokens)
        admit(self._plan, queue, tokens=tokens, num_bytes=num_bytes, small=small, chance=random.random())  # noqa: S311

    def close(self) -> None:
        """Let nothing more in."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until everything is answered; call it when no batch is left, after `close`."""
        with self._lock:
            while self._jobs:
                self._changed.wait()
        self._comparing.shutdown()

    def fail_all(self) -> None:
        """Answer everything with an error, and let nothing more in or out."""
        with self._lock:
            self._closed = self._broken = True
            jobs = [job for job in list(self._jobs) if self._forget(job)]
            self._changed.notify_all()
        self._wait_for_writers()
        for job in jobs:
            job.fail(Unavailable("the engine has stopped."))

    # What goes

    def take(self) -> ScheduledBatch[Job] | None:
        """Wait for a batch; None when this is closed and nothing is left or can come back."""
        while True:
            with self._lock:
                self._idle += 1
                picked = self._wait()
                self._idle -= 1
            self._emit(picked)
            if picked.batch or not picked.expired:
                return picked.batch

    def take_small(self, priority: int) -> ScheduledBatch[Job] | None:
        """Small jobs that may run in the midst of a batch of this priority; does not wait."""
        with self._lock:
            picked = self._pick(lambda now: self._scheduler.take_small(now, priority))
        self._emit(picked)
        return picked.batch

    def _wait(self) -> _Selection:
        while True:
            picked = self._pick(self._next)
            if picked.batch or picked.expired or self._broken or (self._closed and not self._in_flight):
                return picked
            wake_at = self._scheduler.wake_at
            self._changed.wait(None if wake_at == inf else min(max(0.0, wake_at - perf_counter()), threading.TIMEOUT_MAX))

    def _next(self, now: float) -> ScheduledBatch[Job] | None:
        suspects = self._suspects_are_next()
        if self._exclusive or (self._in_flight and suspects):
            return None
        if not self._retries:
            return self._scheduler.take(now, self._idle)
        taken = self._retries.popleft()
        return replace(taken, items=[(job, seq) for job, seq in taken.items if job in self._jobs])

    def _suspects_are_next(self) -> bool:
        while self._retries and not any(job in self._jobs for job, _ in self._retries[0].items):
            self._retries.popleft()  # answered meanwhile
        return self._retries[0].kind == "suspect" if self._retries else self._scheduler.suspects_are_next

    def _pick(self, choose: Callable[[float], ScheduledBatch[Job] | None]) -> _Selection:
        """Take out the jobs that expired, then a batch, and account for both."""
        now = perf_counter()
        retried = [job for again in self._retries for job, _ in again.items if job.request.deadline <= now]
        late = [job for job in (*self._scheduler.expire(now), *retried) if self._forget(job)]
        if late:
            self._changed.notify_all()  # suspects among them may have been what others waited for
        taken = choose(now)
        fresh = {job for job, _ in taken.items if job.queue < 0} if taken else ()
        for job in fresh:
            job.queue = now - job.request.received - job.request.tokenize
        if taken:
            self._in_flight += 1
            self._exclusive = taken.kind == "suspect"
            self._rate.begin(now)
        return _Selection(taken, list(fresh), late)

    def _emit(self, picked: _Selection) -> None:
        for job in picked.expired:
            self._fail_late(job)
        for job in picked.started:
            observe("queue", job.queue)

    # What comes back

    def batch_done(self, taken: ScheduledBatch[Job], num_tokens: int) -> None:
        """A batch was collected and has computed so many tokens, or it has failed (0)."""
        with self._lock:
            self._rate.end(perf_counter(), num_tokens)
            if num_tokens:
                self._scheduler.succeeded()
            self._batch_finished()

    def requeue(self, taken: ScheduledBatch[Job], *, out_of_memory: bool) -> None:
        """Run a batch that failed again, in halves; a lone text alone on the device. Call it before `done`."""
        middle = len(taken.items) // 2
        with self._lock:
            if out_of_memory:
                self._scheduler.out_of_memory(sum(seq.ids.size for _, seq in taken.items))
            if middle:
                self._retries += [replace(taken, items=half) for half in (taken.items[:middle], taken.items[middle:])]
            else:
                self._retries.append(replace(taken, kind="suspect"))
            self._changed.notify_all()

    def begin_beside(self, job: Job) -> bool:
        """Wait until a text of the job may run beside the lanes; False if there is no need any more. `end_beside` follows."""
        with self._lock:
            while not self._broken and (self._exclusive or self._suspects_are_next()):
                self._changed.wait()
            late = job.request.deadline <= perf_counter() and self._forget(job)
            wanted = job in self._jobs
            self._in_flight += wanted
        if late:
            self._fail_late(job)
        return wanted

    def end_beside(self) -> None:
        """What `begin_beside` began is over."""
        with self._lock:
            self._batch_finished()

    def deliver(self, job: Job, batch: BatchOutput, rows: list[int], indexes: list[int]) -> None:
        """Take over what a batch gave for its seqs `rows`, which are the job's seqs `indexes`; the last of a job answer it."""
        if job.scorer is not None:
            part = partial(job.add_to_scorer, batch, np.array(rows), np.array(indexes))
            self._room.acquire()
            self._beside(partial(self._compare_batch, job, part, len(indexes)))
            return
        with self._writing:
            if job in self._jobs:
                job.write(batch, np.array(rows), np.array(indexes))
        if self._count(job, len(indexes)):
            self._complete(job)

    def _run(self, job: Job, parts: Sequence[Part]) -> None:
        """Compare in threads of their own, as it may take long; a few at a time, so that others' parts come between them."""
        left = iter(parts)
        for _ in parts[: self._plan.num_lanes]:
            self._beside(partial(self._run_next, job, left))

    def _run_next(self, job: Job, left: Iterator[Part]) -> None:
        if job in self._jobs and (part := next(left, None)) is not None:
            self._compare(job, part, 1)
            self._beside(partial(self._run_next, job, left))

    def _compare_batch(self, job: Job, part: Callable[[], Sequence[Part]], count: int) -> None:
        try:
            self._compare(job, part, count)
        finally:
            self._room.release()

    def _compare(self, job: Job, part: Callable[[], Sequence[Part] | None], count: int) -> None:
        """The job waits for `count` less afterwards."""
        if job not in self._jobs:
            return
        if job.request.deadline <= perf_counter():
            if self.claim(job):
                self._fail_late(job)
            return
        try:
            self._run(job, part() or ())
        except BaseException as error:  # whatever it is, the request gets an answer
            if self.claim(job):
                job.fail(_not_compared(error))
        else:
            if self._count(job, count):
                self._answer_beside(job)

    def _count(self, job: Job, count: int) -> bool:
        """So many of what a job waits for are done; whether that was all."""
        with self._writing:
            if job not in self._jobs:
                return False
            job.num_pending -= count
            return not job.num_pending

    def _complete(self, job: Job) -> None:
        """All that a job waited for is there: answer it, where nobody waits if that takes long."""
        if job.request.pair_scoring is None and job.request.reduction is None:
            self._answer(job)
        else:
            self._beside(partial(self._answer_beside, job))

    def _beside(self, action: Callable[[], None]) -> None:
        """Run in a thread that compares; here, if these have ended, as they do at the interpreter's exit."""
        try:
            self._comparing.submit(action)
        except RuntimeError as error:
            if "shutdown" not in str(error):  # it is in the queue, and no thread could be started
                raise
            action()

    def _answer(self, job: Job) -> None:
        if self.claim(job):
            job.resolve()

    def _answer_beside(self, job: Job) -> None:
        """The same in a thread that compares, where nobody else would hear of a bug."""
        try:
            self._answer(job)
        except BaseException:
            _log.critical("an answer could not be put together. This is a bug.", exc_info=True)

    def claim(self, job: Job) -> bool:
        """Take a job out, if it is there: whoever gets True answers it."""
        with self._lock:
            found = self._forget(job)
            self._changed.notify_all()  # suspects of this job may have been what others waited for
        self._wait_for_writers()
        return found

    def reset_throughput(self) -> None:
        """Measure the rate anew."""
        with self._lock:
            self._rate.reset()

    def _forget(self, job: Job) -> bool:
        self._scheduler.cancel(job)
        found = job in self._jobs
        if found:
            self._jobs.discard(job)
            self._num_bytes -= job.num_bytes
        return found

    def _on_cancel(self, job: Job | None) -> None:
        """The caller of a job, if that is still there, has left."""
        if job is not None and self.claim(job):
            count("dropped", model=self._plan.served_name)

    def _fail_late(self, job: Job) -> None:
        """Answer a job that was taken out because its time is over."""
        count("dropped", model=self._plan.served_name)
        self._wait_for_writers()
        job.fail(_too_late())

    def _batch_finished(self) -> None:
        """Something is not on its way any more."""
        self._exclusive = False
        self._in_flight -= 1
        self._changed.notify_all()

    def _wait_for_writers(self) -> None:
        """Wait until what was being written is written; what comes later sees that the job is gone."""
        with self._writing:
            pass


def _not_compared(error: BaseException) -> ComputeError:
    if isinstance(error, MemoryError):
        return OutOfMemory("there is no memory to compare the vectors of this request.")
    if isinstance(error, ComputeError):
        return error
    _log.error("vectors could not be compared", exc_info=error)
    return ComputeError(f"comparing the vectors failed ({type(error).__name__}); the server's log says more.")


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the time that this request had is over, and not all of its texts have run.")
