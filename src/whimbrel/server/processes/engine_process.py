"""An engine in a process of its own: tokenised requests in, vectors into shared memory.

Theory of operation. The main thread listens to the supervisor. Each worker has a line of its own with two threads: one
reads requests and hands them to the engine, the other sends answers. A request's array lies in memory that the worker made,
so the lanes write where the worker will read. The board says what is on the device; whoever finds this process dead reads
there whom to suspect. A message that cannot be read ends the process: the supervisor starts another, and nothing is lost.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np

from whimbrel.engine.engine import Engine
from whimbrel.engine.job import BatchItems
from whimbrel.engine.prepared import EngineRequest
from whimbrel.errors import CheckpointError, ComputeError, OutOfMemory, SetupError, Unavailable, WhimbrelError
from whimbrel.outputs.layout import plan_layout, response_layout
from whimbrel.outputs.multi_vector import TokenReduction
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.requested import OutputSpec
from whimbrel.server.processes.channel import Channel, ProtocolError
from whimbrel.server.processes.child_process import CHANNEL_BROKEN, control_socket, exit_process, raise_file_limit
from whimbrel.server.processes.codec import num_ints, pack_entries, request_bytes, unpack_pairs, unpack_seqs, unpack_stored
from whimbrel.server.processes.messages import (
    Attach,
    Cancel,
    CannotStart,
    ControlEngine,
    EngineAnswer,
    Load,
    Phase,
    Planned,
    Ready,
    Submit,
    ToEngine,
    failed,
)
from whimbrel.server.processes.shared_memory import SHARED_BYTES, StatusBoard, bytes_at, map_memory, share
from whimbrel.telemetry import logs, metrics
from whimbrel.telemetry.trace import gauge
from whimbrel.types.result import Result, Sparse, Timings

_log = logging.getLogger("whimbrel")

_NOTHING: Final = memoryview(b"")
_BEAT_SECONDS: Final = 0.25
_FLIGHTS_PER_LANE: Final = 64
"""Batches of one lane that may be uncollected: two, and the small ones that ran between the layers of these."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from: the tag of its job. The warm-up's jobs have none."""

    worker: int
    uid: int


class BoardObserver:
    """Writes on the board what goes to the device."""

    def __init__(self, num_lanes: int, max_batch_tokens: int) -> None:
        num_flights = _FLIGHTS_PER_LANE * num_lanes
        self.board, self.fd, self.size = StatusBoard.create(num_flights, max_batch_tokens)
        self._free = list(range(num_flights))

    def started(self, work: BatchItems) -> int:
        """Before a batch is launched."""
        try:
            slot = self._free.pop()
        except IndexError:
            return -1
        entries = [(origin.worker, seq.index, origin.uid) for job, seq in work if isinstance(origin := job.origin, Origin)]
        num_tokens = sum(seq.ids.size for _, seq in work)
        self.board.start(slot, perf_counter(), entries, num_tokens)
        return slot

    def resumed(self, slot: int) -> None:
        """After another batch ran between its layers: its own time begins anew."""
        if slot >= 0:
            self.board.restart(slot, perf_counter())

    def ended(self, slot: int) -> None:
        """After it was collected, or has failed."""
        if slot >= 0:
            self.board.end(slot)
            self._free.append(slot)


