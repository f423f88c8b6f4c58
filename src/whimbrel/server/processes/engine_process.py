"""Engine process: tokenized requests in, responses into shared memory.

Theory of operation. The main thread receives the supervisor's messages. Each worker has a channel with two threads: one
receives requests and submits them to the engine, the other sends answers. The worker provides the memory of a response, and the
lanes write into it. The status board lists the seqs on the device. If this process dies, the workers read from it which seqs to
suspect. A message that cannot be read ends the process: the supervisor starts another, and no request is lost.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from mmap import mmap
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np

from whimbrel.checkpoint.fingerprint import weight_bytes
from whimbrel.checkpoint.load_progress import counting_bytes
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.engine.engine import Engine
from whimbrel.engine.engine_request import BatchItems, BatchObserver
from whimbrel.errors import CheckpointError, ComputeError, OutOfMemory, SetupError, Unavailable, WhimbrelError
from whimbrel.server.processes import messages
from whimbrel.server.processes.channel import Channel, ProtocolError
from whimbrel.server.processes.child_process import CHANNEL_BROKEN, control_socket, exit_process, raise_file_limit
from whimbrel.server.processes.codec import decode_request, pack_entries
from whimbrel.server.processes.probe import run_probe
from whimbrel.server.processes.shared_memory import SHARED_BYTES, StatusBoard, map_memory, share
from whimbrel.telemetry import logs, metrics
from whimbrel.telemetry.trace import gauge
from whimbrel.types.result import Result, Sparse, Timings

_log = logging.getLogger("whimbrel")

_EMPTY: Final = memoryview(b"")
_BEAT_SECONDS: Final = 0.25
_BATCHES_PER_LANE: Final = 64
"""Limit of uncollected batches of one lane: two, and the small ones that overtook them."""


class Origin(NamedTuple):
    """The worker of a job, and its uid there. Jobs of the warm-up have no origin."""

    worker: int
    uid: int


class BoardObserver(BatchObserver):
    """Batch observer that writes the seqs on the device to the status board."""

    def __init__(self, num_lanes: int, max_batch_tokens: int) -> None:
        num_batches = _BATCHES_PER_LANE * num_lanes
        self.board, self.fd = StatusBoard.create(num_batches, max_batch_tokens)
        self._free = list(range(num_batches))

    def started(self, items: BatchItems) -> int:
        """Write a batch that is about to be launched. Return its slot, or -1 if none is free."""
        try:
            slot = self._free.pop()
        except IndexError:
            return -1
        entries = [(origin.worker, seq.index, origin.uid) for job, seq in items if isinstance(origin := job.origin, Origin)]
        num_tokens = sum(seq.ids.size for _, seq in items)
        self.board.start(slot, perf_counter(), entries, num_tokens)
        return slot

    def resumed(self, slot: int) -> None:
        if slot >= 0:
            self.board.restart(slot, perf_counter())

    def ended(self, slot: int) -> None:
        if slot >= 0:
            self.board.end(slot)
            self._free.append(slot)


class WorkerChannel:
    """The channel to one worker, and its requests."""

    def __init__(self, engine: Engine, worker: int, sock: socket.socket) -> None:
        self._engine = engine
        self._worker = worker
        self._channel = Channel[messages.ToEngine](sock, messages.ToEngine)
        self._segments: dict[int, mmap] = {}
        self._futures: dict[int, Future[Result]] = {}
        threading.Thread(target=self._read, name=f"whimbrel-worker-{worker}", daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self._channel:
                if isinstance(message, messages.Submit):
                    self._submit(message)
                elif (future := self._futures.get(message.uid)) is not None:
                    future.cancel()
            if self._channel.failure is not None:
                raise self._channel.failure
        except BaseException as error:
            _log.critical("the channel to worker %d is broken (%s); this engine ends.", self._worker, error)
            exit_process(CHANNEL_BROKEN)
        # The worker has ended: its requests need not run.
        for future in list(self._futures.values()):
            future.cancel()
        self._segments.clear()
        self._channel.close()

    def _submit(self, message: messages.Submit) -> None:
        for number in message.dropped:
            self._segments.pop(number, None)
        if message.segment_bytes:
            self._segments[message.segment] = map_memory(self._channel.take_fd(), message.segment_bytes)
        segment = self._segments[message.segment] if message.segment else None
        source = memoryview(bytearray(message.arrays)) if segment is None else segment  # a message is not aligned
        request = decode_request(message.header, source)
        size = request.response.num_bytes
        response_start = message.response_start
        memory = np.empty(size, np.uint8) if segment is None else np.frombuffer(segment, np.uint8, size, response_start)
        try:
            origin = Origin(self._worker, message.uid)
            future = self._engine.submit_tokenized(request, out=memory, origin=origin, admitted=message.admitted)
        except (WhimbrelError, MemoryError) as error:
            no_memory = OutOfMemory("there is no memory for this request.")
            self._fail(message.uid, error if isinstance(error, WhimbrelError) else no_memory)
            return
        self._futures[message.uid] = future
        has_entries = request.response.dynamic_output is not None
        answer = partial(self._answer, message.uid, memory.data if segment is None else _EMPTY, has_entries)
        future.add_done_callback(answer)

    def _answer(self, uid: int, memory: memoryview, has_entries: bool, future: Future[Result]) -> None:
        self._futures.pop(uid, None)
        if future.cancelled():
            self._channel.send(messages.failed(uid, ComputeError("cancelled.")))
        elif (error := future.exception()) is not None:
            known = error if isinstance(error, WhimbrelError) else ComputeError(f"{type(error).__name__} in the engine.")
            self._fail(uid, known)
        else:
            result = future.result()
            self._send(uid, memory, result.outputs.sparse if has_entries else None, result.timings)

    def _send(self, uid: int, memory: memoryview, sparse: Sparse | None, timings: Timings) -> None:
        """Send the response. `sparse` has the rows that have no slot in the request's memory."""
        entries, fds, num_bytes = b"" if sparse is None else pack_entries(sparse), list[int](), 0
        if len(entries) > SHARED_BYTES:
            try:
                fds, num_bytes, entries = [share(entries)], len(entries), b""
            except (OSError, MemoryError):
                self._fail(uid, OutOfMemory(f"there is no memory for {len(entries):,} bytes of weights."))
                return
        self._channel.send(
            messages.EngineAnswer(uid, memory, memoryview(entries), num_bytes, timings.queue, timings.compute), fds
        )

    def _fail(self, uid: int, error: WhimbrelError) -> None:
        if isinstance(error, Unavailable) and not _stopping.is_set():
            exit_process(70)  # the engine is broken; it answers after a restart
        self._channel.send(messages.failed(uid, error))


