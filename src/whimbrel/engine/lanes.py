"""The threads that run batches: seqs in, Futures resolved.

Theory of operation. Each lane is a thread: it takes a batch, launches it and at once takes the next; the collector, one more
thread, waits for launched batches in order, checks their rows and hands them out. At most two batches per lane are on their
way. What is taken when, and who answers a job, is decided in dispatch.py.

Where the lane is the device (a CPU), the model calls back between its layers; if single queries have come meanwhile, the lane
runs a batch of them before it goes on with its own, which must be bulk.

A batch that fails, at launch or at collection, is halved and put back, until only the requests fail that fail alone; if it
failed for want of memory, batches are smaller for a while. A row that is not finite is computed again alone, in float32
(second.py). A thread that dies of a bug takes the engine with it: every waiting request is told, none hangs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from whimbrel.engine.dispatcher import Dispatcher
from whimbrel.engine.float32_retry import SecondOpinion
from whimbrel.engine.job import BatchItems, BatchObserver, BatchOutput, Job, RunnerProtocol
from whimbrel.engine.scheduler import ScheduledBatch
from whimbrel.errors import ComputeError, NonFinite, OutOfMemory
from whimbrel.outputs.rows import DeviceRows, RowSelection, finite_seqs, select_rows
from whimbrel.telemetry.trace import Timer, count, observe
from whimbrel.types.batch import Batch, pack
from whimbrel.types.card import Card
from whimbrel.types.plan import Plan
from whimbrel.types.request import OutputName
from whimbrel.types.result import Sparse
from whimbrel.types.seq import Seq

_log = logging.getLogger("whimbrel")

_BATCHES_PER_LANE: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class _TowerBatch:
    """The seqs of a batch that one of the model's towers runs: mostly all."""

    items: BatchItems
    batch: Batch
    selections: Mapping[OutputName, RowSelection]
    pending: Any


@dataclass(slots=True, eq=False)
class _InFlightBatch:
    """A batch on its way."""

    batch: ScheduledBatch[Job]
    slots: threading.Semaphore | None
    """Of its lane, one of which it holds; None between the layers of another batch."""
    slot: int
    started: float
    parts: list[_TowerBatch]


