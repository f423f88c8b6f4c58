"""Replica: one engine process as a worker sees it. Its channel, its segments of shared memory and its unanswered requests."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from mmap import mmap
from time import perf_counter
from typing import Final

import numpy as np

from whimbrel.engine.engine_request import EngineRequest
from whimbrel.errors import WhimbrelError
from whimbrel.outputs.finishers import read_response
from whimbrel.server.processes.channel import AsyncChannel, ProtocolError
from whimbrel.server.processes.codec import arrays_bytes, encode_header, request_arrays, unpack_entries, write_arrays
from whimbrel.server.processes.messages import Cancel, Drop, EngineAnswer, EngineDown, Failed, FromEngine, Submit, error_of
from whimbrel.server.processes.shared_memory import SHARED_BYTES, Segment, SegmentPool, StatusBoard, map_memory
from whimbrel.types.result import Result, Timings

_NOTHING: Final = memoryview(b"")


@dataclass(slots=True, eq=False)
class Pending:
    """A request that is not answered yet."""

    request: EngineRequest
    future: asyncio.Future[Result]
    suspects: dict[int, int] = field(default_factory=dict[int, int])
    """The number of seqs that each suspect seq may share a batch with."""
    segment: Segment | None = None
    """The shared memory of its arrays and its response; None if both are small."""
    response_start: int = 0
    """Offset of the response in the segment, in bytes."""
    admitted: bool = False
    """True if an engine had admitted it."""
    home: int | None = None
    """The replica that keeps the documents that it needs; None for any."""


class Replica:
    """One engine process, over all its lives."""

    def __init__(self, max_segments: int) -> None:
        self.down: EngineDown | None = None
        """The supervisor's reason why it is not up."""
        self.outstanding_tokens = 0
        self.board: StatusBoard | None = None
        self._channel: AsyncChannel[FromEngine] | None = None
        self._max_segments = max_segments
        self._pool = SegmentPool(max_segments)
        self._pending: dict[int, Pending] = {}
        self._next = random.getrandbits(48)  # no number is used by two workers' lives, and by no life twice

    @property
    def up(self) -> bool:
        return self._channel is not None

    @property
    def pending(self) -> Collection[Pending]:
        """The requests that it has not answered."""
        return self._pending.values()

    def attach(self, sock: socket.socket, board: StatusBoard, *, on_end: Callable[[ProtocolError | None], None]) -> None:
        """Begin a new life. Segments of the earlier one are forgotten, as it may have written them halfway."""
        self._channel = AsyncChannel[FromEngine](sock, FromEngine, on_message=self._receive, on_end=on_end)
        self._pool = SegmentPool(self._max_segments)
        self.board = board
        self.down = None

    def disconnect(self) -> None:
        """Send it nothing more, as its channel has ended. Its unanswered requests stay until `end`."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self.outstanding_tokens = 0

    def end(self) -> dict[int, Pending]:
        """End a life. Return the requests that it has not answered, by uid."""
        self.disconnect()
        pending, self._pending = self._pending, {}
        return pending

    def send(self, pending: Pending) -> None:
        """Send it a request."""
        assert self._channel is not None
        request = pending.request
        self._next += 1
        uid = self._next
        arrays = request_arrays(request)
        num_bytes, response_bytes = arrays_bytes(arrays), request.response.num_bytes
        segment = self._pool.take(num_bytes + response_bytes) if max(num_bytes, response_bytes) > SHARED_BYTES else None
        fd = segment.take_fd() if segment is not None else None
        memory = np.empty(num_bytes, np.uint8) if segment is None else np.frombuffer(segment.memory, np.uint8, num_bytes)
        write_arrays(arrays, memory)
        message = Submit(
            uid=uid,
            segment=segment.number if segment is not None else 0,
            segment_bytes=segment.size if segment is not None and fd is not None else 0,
            arrays=_NOTHING if segment is not None else memory.data,
            header=encode_header(request, replace(request.scheduling, suspects=pending.suspects)),
            admitted=pending.admitted,
        )
        pending.response_start = num_bytes
        pending.segment = segment
        self._pending[uid] = pending
        self.outstanding_tokens += request.num_tokens
        pending.future.add_done_callback(lambda future: self._cancelled(uid) if future.cancelled() else None)
        channel = self._channel
        for number in self._pool.dropped():
            channel.send(Drop(number))
        channel.send(message, [fd] if fd is not None else [])

    def _cancelled(self, uid: int) -> None:
        if self._channel is not None and uid in self._pending:
            self._channel.send(Cancel(uid))

    def _receive(self, message: FromEngine) -> None:
        pending = self._pending.pop(message.uid, None)
        if pending is None:
            raise ProtocolError(f"an answer to no request ({message.uid})")
        self.outstanding_tokens -= pending.request.num_tokens
        if isinstance(message, Failed):
            if pending.segment is not None:
                self._pool.drop(pending.segment)
            fail(pending, error_of(message))
        else:
            self._answer(pending, message)

    def _answer(self, pending: Pending, message: EngineAnswer) -> None:
        request, response = pending.request, pending.request.response
        if pending.segment is None:
            memory = np.frombuffer(message.memory, np.uint8)
        else:
            memory = self._pool.borrow(pending.segment, pending.response_start, response.num_bytes)
        source: memoryview | mmap = message.entries
        if message.entries_bytes:
            assert self._channel is not None  # it is reading
            source = map_memory(self._channel.take_fd(), message.entries_bytes)
        entries = None if response.dynamic_output is None else unpack_entries(source, len(request.seqs))
        timings = Timings(request.tokenize, message.queue, message.compute, perf_counter() - request.received)
        if not pending.future.done():
            pending.future.set_result(request.result(read_response(response, memory, entries), timings))


def fail(pending: Pending, error: WhimbrelError) -> None:
    """Answer a request with an error of the engine, which names parts of the request."""
    if not pending.future.done():
        pending.future.set_exception(error)
