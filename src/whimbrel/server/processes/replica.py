"""One engine process as a worker sees it: its line, its memory and what it has not answered yet."""

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

from whimbrel.engine.prepared import EngineRequest
from whimbrel.errors import WhimbrelError
from whimbrel.outputs.layout import build_outputs, response_layout
from whimbrel.outputs.merge import map_error_location, merge_chunks
from whimbrel.server.processes.channel import AsyncChannel, ProtocolError
from whimbrel.server.processes.codec import count_spans, pack, request_bytes, stored_kinds, unpack_entries
from whimbrel.server.processes.messages import Cancel, Drop, EngineAnswer, EngineDown, Failed, FromEngine, Submit, error_of
from whimbrel.server.processes.shared_memory import SHARED_BYTES, Segment, SegmentPool, StatusBoard, map_memory
from whimbrel.types.result import Result, Timings

_NOTHING: Final = memoryview(b"")


@dataclass(slots=True, eq=False)
class Pending:
    """A request that is not answered yet."""

    request: EngineRequest
    future: asyncio.Future[Result]
    limits: dict[int, int] = field(default_factory=dict[int, int])
    """Suspect texts: with how many seqs each may share a batch."""
    segment: Segment | None = None
    admitted: bool = False
    """Whether an engine had it already."""
    home: int | None = None
    """The replica that keeps what it needs; None: any will do."""


class Replica:
    """One engine process, over all its lives."""

    def __init__(self, max_segments: int) -> None:
        self.down: EngineDown | None = None
        """Why it is not up, as the supervisor says."""
        self.outstanding_tokens = 0
        self.board: StatusBoard | None = None
        self._line: AsyncChannel[FromEngine] | None = None
        self._max_segments = max_segments
        self._pool = SegmentPool(max_segments)
        self._pending: dict[int, Pending] = {}
        self._next = random.getrandbits(48)  # no number is used by two workers' lives, and by no life twice

    @property
    def up(self) -> bool:
        return self._line is not None

    @property
    def pending(self) -> Collection[Pending]:
        """What it has not answered yet."""
        return self._pending.values()

    def attach(self, sock: socket.socket, board: StatusBoard, *, on_end: Callable[[ProtocolError | None], None]) -> None:
        """A new life. Segments of an earlier one are forgotten: what died may have half written them."""
        self._line = AsyncChannel[FromEngine](sock, FromEngine, on_message=self._receive, on_end=on_end)
        self._pool = SegmentPool(self._max_segments)
        self.board = board
        self.down = None

    def disconnect(self) -> None:
        """Its line has ended: it gets nothing more. What it has not answered stays until its `end`."""
        if self._line is not None:
            self._line.close()
        self._line = None
        self.outstanding_tokens = 0

    def end(self) -> dict[int, Pending]:
        """The end of a life: what it has not answered, by uid."""
        self.disconnect()
        pending, self._pending = self._pending, {}
        return pending

    def send(self, pending: Pending) -> None:
        """Give it a request."""
        assert self._line is not None
        prepared = pending.request
        self._next += 1
        uid = self._next
        comparison = prepared.pair_scoring
        num_bytes, result_bytes = request_bytes(prepared), response_layout(prepared.layout, prepared.pair_scoring).num_bytes
        segment = self._pool.take(num_bytes + result_bytes) if max(num_bytes, result_bytes) > SHARED_BYTES else None
        fd = segment.take_fd() if segment is not None else None
        memory = np.empty(num_bytes, np.uint8) if segment is None else np.frombuffer(segment.memory, np.uint8, num_bytes)
        pack(prepared, memory)
        message = Submit(
            uid=uid,
            segment=segment.number if segment is not None else 0,
            segment_bytes=segment.size if segment is not None and fd is not None else 0,
            arrays=_NOTHING if segment is not None else memory.data,
            num_seqs=len(prepared.seqs),
            num_spans=count_spans(prepared.seqs),
            specs=[(ask.name, ask.width, ask.activated, ask.max_entries, ask.keep_on_device) for ask in prepared.layout.specs],
            compare=None
            if comparison is None
            else (comparison.output, comparison.similarity, comparison.num_pairs, comparison.explain),
            stored=[] if comparison is None else stored_kinds(comparison.stored),
            pooling=prepared.pooling,
            num_tokens=prepared.num_tokens,
            num_truncated=prepared.num_truncated,
            received=prepared.received,
            tokenize=prepared.tokenize,
            priority=prepared.priority,
            deadline=prepared.deadline,
            tenant=prepared.tenant,
            suspects=pending.limits,
            admitted=pending.admitted,
        )
        pending.segment = segment
        self._pending[uid] = pending
        self.outstanding_tokens += prepared.num_tokens
        pending.future.add_done_callback(lambda future: self._cancelled(uid) if future.cancelled() else None)
        line = self._line
        for number in self._pool.dropped():
            line.send(Drop(number))
        line.send(message, [fd] if fd is not None else [])

    def _cancelled(self, uid: int) -> None:
        if self._line is not None and uid in self._pending:
            self._line.send(Cancel(uid))

    def _receive(self, message: FromEngine) -> None:
        pending = self._pending.pop(message.uid, None)
        if pending is None:
            raise ProtocolError(f"an answer to no question ({message.uid})")
        self.outstanding_tokens -= pending.request.num_tokens
        if isinstance(message, Failed):
            if pending.segment is not None:
                self._pool.drop(pending.segment)
            fail(pending, error_of(message))
        else:
            self._answer(pending, message)

    def _answer(self, pending: Pending, message: EngineAnswer) -> None:
        prepared = pending.request
        places = response_layout(prepared.layout, prepared.pair_scoring)
        if pending.segment is None:
            memory = np.frombuffer(message.memory, np.uint8)
        else:
            memory = self._pool.borrow(pending.segment, request_bytes(prepared), places.num_bytes)
        given: memoryview | mmap = message.entries
        if message.entries_bytes:
            assert self._line is not None  # it is reading
            given = map_memory(self._line.take_fd(), message.entries_bytes)
        entries = None if places.dynamic_output is None else unpack_entries(given, len(prepared.seqs))
        outputs = merge_chunks(build_outputs(places, places.arrays(memory), entries), prepared.merge)
        outputs = replace(outputs, token_matches=places.token_matches_in(memory))
        total = perf_counter() - prepared.received
        timings = Timings(prepared.tokenize, message.queue, message.compute, total)
        if not pending.future.done():
            about = prepared.num_tokens, prepared.num_truncated, timings, prepared.token_offsets, prepared.pair_tokens
            pending.future.set_result(Result(outputs, *about))


def fail(pending: Pending, error: WhimbrelError) -> None:
    if not pending.future.done():
        pending.future.set_exception(map_error_location(error, pending.request.merge, pending.request.pair_scoring))
