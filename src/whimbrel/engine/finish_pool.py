"""Finish pool: the threads that run the slow work of finishers, such as late interaction and token pooling.

The thread that collects a batch must go on soon, and only scatters its rows. Everything else of a finisher runs here, a few
steps of a job at a time, so that the steps of others come between them. Finishers that take a batch's rows on a GPU do so
together, with one wait for the device. Knows no lanes and no batches in flight.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from whimbrel.engine.dispatcher import Dispatcher
from whimbrel.engine.engine_request import Job
from whimbrel.errors import ComputeError, OutOfMemory, Unavailable
from whimbrel.outputs.finishers import AddTogether, Step
from whimbrel.outputs.rows import BatchOutput
from whimbrel.types.arrays import Int64Array

_log = logging.getLogger("whimbrel")

_UNFINISHED_PER_LANE: Final = 8
"""Deliveries that may wait for a thread. Beyond it the thread that delivers rows waits too, so that vectors do not pile up."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Seqs of a batch that belong to one job: seqs_B[i] of the batch is seqs_S[i] of the job."""

    job: Job
    seqs_B: Int64Array
    seqs_S: Int64Array


class FinishPool:
    """Carries out the finishers of jobs, and answers the jobs. Safe to use from many threads."""

    def __init__(self, dispatcher: Dispatcher, num_threads: int, init_thread: Callable[[], None]) -> None:
        """`init_thread` is called once by each thread, before anything else."""
        self._dispatcher = dispatcher
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "whimbrel-finish", initializer=init_thread)
        self._slots = threading.Semaphore(_UNFINISHED_PER_LANE * num_threads)

    def submit(self, job: Job, *, admitted: bool = False) -> None:
        """Queue a job and run the steps that need no seq. Raises as `Dispatcher.submit`."""
        steps = job.finisher.take_steps()  # before a lane can add rows, so that each step runs once
        is_complete = not job.num_pending
        self._dispatcher.submit(job, admitted=admitted)
        self._run_steps(job, steps)
        if is_complete:
            self._complete(job)

    def deliver(self, batch: BatchOutput, parts: Sequence[Part]) -> None:
        """Give each job the rows of a batch that are its own. The last of them answer it."""
        together: dict[AddTogether, list[Part]] = {}
        for part in parts:
            finisher = part.job.finisher
            if (function := finisher.together(batch)) is not None:
                together.setdefault(function, []).append(part)
                continue
            add = partial(finisher.add, batch, part.seqs_B, part.seqs_S)
            if finisher.adds_slowly:
                self._in_slot(partial(self._run, part.job, add, part.seqs_S.size))
            elif self._dispatcher.advance(part.job, part.seqs_S.size, add):
                self._complete(part.job)
        for function, parts_of_it in together.items():
            self._in_slot(partial(self._add_together, function, batch, parts_of_it))

    def close(self) -> None:
        """Wait until every job is answered, then end the threads. Call it when no batch is left."""
        self._dispatcher.join()
        self._threads.shutdown()

    def _in_slot(self, action: Callable[[], None]) -> None:
        """Run an action in the pool, once there are few others."""

        def in_slot() -> None:
            try:
                action()
            finally:
                self._slots.release()

        self._slots.acquire()
        self._in_pool(in_slot)

    def _add_together(self, function: AddTogether, batch: BatchOutput, parts: Sequence[Part]) -> None:
        waiting = [part for part in parts if self._dispatcher.is_waiting(part.job)]
        try:
            outcomes = function(batch, [(part.job.finisher, part.seqs_B, part.seqs_S) for part in waiting])
        except BaseException as error:  # whatever it is, the requests get an answer
            outcomes = [error] * len(waiting)
        for part, outcome in zip(waiting, outcomes, strict=True):
            self._run(part.job, partial(_steps_of, outcome), part.seqs_S.size)

    def _run_steps(self, job: Job, steps: Sequence[Step]) -> None:
        remaining = iter(steps)
        for _ in steps[: self._num_threads]:
            self._in_pool(partial(self._run_next, job, remaining))

    def _run_next(self, job: Job, remaining: Iterator[Step]) -> None:
        if self._dispatcher.is_waiting(job) and (step := next(remaining, None)) is not None:
            self._run(job, step, 1)
            self._in_pool(partial(self._run_next, job, remaining))

    def _run(self, job: Job, action: Callable[[], Sequence[Step] | None], count: int) -> None:
        """Run an action of the job's finisher, which is worth `count` of its pending seqs or steps."""
        if not self._dispatcher.is_waiting(job):
            return
        try:
            self._run_steps(job, action() or ())
        except Unavailable as error:  # the device is lost, and with it the engine: other engines take what it has
            _log.critical("%s The engine ends.", error)
            self._dispatcher.fail_all()
        except BaseException as error:  # whatever it is, the request gets an answer
            self._dispatcher.fail(job, _to_error(error))
        else:
            if self._dispatcher.advance(job, count):
                self._answer(job)

    def _complete(self, job: Job) -> None:
        if job.finisher.finishes_slowly:
            self._in_pool(partial(self._answer, job))
        else:
            self._dispatcher.answer(job)

    def _answer(self, job: Job) -> None:
        try:
            self._dispatcher.answer(job)
        except BaseException:
            _log.critical("a response could not be computed. This is a bug.", exc_info=True)

    def _in_pool(self, action: Callable[[], None]) -> None:
        """Run an action in a thread of the pool; in this thread if the pool has ended, as it has at the interpreter's exit."""
        try:
            self._threads.submit(action)
        except RuntimeError as error:
            if "shutdown" not in str(error):  # the action is queued, but no thread could be started
                raise
            action()


def _steps_of(outcome: Sequence[Step] | BaseException) -> Sequence[Step]:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _to_error(error: BaseException) -> ComputeError:
    if isinstance(error, MemoryError):
        return OutOfMemory("there is no memory to compare the vectors of this request.")
    if isinstance(error, ComputeError):
        return error
    _log.error("vectors could not be compared", exc_info=error)
    return ComputeError(f"comparing the vectors failed ({type(error).__name__}); the server's log says more.")