class Lanes:
    """The execution threads of one engine."""

    def __init__(
        self,
        runner: RunnerProtocol,
        card: Card,
        plan: Plan,
        *,
        load_second: Callable[[], RunnerProtocol] | None = None,
        recorder: BatchObserver | None = None,
    ) -> None:
        """`load_second` loads the runner that computes again what was not finite; by default that is `runner` itself."""
        self._runner = runner
        self._card = card
        self._model = plan.served_name
        self._recorder = recorder or _NoRecorder()
        self._dispatch = Dispatcher(plan, runner.init_thread)
        self._preempts = plan.device == "cpu"
        self._second = SecondOpinion(load_second or (lambda: runner), self._run_second, self._thread)
        self._launched: SimpleQueue[_InFlightBatch | None] = SimpleQueue()
        self._places = [threading.Semaphore(_BATCHES_PER_LANE) for _ in range(plan.num_lanes)]
        self._lanes = [self._thread(f"lane-{i}", partial(self._run_lane, places)) for i, places in enumerate(self._places)]
        self._collector = self._thread("collector", self._run_collector)
        for thread in (*self._lanes, self._collector):
            thread.start()

    @property
    def ready(self) -> bool:
        return self._dispatch.open

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a lane."""
        return self._dispatch.queued_tokens

    @property
    def small_tokens(self) -> int:
        """Those of them that belong to small requests."""
        return self._dispatch.small_tokens

    @property
    def rate(self) -> float:
        """Tokens per second while there is work, of late; 0 while nothing was measured."""
        return self._dispatch.rate

    def add(self, job: Job, *, admitted: bool = False) -> None:
        """Queue a job; its Future answers. `admitted`: it is not refused for overload, as another engine had admitted it.

        Raises Unavailable, DeadlineExceeded, Overloaded.
        """
        self._dispatch.add(job, admitted=admitted)

    def check(self, num_seqs: int, *, priority: int = 0, tenant: str = "") -> None:
        """Raise Overloaded if a request of so many texts will be refused, so that nothing more is done for it."""
        self._dispatch.check(num_seqs, priority, tenant)

    def reset_throughput(self) -> None:
        """Measure the rate anew: what ran until now was a warm-up."""
        self._dispatch.reset_throughput()

    def close(self) -> None:
        """Finish what was accepted, refuse what comes, and end the threads. May be called again."""
        self._dispatch.close()
        for lane in self._lanes:
            lane.join()
        self._launched.put(None)
        self._collector.join()
        self._second.close()
        self._dispatch.join()

    # Threads

    def _thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._guard, args=(body,), name=f"whimbrel-{name}", daemon=True)

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException:
            _log.critical("a thread of the engine died. This is a bug.", exc_info=True)
            self._dispatch.fail_all()
            for places in self._places:
                places.release(_BATCHES_PER_LANE)

    def _run_lane(self, places: threading.Semaphore) -> None:
        self._runner.init_thread()
        while True:
            places.acquire()
            if not (taken := self._dispatch.take()):
                return
            self._launch(taken, places)
            del taken  # while nothing comes, the memory of what was is not kept

    def _run_collector(self) -> None:
        while (flight := self._launched.get()) is not None:
            self._collect(flight)
            del flight

    def _preempt(self, priority: int, slot: int) -> None:
        """Called between the layers of a bulk batch: run one batch of small jobs, if any wait."""
        if self._dispatch.small_tokens and (taken := self._dispatch.take_small(priority)):
            self._launch(taken, None)
            self._recorder.resumed(slot)

    def _launch(self, taken: ScheduledBatch[Job], places: threading.Semaphore | None) -> None:
        started = perf_counter()
        slot = self._recorder.started(taken.items)
        between_layers = partial(self._preempt, taken.priority, slot) if self._preempts and taken.kind == "bulk" else None
        try:
            parts = [self._start(work, between_layers) for work in self._by_tower(taken.items)]
        except BaseException as error:  # whatever it is, the requests get an answer and the lane lives
            self._failed(taken, slot, error)
            self._done(taken, places)
        else:
            self._launched.put(_InFlightBatch(taken, places, slot, started, parts))

    def _by_tower(self, work: BatchItems) -> list[BatchItems]:
        if not self._card.towers:
            return [work]
        parts: dict[int, BatchItems] = {}
        for job, seq in work:
            parts.setdefault(seq.tower, []).append((job, seq))
        return list(parts.values())

    def _start(self, work: BatchItems, between_layers: Callable[[], None] | None = None) -> _TowerBatch:
        with Timer("pack"):
            batch, wants = self._pack(work)
        return _TowerBatch(work, batch, wants, self._runner.launch(batch, wants, between_layers))

    def _pack(self, work: BatchItems) -> tuple[Batch, dict[OutputName, RowSelection]]:
        card = self._card.tower(work[0][1].tower)
        encoder = card.encoder
        batch = pack([seq for _, seq in work], position_offset=encoder.position_offset, pad_id=encoder.pad_id)
        places: list[int] = batch.order_B.tolist()
        return batch, select_rows(card, batch, [work[place][0].request.layout for place in places])

    def _collect(self, flight: _InFlightBatch) -> None:
        taken = flight.batch
        try:
            with Timer("collect"):
                given = [self._checked(self._runner, part) for part in flight.parts]
        except BaseException as error:
            self._failed(taken, flight.slot, error)
            self._done(taken, flight.slots)
        else:
            self._recorder.ended(flight.slot)
            num_tokens = sum(seq.ids.size for _, seq in taken.items)
            observe("batch_tokens", num_tokens, model=self._model)
            observe("batch_seqs", len(taken.items), model=self._model)
            self._done(taken, flight.slots, num_tokens)
            seconds = perf_counter() - flight.started
            observe("compute", seconds)
            for part, rows in zip(flight.parts, given, strict=True):
                self._deliver(part, rows, seconds)

    def _checked(self, runner: RunnerProtocol, part: _TowerBatch) -> BatchOutput:
        """What a runner gives for what it was launched with. Raises if that is not what was wanted."""
        given, outputs = runner.collect(part.pending), self._card.tower(part.batch.tower).all_outputs
        for name, each in part.selections.items():
            rows, output = given[name], outputs[name]
            num_rows, width = int(each.offsets_B1[-1]), output.width
            if isinstance(rows, Sparse):
                right = len(rows) == num_rows
            elif isinstance(rows, DeviceRows):
                right = rows.rows_PD.shape == (num_rows, width) and rows.finite_P.size == num_rows
            else:
                right = rows.shape == (num_rows, width) and rows.dtype == np.float32
            if not right:
                raise RuntimeError(f"the runner did not give {num_rows} rows of {width} as {name}")
        return BatchOutput(part.selections, given)

    def _done(self, taken: ScheduledBatch[Job], places: threading.Semaphore | None, num_tokens: int = 0) -> None:
        self._dispatch.batch_done(taken, num_tokens)
        if places is not None:
            places.release()

    def _failed(self, taken: ScheduledBatch[Job], slot: int, error: BaseException) -> None:
        """Put the halves back, so that only what fails alone fails."""
        self._recorder.ended(slot)
        out_of_memory = isinstance(error, MemoryError)
        if out_of_memory:
            count("out_of_memory", model=self._model)
        if len(taken.items) > 1:
            count("halvings", model=self._model)
            _log.warning("a batch of %d texts failed and is run again in halves: %r", len(taken.items), error)
            self._dispatch.requeue(taken, out_of_memory=out_of_memory)
            return
        if out_of_memory and taken.kind != "suspect":  # what ran beside it may have taken the memory
            self._dispatch.requeue(taken, out_of_memory=False)
            return
        job, seq = taken.items[0]
        _log.error("a text of %d tokens failed alone", seq.ids.size, exc_info=error)
        if self._dispatch.claim(job):
            job.fail(_answer(seq, error))

    def _deliver(self, part: _TowerBatch, given: BatchOutput, seconds: float) -> None:
        """Hand every job its rows; those that are not finite are computed again."""
        finite_B: list[bool] = _finite(given, len(part.items)).tolist()
        rows: dict[Job, tuple[list[int], list[int]]] = {}
        bad: BatchItems = []
        places: list[int] = part.batch.order_B.tolist()
        for row, place in enumerate(places):
            job, seq = part.items[place]
            of_job = rows.setdefault(job, ([], []))
            if finite_B[row]:
                of_job[0].append(row)
                of_job[1].append(seq.index)
            else:
                bad.append((job, seq))
        for job, (rows_of_job, indexes) in rows.items():
            job.compute += seconds
            if indexes:
                self._dispatch.deliver(job, given, rows_of_job, indexes)
        for job, seq in bad:
            count("non_finite_retries", model=self._model)
            self._second.add(job, seq)

    def _run_second(self, job: Job, seq: Seq, runner: RunnerProtocol | None) -> None:
        """Compute a text again whose vector was not finite."""
        if not self._dispatch.begin_beside(job):
            return
        slot = self._recorder.started([(job, seq)])
        given: BatchOutput | None = None
        try:
            if runner is not None:
                batch, wants = self._pack([(job, seq)])
                given = self._checked(runner, _TowerBatch([(job, seq)], batch, wants, runner.launch(batch, wants)))
        except BaseException as error:  # whatever it is, the request gets an answer
            _log.error("a text of %d tokens failed in the second runner", seq.ids.size, exc_info=error)
        self._recorder.ended(slot)
        self._dispatch.end_beside()
        if given is not None and _finite(given, 1).all():
            self._dispatch.deliver(job, given, [0], [seq.index])
        elif self._dispatch.claim(job):
            again = "in float32 too" if runner else "and it could not be computed again"
            job.fail(NonFinite(f"the model gives NaN or infinity for this text, {again}.", item=seq.index))


class _NoRecorder:
    """Where nobody wants to know."""

    def started(self, work: BatchItems) -> int:
        return 0

    def resumed(self, slot: int) -> None: ...

    def ended(self, slot: int) -> None: ...


def _finite(given: BatchOutput, num_seqs: int) -> NDArray[np.bool_]:
    finite_B = np.ones(num_seqs, np.bool_)
    for name, rows in given.outputs.items():
        finite_B &= finite_seqs(rows, given.selections[name].offsets_B1)
    return finite_B


def _answer(seq: Seq, error: BaseException) -> ComputeError:
    if isinstance(error, MemoryError):
        return OutOfMemory(f"this text of {seq.ids.size:,} tokens does not fit into the device's memory.", item=seq.index)
    return ComputeError(f"the computation failed ({type(error).__name__}); the server's log says more.", item=seq.index)
