"""Dispatcher: the queue of one engine, its batches in flight, and its jobs, each of which is answered exactly once.

Theory of operation. One lock guards the scheduler, the set of unanswered jobs and the count of batches in flight. The
thread that removes a job from the set must answer it. It does so after it has released the lock, since a Future runs its
callbacks in that thread. A second lock is held while rows are written into a response. The thread that answers a job acquires
it once after the removal. So nothing is written into a response once its Future is done, and its memory may be used again.

Suspects are the seqs that were on the device when an engine died. They run alone: the dispatcher hands them out when no batch
is in flight, and nothing else until they are done.

It runs no batch and no finisher, except for the last step of a job: `answer` asks the finisher for the result.
"""

import os
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from time import perf_counter
from weakref import ref

from whimbrel.engine.admission import QueueState, ThroughputEstimate, admit
from whimbrel.engine.engine_request import Job
from whimbrel.engine.scheduler import ScheduledBatch, Scheduler
from whimbrel.errors import ComputeError, DeadlineExceeded, OutOfMemory, Unavailable, WhimbrelError
from whimbrel.outputs.finishers import locate_error
from whimbrel.telemetry.trace import count, observe
from whimbrel.types.batch import RowCount
from whimbrel.types.plan import Plan
from whimbrel.types.result import Timings
from whimbrel.types.scheduling import ORDINARY, Scheduling


@dataclass(frozen=True, slots=True)
class LoadStats:
    queued_tokens: int
    small_tokens: int
    """Queued tokens that belong to small requests, which run first."""
    ordinary_tokens: int
    """Queued tokens without those that are less urgent than an ordinary request."""
    ordinary_small_tokens: int
    tokens_per_second: float
    """Recent throughput while there was work; 0 before anything was measured."""


@dataclass(frozen=True, slots=True, eq=False)
class _Selection:
    batch: ScheduledBatch[Job] | None
    started: list[Job]
    """Jobs whose first batch this is."""
    expired: list[Job]