def _write_status(engine: Engine, board: StatusBoard) -> None:
    model = engine.plan.served_name
    while True:
        load = engine.load
        gauge("queue_tokens", load.queued_tokens, model=model)
        gauge("queue_small_tokens", load.small_tokens, model=model)
        board.beat(perf_counter(), queued=load.ordinary_tokens, small=load.ordinary_small_tokens, rate=load.tokens_per_second)
        if not engine.ready and not _stopping.is_set():
            exit_process(70)  # one of its threads has died
        time.sleep(_BEAT_SECONDS)


_stopping: Final = threading.Event()
_BYTES: Final[dict[str, int]] = {"float32": 4, "int8": 1}


def _load(
    control: Channel[messages.ControlEngine], inbox: Iterator[messages.ControlEngine], load: messages.Load
) -> tuple[Engine, BoardObserver]:
    """Return the engine, once the supervisor has let it proceed from its plan to its weights. Otherwise end the process."""
    observers: list[BoardObserver] = []
    model = load.model

    def make_observer(engine: Engine) -> BoardObserver:
        observers.append(BoardObserver(engine.plan.num_lanes, engine.plan.max_batch_tokens))
        num_bytes = weight_bytes(engine.folder, _BYTES.get(engine.plan.dtype, 2)) if load.weights else 0
        control.send(messages.Planned(str(engine.folder), engine.card.name, engine.plan, num_bytes))
        if next(inbox, None) != messages.Notice("proceed"):
            exit_process(0)
        return observers[0]

    source = model.model
    if source is not None and not load.weights:
        source = str(resolve_checkpoint(source, weights=False).folder)
    with counting_bytes(lambda done, total: control.send(messages.BytesRead(done, total))):
        engine = Engine(
            source,
            pooling=model.pooling,
            reranker=model.reranker,
            progress=lambda phase: control.send(messages.Phase(phase)),
            observer=make_observer,
            **model.options,
        )
    return engine, observers[0]


def _device_bytes(engine: Engine) -> int:
    """Return the bytes of the GPU's memory that PyTorch has taken for an engine."""
    from whimbrel.model.ops.memory import reserved_bytes

    return reserved_bytes(engine.plan.device)


def main() -> None:
    """Load an engine and answer requests, until the supervisor tells it to stop, or ends."""
    raise_file_limit()
    control = Channel[messages.ControlEngine](control_socket(), messages.ControlEngine)
    inbox = iter(control)
    load = next(inbox, None)
    if not isinstance(load, messages.Load):
        return
    logs.configure(load.logs, process=load.name)
    if metrics.DIRECTORY in os.environ:
        metrics.use_directory(Path(os.environ[metrics.DIRECTORY]), load.name)
    try:
        engine, observer = _load(control, inbox, load)
        probe = run_probe(engine)
    except Exception as error:
        if isinstance(error, SetupError | CheckpointError):
            control.send(messages.CannotStart(str(error), error.hint))
        else:
            _log.critical("the engine could not be loaded", exc_info=True)
            control.send(messages.CannotStart(f"{type(error).__name__}: {error}", None))
        control.close()
        exit_process(1)
    metrics.Metrics([engine.plan.served_name])  # now, so that the warm-up does not count
    threading.Thread(target=_write_status, args=(engine, observer.board), name="whimbrel-beat", daemon=True).start()
    control.send(messages.Ready(engine.plan, probe, _device_bytes(engine)), [observer.fd])
    try:
        for message in inbox:
            if isinstance(message, messages.Attach):
                WorkerChannel(engine, message.worker, socket.socket(fileno=control.take_fd()))
            elif message == messages.Notice("stop"):
                _stopping.set()
                engine.close()
                exit_process(0)
    except ProtocolError as error:
        _log.critical("the supervisor sent what cannot be read (%s)", error)
    exit_process(0)  # the supervisor has ended
