"""Lanes: the threads that run batches. They launch, collect and answer.

Theory of operation. Each lane is a thread: it takes a batch from the dispatcher, launches it, and takes the next at once. The
collector is one more thread: it waits for launched batches in order, checks their rows and delivers them to the finish pool,
which fills the responses and answers. Each lane has at most two batches of its own in flight. Where the lane is the device (a
CPU) and nothing else waits, it does the collector's work itself, which spares a lone request the way to another thread.

On a CPU there is one lane more, the express lane. It waits for small requests that come while all lanes are busy with bulk,
and runs and collects them at once. On Linux its thread has a higher priority than the lanes', so the kernel gives it a core
without delay. On a GPU a text that runs in pieces gives way to a small batch between them. On any device the rest of it does
not run if its request is answered meanwhile.

A thread that dies of a bug, or because the device is lost, takes the engine with it: every waiting request is told.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from sys import maxsize
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from whimbrel.engine.dispatcher import Dispatcher
from whimbrel.engine.engine_request import BatchItems, BatchObserver, Job
from whimbrel.engine.finish_pool import FinishPool, Part
from whimbrel.engine.scheduler import ScheduledBatch
from whimbrel.errors import ComputeError, NonFinite, OutOfMemory, Unavailable
from whimbrel.outputs.rows import BatchOutput, CheckedRows, DeviceRows, OutputRows, RowSelection, finite_seqs, select_rows
from whimbrel.telemetry.trace import Timer, count, observe
from whimbrel.types.batch import Batch, pack
from whimbrel.types.card import Card
from whimbrel.types.plan import Plan
from whimbrel.types.request import OutputName
from whimbrel.types.result import Sparse
from whimbrel.types.seq import Seq

if TYPE_CHECKING:
    from whimbrel.model.runner import Runner

_log = logging.getLogger("whimbrel")

_BATCHES_PER_LANE: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class _TowerBatch:
    """The seqs of a batch that one tower of the model runs; most models have one tower."""

    items: BatchItems
    batch: Batch
    selections: Mapping[OutputName, RowSelection]
    pending: Any
    """The batch on the device, as `launch` returned it."""


@dataclass(slots=True, eq=False)
class _InFlightBatch:
    batch: ScheduledBatch[Job]
    slots: threading.Semaphore | None
    """The semaphore of its lane, of which it holds one permit; None if it overtakes the batches of the lanes."""
    started: float
    observer_slot: int
    towers: Sequence[_TowerBatch] = ()


class Lanes:
    def __init__(
        self, runner: Runner, card: Card, plan: Plan, dispatcher: Dispatcher, finishing: FinishPool, *, observer: BatchObserver
    ) -> None:
        self._runner = runner
        self._card = card
        self._model = plan.served_name
        self._dispatcher = dispatcher
        self._finishing = finishing
        self._observer = observer
        self._on_cpu = plan.device == "cpu"
        self._piece_tokens = plan.max_batch_tokens if plan.chunked_prefill else maxsize
        self._launched: SimpleQueue[_InFlightBatch | None] = SimpleQueue()
        self._slots = [threading.Semaphore(_BATCHES_PER_LANE) for _ in range(plan.num_lanes)]
        self._lanes = [self._thread(f"lane-{i}", partial(self._run_lane, slots)) for i, slots in enumerate(self._slots)]
        if self._on_cpu:
            self._lanes.append(self._thread("express", self._run_express))
        self._collector = self._thread("collector", self._run_collector)
        for thread in (*self._lanes, self._collector):
            thread.start()

    def close(self) -> None:
        """Finish what was accepted, refuse what comes, and end the threads. May be called again."""
        self._dispatcher.close()
        for lane in self._lanes:
            lane.join()
        self._launched.put(None)
        self._collector.join()

    # Launch, collect, answer

    def _run_lane(self, slots: threading.Semaphore) -> None:
        self._runner.init_thread()
        while True:
            slots.acquire()
            if not (batch := self._dispatcher.take()):
                return
            self._launch(batch, slots)
            del batch  # an idle lane keeps no memory of its last batch

    def _run_express(self) -> None:
        self._runner.init_thread(urgent=True)
        while batch := self._dispatcher.take_express():
            self._launch(batch, None)
            del batch

    def _launch(self, batch: ScheduledBatch[Job], slots: threading.Semaphore | None) -> None:
        flight = _InFlightBatch(batch, slots, perf_counter(), self._observer.started(batch.items))
        try:
            between_pieces = self._between_pieces(batch, flight.observer_slot)
            flight.towers = [self._launch_tower(items, between_pieces) for items in self._by_tower(batch.items)]
        except _Abandoned:
            self._observer.ended(flight.observer_slot)
            self._end(flight)
        except BaseException as error:  # whatever it is, the requests get an answer and the lane lives
            self._batch_failed(flight, error)
        else:
            if self._on_cpu and (slots is None or not self._dispatcher.load.queued_tokens):
                self._collect(flight)  # this thread is the device, and has nothing else to do
            else:
                self._launched.put(flight)

    def _run_collector(self) -> None:
        while (flight := self._launched.get()) is not None:
            self._collect(flight)
            del flight

    def _collect(self, flight: _InFlightBatch) -> None:
        try:
            with Timer("collect", model=self._model):
                outputs = [self._collect_tower(tower) for tower in flight.towers]
        except BaseException as error:  # whatever it is, the requests get an answer and the thread lives
            self._batch_failed(flight, error)
        else:
            self._batch_done(flight)
            for tower, output in zip(flight.towers, outputs, strict=True):
                self._answer(tower, output)

    def _answer(self, tower: _TowerBatch, output: BatchOutput) -> None:
        """Deliver to every job its rows. A row that is not finite fails its job."""
        finite = [finite_seqs(rows, output.selections[name].offsets_B1) for name, rows in output.rows.items()]
        finite_B: list[bool] = np.logical_and.reduce(finite or [np.ones(len(tower.items), np.bool_)]).tolist()
        rows: dict[Job, tuple[list[int], list[int]]] = {}
        order: list[int] = tower.batch.order_B.tolist()
        for row, item in enumerate(order):
            job, seq = tower.items[item]
            of_batch, of_job = rows.setdefault(job, ([], []))
            if finite_B[row]:
                of_batch.append(row)
                of_job.append(seq.index)
            else:
                count("non_finite", model=self._model)
                message = "the model gives NaN or infinity for this text. Load it with --dtype float32, or leave the text out."
                self._dispatcher.fail(job, NonFinite(message, item=seq.index))
        parts = [Part(job, np.array(of_batch), np.array(of_job)) for job, (of_batch, of_job) in rows.items() if of_job]
        self._finishing.deliver(output.unchecked(), parts)

    # Parts of these

    def _between_pieces(self, batch: ScheduledBatch[Job], observer_slot: int) -> Callable[[], None] | None:
        """Return the function that the model calls between two pieces of a long text, and between its layers."""
        job, seq = batch.items[0]
        if len(batch.items) > 1 or seq.ids.size - seq.prefix_tokens <= self._piece_tokens:
            return None

        def between_pieces() -> None:
            if not self._dispatcher.is_waiting(job):
                raise _Abandoned
            if not self._on_cpu and (small := self._dispatcher.take_small(batch.priority)):
                self._launch(small, None)
            self._observer.resumed(observer_slot)

        return between_pieces

    def _by_tower(self, items: BatchItems) -> list[BatchItems]:
        if not self._card.towers:
            return [items]
        by_tower: dict[int, BatchItems] = {}
        for job, seq in items:
            by_tower.setdefault(seq.tower, []).append((job, seq))
        return list(by_tower.values())

    def _launch_tower(self, items: BatchItems, between_pieces: Callable[[], None] | None) -> _TowerBatch:
        with Timer("pack", model=self._model):
            card = self._card.tower(items[0][1].tower)
            encoder = card.encoder
            batch = pack([seq for _, seq in items], position_offset=encoder.position_offset, pad_id=encoder.pad_id)
            order: list[int] = batch.order_B.tolist()
            selections = select_rows(card, batch, [items[item][0].request.layout for item in order])
        return _TowerBatch(items, batch, selections, self._runner.launch(batch, selections, between_pieces))

    def _collect_tower(self, tower: _TowerBatch) -> BatchOutput:
        """Return the selected rows of one tower's batch. Raises RuntimeError if they have another shape."""
        rows = self._runner.collect(tower.pending)
        outputs = self._card.tower(tower.batch.tower).all_outputs
        for name, selection in tower.selections.items():
            shape = int(selection.offsets_B1[-1]), selection.num_columns(outputs[name])
            if not _has_shape(rows[name], *shape):
                raise RuntimeError(f"the runner did not give {shape[0]} rows of {shape[1]} as {name}")
        return BatchOutput(tower.selections, rows)

    def _batch_done(self, flight: _InFlightBatch) -> None:
        self._observer.ended(flight.observer_slot)
        seconds = perf_counter() - flight.started
        observe("compute", seconds, model=self._model)
        num_tokens = sum(tower.batch.num_tokens for tower in flight.towers)
        observe("batch_tokens", num_tokens, model=self._model)
        observe("batch_seqs", len(flight.batch.items), model=self._model)
        self._end(flight, num_tokens, seconds)

    def _batch_failed(self, flight: _InFlightBatch, error: BaseException) -> None:
        """Requeue the halves of a batch, so that only a text that fails alone fails.

        Raises Unavailable if the device is lost. The observer is not told: its texts are suspects, as if the process had died.
        """
        if isinstance(error, Unavailable):
            raise error
        batch, out_of_memory = flight.batch, isinstance(error, MemoryError)
        self._observer.ended(flight.observer_slot)
        if out_of_memory:
            count("out_of_memory", model=self._model)
        if len(batch.items) > 1:
            count("halvings", model=self._model)
            _log.warning("a batch of %d texts failed and is run again in halves: %r", len(batch.items), error)
            self._dispatcher.requeue(batch, lower_budget=out_of_memory and flight.slots is not None)
        elif out_of_memory and batch.kind != "suspect":  # the batches beside it may have taken the memory
            self._dispatcher.requeue(batch, lower_budget=False)
        else:
            job, seq = batch.items[0]
            _log.error("a text of %d tokens failed alone", seq.ids.size, exc_info=error)
            self._dispatcher.fail(job, _failed_alone(seq, error))
        self._end(flight)

    def _end(self, flight: _InFlightBatch, num_tokens: int = 0, seconds: float = 0.0) -> None:
        self._dispatcher.batch_done(flight.batch, num_tokens, seconds)
        if flight.slots is not None:
            flight.slots.release()

    def _thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._guard, args=(body,), name=f"whimbrel-{name}", daemon=True)

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            bug = not isinstance(error, Unavailable)
            _log.critical("a thread of the engine died. This is a bug." if bug else f"{error} The engine ends.", exc_info=bug)
            self._dispatcher.fail_all()
            for slots in self._slots:
                slots.release(_BATCHES_PER_LANE)


class _Abandoned(Exception):
    """Ends the launch of a text whose caller has left."""


def _has_shape(rows: OutputRows, num_rows: int, width: int) -> bool:
    if isinstance(rows, Sparse):
        return len(rows) == num_rows
    if isinstance(rows, DeviceRows | CheckedRows):
        return rows.rows_PD.shape == (num_rows, width) and rows.finite_P.size == num_rows
    return rows.shape == (num_rows, width) and rows.dtype == np.float32


def _failed_alone(seq: Seq, error: BaseException) -> ComputeError:
    if isinstance(error, MemoryError):
        return OutOfMemory(f"this text of {seq.ids.size:,} tokens does not fit into the device's memory.", item=seq.index)
    return ComputeError(f"the computation failed ({type(error).__name__}); the server's log says more.", item=seq.index)