class WorkerChannel:
    """The requests of one worker."""

    def __init__(self, engine: Engine, worker: int, sock: socket.socket) -> None:
        self._engine = engine
        self._worker = worker
        self._line = Channel[ToEngine](sock, ToEngine)
        self._segments: dict[int, mmap] = {}
        self._futures: dict[int, Future[Result]] = {}
        threading.Thread(target=self._read, name=f"whimbrel-worker-{worker}", daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self._line:
                self._handle(message)
            if self._line.failure is not None:
                raise self._line.failure
        except BaseException as error:
            _log.critical("the line to worker %d is broken (%s); this engine ends.", self._worker, error)
            exit_process(CHANNEL_BROKEN)
        # The worker is gone: nobody waits for its requests.
        for future in list(self._futures.values()):
            future.cancel()
        self._segments.clear()
        self._line.close()

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            if (future := self._futures.get(message.uid)) is not None:
                future.cancel()
        else:
            self._segments.pop(message.segment, None)

    def _submit(self, message: Submit) -> None:
        if message.segment_bytes:
            self._segments[message.segment] = map_memory(self._line.take_fd(), message.segment_bytes)
        segment = self._segments[message.segment] if message.segment else None
        source = memoryview(bytearray(message.arrays)) if segment is None else segment  # a message is not aligned
        prepared = self._prepared(message, source)
        size = response_layout(prepared.layout, prepared.pair_scoring).num_bytes
        memory = np.empty(size, np.uint8) if segment is None else bytes_at(segment, request_bytes(prepared), size)
        try:
            future = self._engine.submit_prepared(
                prepared, out=memory, tag=Origin(self._worker, message.uid), admitted=message.admitted
            )
        except WhimbrelError as error:
            self._fail(message.uid, error)
            return
        except MemoryError:
            self._fail(message.uid, OutOfMemory("there is no memory for this request."))
            return
        self._futures[message.uid] = future
        inline = memory.data if segment is None else _NOTHING
        has_entries = response_layout(prepared.layout, prepared.pair_scoring).dynamic_output is not None
        future.add_done_callback(partial(self._answer, message.uid, inline, has_entries))

    def _prepared(self, message: Submit, source: memoryview | mmap) -> EngineRequest:
        """The request, its arrays still where they lie."""
        seqs, comparison = unpack_seqs(source, message.num_seqs, message.num_tokens, message.num_spans), None
        if message.compare is not None:
            output, similarity, num_pairs, explain = message.compare
            before = num_ints(message.num_seqs, message.num_tokens, message.num_spans)
            given = unpack_stored(source, before + 2 * num_pairs, message.stored)
            comparison = PairScoring(output, similarity, *unpack_pairs(source, before, num_pairs), given, explain)
        card = self._engine.card.tower(seqs[0].tower if seqs else 0)
        return EngineRequest(
            seqs,
            plan_layout(card, seqs, [OutputSpec(*ask) for ask in message.specs]),
            num_tokens=message.num_tokens,
            num_truncated=message.num_truncated,
            received=message.received,
            tokenize=message.tokenize,
            priority=message.priority,
            deadline=message.deadline,
            tenant=message.tenant,
            suspects=message.suspects,
            pair_scoring=comparison,
            reduction=None if message.pooling is None else TokenReduction(message.pooling),
        )

    def _answer(self, uid: int, inline: memoryview, has_entries: bool, future: Future[Result]) -> None:
        self._futures.pop(uid, None)
        if future.cancelled():
            self._line.send(failed(uid, ComputeError("cancelled.")))
        elif (error := future.exception()) is not None:
            known = error if isinstance(error, WhimbrelError) else ComputeError(f"{type(error).__name__} in the engine.")
            self._fail(uid, known)
        else:
            result = future.result()
            self._send(uid, inline, result.outputs.sparse if has_entries else None, result.timings)

    def _send(self, uid: int, inline: memoryview, sparse: Sparse | None, timings: Timings) -> None:
        """The answer, with entries that have no place in the request's memory."""
        entries, fds, num_bytes = b"" if sparse is None else pack_entries(sparse), list[int](), 0
        if len(entries) > SHARED_BYTES:
            try:
                fds, num_bytes, entries = [share(entries)], len(entries), b""
            except (OSError, MemoryError):
                self._fail(uid, OutOfMemory(f"there is no memory for {len(entries):,} bytes of weights."))
                return
        self._line.send(EngineAnswer(uid, inline, memoryview(entries), num_bytes, timings.queue, timings.compute), fds)

    def _fail(self, uid: int, error: WhimbrelError) -> None:
        if isinstance(error, Unavailable) and not _stopping.is_set():
            exit_process(70)  # the engine is broken: another life of it answers
        self._line.send(failed(uid, error))


def _beat(engine: Engine, board: StatusBoard) -> None:
    model = engine.plan.served_name
    while True:
        gauge("queue_tokens", engine.queued_tokens, model=model)
        gauge("queue_small_tokens", engine.small_tokens, model=model)
        board.beat(perf_counter(), queued=engine.queued_tokens, small=engine.small_tokens, rate=engine.rate)
        if not engine.ready and not _stopping.is_set():
            exit_process(70)  # one of its threads has died
        time.sleep(_BEAT_SECONDS)


_stopping: Final = threading.Event()
"""Set when the engine is told to end."""


def _load(control: Channel[ControlEngine], load: Load) -> tuple[Engine, BoardObserver]:
    recorders: list[BoardObserver] = []

    def planned(engine: Engine) -> BoardObserver:
        recorders.append(BoardObserver(engine.plan.num_lanes, engine.plan.max_batch_tokens))
        control.send(Planned(str(engine.folder), engine.card.name, engine.plan))
        return recorders[0]

    engine = Engine(
        load.model,
        pooling=load.pooling,
        reranker=load.reranker,
        progress=lambda phase: control.send(Phase(phase)),
        recorder=planned,
        **load.options,
    )
    return engine, recorders[0]


def main() -> None:
    """The process: load, say so, answer until told to stop or the supervisor is gone."""
    raise_file_limit()
    control = Channel[ControlEngine](control_socket(), ControlEngine)
    messages = iter(control)
    load = next(messages, None)
    if not isinstance(load, Load):
        return
    logs.configure(load.logs, process=load.name)
    if metrics.DIRECTORY in os.environ:
        metrics.use_directory(Path(os.environ[metrics.DIRECTORY]), load.name)
    try:
        engine, recorder = _load(control, load)
    except (SetupError, CheckpointError) as error:
        control.send(CannotStart(str(error), error.hint if isinstance(error, SetupError) else None))
        control.close()
        exit_process(1)
    except Exception as error:
        _log.critical("the engine could not be loaded", exc_info=True)
        control.send(CannotStart(f"{type(error).__name__}: {error}", None))
        control.close()
        exit_process(1)
    metrics.Metrics([engine.plan.served_name])  # now, so that the warm-up does not count
    threading.Thread(target=_beat, args=(engine, recorder.board), name="whimbrel-beat", daemon=True).start()
    control.send(Ready(recorder.size, engine.plan), [recorder.fd])
    try:
        for message in messages:
            if isinstance(message, Attach):
                WorkerChannel(engine, message.worker, socket.socket(fileno=control.take_fd()))
            else:
                _stopping.set()
                engine.close()
                exit_process(0)
    except ProtocolError as error:
        _log.critical("the supervisor sent what cannot be read (%s)", error)
    exit_process(0)  # the supervisor is gone


if __name__ == "__main__":
    main()
