"""Replica: one engine process as a worker uses it. Its channel, its segments of shared memory and its unanswered requests."""

import asyncio
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from mmap import mmap
from time import perf_counter
from typing import Final

import numpy as np

from whimbrel.engine.engine_request import EngineRequest
from whimbrel.errors import WhimbrelError
from whimbrel.outputs.layout import build_outputs
from whimbrel.server.processes.channel import AsyncChannel, ProtocolError
from whimbrel.server.processes.codec import encode_request, unpack_entries, write_arrays
from whimbrel.server.processes.messages import Cancel, EngineAnswer, EngineDown, Failed, FromEngine, Submit, error_of
from whimbrel.server.processes.shared_memory import SHARED_BYTES, Segment, SegmentPool, StatusBoard, map_memory
from whimbrel.types.result import Result, Timings

_EMPTY: Final = memoryview(b"")


@dataclass(slots=True, eq=False)
class Unanswered:
    """A request in a worker until it has an answer."""

    request: EngineRequest
    future: asyncio.Future[Result]
    suspects: dict[int, int] = field(default_factory=dict[int, int])
    """Number of seqs that each suspect seq may share a batch with."""
    segment: Segment | None = None
    """The shared memory of its arrays and its response; None if both are small."""
    response_start: int = 0
    admitted: bool = False
    """True if an engine had admitted it, so that it must not be refused for overload."""
    home: int | None = None
    """The replica that caches its documents; None for any."""


class Replica:
    """An engine process over all its lives. A channel to it has at most `max_segments` of shared memory."""

    def __init__(self, max_segments: int, broken: Callable[[ProtocolError], None]) -> None:
        """`broken` gets the error of a channel."""
        self.down: EngineDown | None = None
        self.outstanding_tokens = 0
        self.board: StatusBoard | None = None
        self._channel: AsyncChannel[FromEngine] | None = None
        self._max_segments = max_segments
        self._broken = broken
        self._pool = SegmentPool(max_segments)
        self.pending: dict[int, Unanswered] = {}
        self._next_uid = random.getrandbits(48)  # the lives of a worker must not share uids

    @property
    def up(self) -> bool:
        return self._channel is not None

    def attach(self, sock: socket.socket, board: StatusBoard) -> None:
        """Begin a life. The segments of the earlier one are not used again, as they may be half written."""
        self._channel = AsyncChannel[FromEngine](sock, FromEngine, on_message=self._receive, on_end=self.disconnect)
        self._pool = SegmentPool(self._max_segments)
        self.board = board
        self.down = None

    def disconnect(self, error: ProtocolError | None = None) -> None:
        """Close the channel. The unanswered requests stay until `end`."""
        if error is not None:
            self._broken(error)
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self.outstanding_tokens = 0

    def end(self) -> dict[int, Unanswered]:
        """End a life. Return the unanswered requests by uid."""
        self.disconnect()
        pending, self.pending = self.pending, {}
        return pending

    def send(self, pending: Unanswered) -> None:
        assert self._channel is not None
        request = pending.request
        self._next_uid += 1
        uid = self._next_uid
        header, arrays, num_bytes = encode_request(request, replace(request.scheduling, suspects=pending.suspects))
        response_bytes = request.response.num_bytes
        segment = self._pool.take(num_bytes + response_bytes) if max(num_bytes, response_bytes) > SHARED_BYTES else None
        pending.segment, pending.response_start, dropped = segment, num_bytes, self._pool.dropped()
        if segment is None:
            memory, fd = np.empty(num_bytes, np.uint8), None
            message = Submit(uid, 0, 0, memory.data, num_bytes, header, pending.admitted, dropped)
        else:
            memory, fd = np.frombuffer(segment.memory, np.uint8, num_bytes), segment.take_fd()
            segment_bytes = 0 if fd is None else segment.size
            message = Submit(uid, segment.number, segment_bytes, _EMPTY, num_bytes, header, pending.admitted, dropped)
        write_arrays(arrays, memory)
        self.pending[uid] = pending
        self.outstanding_tokens += request.num_tokens
        pending.future.add_done_callback(lambda future: self._cancel(uid) if future.cancelled() else None)
        self._channel.send(message, [fd] if fd is not None else [])

    def _cancel(self, uid: int) -> None:
        if self._channel is not None and uid in self.pending:
            self._channel.send(Cancel(uid))

    def _receive(self, message: FromEngine) -> None:
        pending = self.pending.pop(message.uid, None)
        if pending is None:
            raise ProtocolError(f"an answer to an unknown request ({message.uid})")
        self.outstanding_tokens -= pending.request.num_tokens
        if isinstance(message, Failed):
            if pending.segment is not None:
                self._pool.drop(pending.segment)
            fail(pending, error_of(message))
        else:
            self._answer(pending, message)

    def _answer(self, pending: Unanswered, message: EngineAnswer) -> None:
        request, response = pending.request, pending.request.response
        if pending.segment is None:
            memory = np.frombuffer(message.memory, np.uint8)
        else:
            memory = self._pool.borrow(pending.segment, pending.response_start, response.num_bytes)
        source: memoryview | mmap = message.entries
        if message.entries_bytes:
            assert self._channel is not None  # the message came through it
            source = map_memory(self._channel.take_fd(), message.entries_bytes)
        entries = None if response.dynamic_output is None else unpack_entries(source, len(request.seqs))
        timings = Timings(request.tokenize, message.queue, message.compute, perf_counter() - request.received)
        if not pending.future.done():
            pending.future.set_result(request.result(build_outputs(response, memory, entries), timings))


def fail(pending: Unanswered, error: WhimbrelError) -> None:
    if not pending.future.done():
        pending.future.set_exception(error)