class Dispatcher:
    """The queue of one engine and its bookkeeping. Safe to use from many threads."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._scheduler = Scheduler[Job](plan.max_batch_tokens)
        self._throughput = ThroughputEstimate()
        self._jobs: set[Job] = set()
        self._num_bytes = 0
        self._retries: deque[ScheduledBatch[Job]] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # lanes wait here
        self._overtaken = threading.Condition(self._lock)  # the express lane waits here
        self._writing = threading.Lock()
        self._process = os.getpid()
        self._num_idle = 0
        self._in_flight = 0
        self._overtakable: list[int] = []
        """The last priority of small requests that may overtake it, for each batch in flight where there is one."""
        self._exclusive = False
        self._closed = False
        self._broken = False

    @property
    def is_open(self) -> bool:
        return not self._closed

    @property
    def load(self) -> LoadStats:
        waits = self._scheduler
        ordinary = waits.ordinary_tokens, waits.ordinary_small_tokens
        return LoadStats(waits.queued_tokens, waits.small_tokens, *ordinary, self._throughput.value)

    @property
    def token_budget(self) -> int:
        """Limit in tokens of a batch: that of the plan, or less after a shortage of memory."""
        return self._scheduler.token_budget

    # Jobs in

    def submit(self, job: Job, *, admitted: bool = False) -> None:
        """Queue a job. Raises Unavailable, DeadlineExceeded, and Overloaded unless another engine had `admitted` it."""
        scheduling = job.request.scheduling
        self._check_process()
        with self._lock:
            if self._closed:
                raise Unavailable("the engine is closed.")
            if scheduling.deadline <= perf_counter():
                raise _deadline_exceeded()
            if not admitted:
                self._admit(job.num_tokens, scheduling, num_bytes=job.num_bytes)
            self._jobs.add(job)
            self._num_bytes += job.num_bytes
            first, head_start = job.finisher.first_seqs, scheduling.waited * self._throughput.value
            self._scheduler.add(job, job.seqs, job.num_tokens, scheduling, first=first, head_start=head_start)
            self._changed.notify(self._scheduler.num_shares)  # a lane that is woken for nothing takes time from the others
            self._wake_express()
        weak = ref(job)  # the Future must not keep alive the job that keeps the Future
        job.future.add_done_callback(lambda future: self._on_cancel(weak()) if future.cancelled() else None)

    def check_admission(self, num_seqs: int, scheduling: Scheduling) -> None:
        """Raise Overloaded if a request of `num_seqs` texts would be refused, before anything is done for it."""
        self._check_process()
        with self._lock:
            self._admit(num_seqs, scheduling)

    def _check_process(self) -> None:
        """Raise Unavailable in a forked child, before it waits for a lock that no thread there can release."""
        if os.getpid() != self._process:
            raise Unavailable("the engine was loaded before a fork, and its threads stayed behind; load it afterwards.")

    def _admit(self, tokens: int, scheduling: Scheduling, *, num_bytes: int = 0) -> None:
        scheduler = self._scheduler
        is_ordinary = scheduling.priority <= ORDINARY.priority
        waiting = scheduler.ordinary_tokens if is_ordinary else scheduler.queued_tokens
        if not waiting:
            return  # an empty queue admits everything; less urgent requests take no room from this one
        ahead = scheduler.tokens_ahead(tokens, scheduling.priority, tenant=scheduling.tenant)
        queue = QueueState(waiting, ahead, self._num_bytes, self._throughput.value)
        small, returns, jitter = scheduler.kind_of(tokens) == "small", scheduling.waited > 0, random.random()  # noqa: S311
        admit(self._plan, queue, tokens=tokens, num_bytes=num_bytes, small=small, returns=returns, jitter=jitter)

    # Batches out

    def take(self) -> ScheduledBatch[Job] | None:
        """Wait for a batch. Return None when the dispatcher is closed and nothing is left or can come back."""
        while True:
            with self._lock:
                self._num_idle += 1
                selection = self._wait(self._next, self._changed)
                self._num_idle -= 1
            self._emit(selection)
            if selection.batch or not selection.expired:
                return selection.batch

    def take_express(self) -> ScheduledBatch[Job] | None:
        """Wait for a small batch that may overtake the bulk on all lanes. Return None when the dispatcher is closed."""
        while True:
            with self._lock:
                selection = self._wait(self._next_express, self._overtaken)
            self._emit(selection)
            if selection.batch or not selection.expired:
                return selection.batch

    def take_small(self, priority: int) -> ScheduledBatch[Job] | None:
        """Return a small batch that may overtake a batch of this priority in flight, if one waits."""
        if not self._scheduler.small_tokens:
            return None
        with self._lock:
            selection = self._select(lambda now: self._next_small(now, priority))
        self._emit(selection)
        return selection.batch

    def _wait(self, choose: Callable[[float], ScheduledBatch[Job] | None], changed: threading.Condition) -> _Selection:
        while True:
            selection = self._select(choose)
            if selection.batch or selection.expired or self._broken or (self._closed and not self._in_flight):
                return selection
            wake_at = self._scheduler.wake_at
            changed.wait(None if wake_at == inf else min(max(0.0, wake_at - perf_counter()), threading.TIMEOUT_MAX))

    def _next(self, now: float) -> ScheduledBatch[Job] | None:
        suspects = self._suspects_are_next()
        if self._exclusive or (self._in_flight and suspects):
            return None
        if not self._retry_is_next():
            return self._scheduler.take(now, self._num_idle)
        batch = self._retries.popleft()
        return replace(batch, items=[(job, seq) for job, seq in batch.items if job in self._jobs])

    def _next_express(self, now: float) -> ScheduledBatch[Job] | None:
        if self._num_idle or not self._overtakable:
            return None  # an idle lane takes it, or it takes its turn among small batches
        return self._next_small(now, max(self._overtakable))

    def _next_small(self, now: float, priority: int) -> ScheduledBatch[Job] | None:
        return None if self._exclusive or self._suspects_are_next() else self._scheduler.take_small(now, priority)

    def _wake_express(self) -> None:
        waiting = self._scheduler
        if self._overtakable and waiting.small_tokens and waiting.first_priority <= max(self._overtakable):
            self._overtaken.notify()

    def _suspects_are_next(self) -> bool:
        return self._retries[0].kind == "suspect" if self._retry_is_next() else self._scheduler.suspects_are_next

    def _retry_is_next(self) -> bool:
        """Return whether a batch that failed runs next: before others, unless more urgent ones wait."""
        while self._retries and not any(job in self._jobs for job, _ in self._retries[0].items):
            self._retries.popleft()  # answered meanwhile
        return bool(self._retries) and self._retries[0].priority <= self._scheduler.first_priority

    def _select(self, choose: Callable[[float], ScheduledBatch[Job] | None]) -> _Selection:
        """Remove the jobs that expired, then choose a batch, and account for both."""
        now = perf_counter()
        retried = [job for batch in self._retries for job, _ in batch.items if job.request.scheduling.deadline <= now]
        expired = [job for job in (*self._scheduler.expire(now), *retried) if self._remove(job)]
        if expired:
            self._changed.notify_all()  # lanes may have waited for suspects among them
        batch = choose(now)
        started = {job for job, _ in batch.items if job.queue < 0} if batch else ()
        for job in started:
            job.queue = now - job.request.received - job.request.tokenize
        if batch:
            self._in_flight += 1
            self._exclusive = batch.kind == "suspect"
            if (priority := _overtaken_by(batch)) is not None:
                self._overtakable.append(priority)
            if self._scheduler.queued_tokens or self._retries:
                self._changed.notify()  # another lane takes the rest, or waits for its deadlines
                self._wake_express()
            self._throughput.begin(now)
        return _Selection(batch, list(started), expired)

    def _emit(self, selection: _Selection) -> None:
        for job in selection.expired:
            self._fail_expired(job)
        for job in selection.started:
            if job.request.scheduling.priority <= ORDINARY.priority:  # the wait of what yields is that of a batch file
                observe("queue", job.queue, model=self._plan.served_name)

    def _look_again(self) -> None:
        """Wake lanes that waited for suspects, or for those beside which these could not run, and `join`."""
        if self._closed or self._retries or self._scheduler.queued_tokens:
            self._changed.notify_all()
            self._overtaken.notify_all()

    # Batches back

    def batch_done(self, batch: ScheduledBatch[Job], num_tokens: int, seconds: float = 0.0) -> None:
        """Note that a batch took `seconds` and has computed `num_tokens` tokens, or that it failed (0)."""
        with self._lock:
            if num_tokens:
                for job in {job for job, _ in batch.items}:
                    job.compute += seconds
            if (priority := _overtaken_by(batch)) is not None:
                self._overtakable.remove(priority)
            self._throughput.end(perf_counter(), num_tokens)
            if num_tokens:
                self._scheduler.succeeded()
            self._exclusive = False
            self._in_flight -= 1
            self._look_again()

    def requeue(self, batch: ScheduledBatch[Job], *, lower_budget: bool) -> None:
        """Run a batch that failed again: in halves, or a single text alone on the device. Call it before `batch_done`."""
        middle = len(batch.items) // 2
        with self._lock:
            if lower_budget:
                self._scheduler.out_of_memory(RowCount(seq for _, seq in batch.items).num_rows)
            if middle:
                self._retries += [replace(batch, items=half) for half in (batch.items[:middle], batch.items[middle:])]
            else:
                self._retries.append(replace(batch, kind="suspect"))
            self._retries = deque(sorted(self._retries, key=attrgetter("priority")))
            self._changed.notify_all()

    # Answers

    def is_waiting(self, job: Job) -> bool:
        """Return whether the job is not answered yet. It may be by the time the caller looks at the result.

        A job whose deadline has passed is answered with DeadlineExceeded.
        """
        if job in self._jobs and job.request.scheduling.deadline <= perf_counter() and self._claim(job):
            self._fail_expired(job)
        return job in self._jobs

    def advance(self, job: Job, count: int, write: Callable[[], object] | None = None) -> bool:
        """Note that `count` seqs or steps of the job are done, after `write` has written their rows into its response.

        Return whether these were the last. Nothing is written into the response of a job that is answered.
        """
        with self._writing:
            if job not in self._jobs:
                return False
            if write is not None:
                write()
            job.num_pending -= count
            return not job.num_pending

    def answer(self, job: Job) -> None:
        if not self._claim(job) or not job.future.set_running_or_notify_cancel():
            return
        request = job.request
        try:
            outputs = job.finisher.result()
        except MemoryError:
            job.future.set_exception(OutOfMemory("there is no memory to put the answer together."))
        except WhimbrelError as error:
            job.future.set_exception(locate_error(error, request.finish))
        except BaseException as error:  # a bug: the caller is told before it ends the thread that found it
            job.future.set_exception(ComputeError(f"the answer could not be put together ({type(error).__name__})."))
            raise
        else:
            timings = Timings(request.tokenize, max(0.0, job.queue), job.compute, perf_counter() - request.received)
            job.future.set_result(request.result(outputs, timings))

    def fail(self, job: Job, error: WhimbrelError) -> None:
        if self._claim(job):
            _set_error(job, error)

    def _claim(self, job: Job) -> bool:
        """Remove a job. The caller must answer it if this returns True."""
        with self._lock:
            removed = self._remove(job)
            self._look_again()
        self._wait_for_writers()
        return removed

    def _remove(self, job: Job) -> bool:
        self._scheduler.cancel(job)
        removed = job in self._jobs
        if removed:
            self._jobs.discard(job)
            self._num_bytes -= job.num_bytes
        return removed

    def _on_cancel(self, job: Job | None) -> None:
        if job is not None and self._claim(job):
            count("dropped", model=self._plan.served_name)

    def _fail_expired(self, job: Job) -> None:
        count("dropped", model=self._plan.served_name)
        self._wait_for_writers()
        _set_error(job, _deadline_exceeded())

    def _wait_for_writers(self) -> None:
        """Wait until the writer of this moment is done. Later ones see that the job is gone."""
        with self._writing:
            pass

    # The end

    def reset_throughput(self) -> None:
        """Measure the throughput anew: what ran until now was a warm-up."""
        with self._lock:
            self._throughput.reset()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            self._overtaken.notify_all()

    def join(self) -> None:
        """Wait until every job is answered. Call it after `close`, when no batch is left."""
        with self._lock:
            self._changed.wait_for(lambda: not self._jobs)

    def fail_all(self) -> None:
        """Answer every job with Unavailable; accept and hand out nothing more."""
        with self._lock:
            self._closed = self._broken = True
            jobs = [job for job in list(self._jobs) if self._remove(job)]
            self._changed.notify_all()
            self._overtaken.notify_all()
        self._wait_for_writers()
        for job in jobs:
            _set_error(job, Unavailable("the engine has stopped."))


def _overtaken_by(batch: ScheduledBatch[Job]) -> int | None:
    """Return the last priority whose small requests may overtake a batch in flight, None if none may.

    Bulk is overtaken by requests as urgent; any batch less urgent than ordinary requests, by more urgent ones.
    """
    if batch.kind == "bulk":
        return batch.priority
    return batch.priority - 1 if batch.priority > ORDINARY.priority else None


def _set_error(job: Job, error: WhimbrelError) -> None:
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(locate_error(error, job.request.finish))


def _deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the time that this request had is over, and not all of its texts have run.")
