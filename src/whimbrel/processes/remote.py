"""A model in engine processes, as the AsyncEmbedder that a worker serves.

Theory of operation. A request is tokenised here and sent to the engine with the fewest outstanding tokens; it stays here
until it is answered. If an engine dies, its unanswered requests go to another, or wait until it is back. What was on the
device at that moment is suspect: it is sent again with a limit on how many may share its batch, half as many as before, and
engines run such batches while nothing else runs. So batch-mates are cleared and a text that kills engines ends up alone; after
`MAX_BLAME` deaths on which it was alone it is refused, and remembered. A kill from outside blames less than a crash.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf, isinf
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

from whimbrel.card import Card
from whimbrel.errors import DeadlineExceeded, EngineCrash, Overloaded, Unavailable, WhimbrelError
from whimbrel.frontend import Frontend
from whimbrel.plan import Plan
from whimbrel.processes.channel import AsyncLine, BrokenLine
from whimbrel.processes.messages import Answer, Cancel, Down, Drop, Failed, FromEngine, Submit, error_of
from whimbrel.processes.shared import Board, Segment, SegmentPool, align
from whimbrel.trace import count
from whimbrel.types import Prepared, Request, Result, Seq, Timings

_log = logging.getLogger("whimbrel")

MAX_BLAME: Final = 2.0
_NOTHING: Final = memoryview(b"")
_SHARED_BYTES: Final = 2**15
"""Arrays of more bytes than this travel in shared memory."""
_INLINE_CHARACTERS: Final = 2000
"""Texts of so many characters together are tokenised at once; more would hold up the event loop."""
_MAX_TOKENIZING: Final = 1024
_MAX_QUARANTINED: Final = 1024
_QUARANTINE_SECONDS: Final = 600.0


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that is not answered yet."""

    prepared: Prepared
    future: asyncio.Future[Result]
    limits: dict[int, int] = field(default_factory=dict[int, int])
    """Suspect texts: with how many seqs each may share a batch."""
    blame: dict[int, float] = field(default_factory=dict[int, float])
    """How often an engine died while a text was alone on it."""
    segment: Segment | None = None
    admitted: bool = False
    """Whether an engine had it already."""


class Replica:
    """One engine process, over all its lives."""

    def __init__(self) -> None:
        self.down: Down | None = None
        """Why it is not up, as the supervisor says."""
        self.outstanding_tokens = 0
        self.board: Board | None = None
        self._line: AsyncLine[FromEngine] | None = None
        self._pool = SegmentPool()
        self._pending: dict[int, _Pending] = {}
        self._next = 0

    @property
    def up(self) -> bool:
        return self._line is not None

    @property
    def pending(self) -> Collection[_Pending]:
        """What it has not answered yet."""
        return self._pending.values()

    def attach(self, sock: socket.socket, board: Board, *, on_end: Callable[[BrokenLine | None], None]) -> None:
        """A new life. Segments of an earlier one are forgotten: what died may have half written them."""
        self._line = AsyncLine[FromEngine](sock, FromEngine, on_message=self._receive, on_end=on_end)
        self._pool = SegmentPool()
        self.board = board
        self.down = None

    def detach(self) -> dict[int, _Pending]:
        """The end of a life: what it has not answered, by uid."""
        if self._line is not None:
            self._line.close()
        pending, self._pending = self._pending, {}
        self._line = None
        self.outstanding_tokens = 0
        return pending

    def send(self, pending: _Pending) -> None:
        """Give it a request."""
        assert self._line is not None
        prepared = pending.prepared
        self._next += 1
        uid = self._next
        arrays = _arrays(prepared)
        result_bytes = len(prepared.seqs) * prepared.dimensions * 4
        segment = None
        if max(arrays.nbytes, result_bytes) > _SHARED_BYTES:
            segment = self._pool.take(align(arrays.nbytes) + result_bytes)
        fd = segment.take_fd() if segment is not None else None
        if segment is not None:
            np.frombuffer(segment.memory, np.int32, arrays.size)[:] = arrays
        first = prepared.seqs[0]
        message = Submit(
            uid=uid,
            segment=segment.number if segment is not None else 0,
            segment_bytes=segment.size if segment is not None and fd is not None else 0,
            arrays=_NOTHING if segment is not None else arrays.data.cast("B"),
            num_seqs=len(prepared.seqs),
            prompt_tokens=first.prompt_tokens,
            type_id=first.type_id,
            dimensions=prepared.dimensions,
            normalize=prepared.normalize,
            num_tokens=prepared.num_tokens,
            num_truncated=prepared.num_truncated,
            received=prepared.received,
            tokenize=prepared.tokenize,
            priority=prepared.priority,
            deadline=prepared.deadline,
            owner=prepared.owner,
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
            raise BrokenLine(f"an answer to no question ({message.uid})")
        self.outstanding_tokens -= pending.prepared.num_tokens
        if isinstance(message, Failed):
            if pending.segment is not None:
                self._pool.drop(pending.segment)
            _fail(pending, error_of(message))
        else:
            self._answer(pending, message)

    def _answer(self, pending: _Pending, message: Answer) -> None:
        prepared = pending.prepared
        shape = len(prepared.seqs), prepared.dimensions
        if pending.segment is None:
            vectors = np.frombuffer(message.vectors, np.float32).reshape(shape)
        else:
            offset = align(_num_ints(prepared) * 4)
            vectors = self._pool.lend(pending.segment, offset, *shape)
        total = perf_counter() - prepared.received
        timings = Timings(prepared.tokenize, message.queue, message.compute, total)
        if not pending.future.done():
            pending.future.set_result(Result(vectors, prepared.num_tokens, prepared.num_truncated, timings))


def _num_ints(prepared: Prepared) -> int:
    return len(prepared.seqs) + prepared.num_tokens


def _arrays(prepared: Prepared) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The lengths, then the ids."""
    lengths = np.fromiter((seq.ids.size for seq in prepared.seqs), np.int32, len(prepared.seqs))
    return np.concatenate([lengths, *(seq.ids for seq in prepared.seqs)], dtype=np.int32)


def _fail(pending: _Pending, error: WhimbrelError) -> None:
    if not pending.future.done():
        pending.future.set_exception(error)


class RemoteEngine:
    """A model in engine processes: an AsyncEmbedder. All of it runs in one event loop."""

    def __init__(
        self,
        worker: int,
        card: Card,
        plan: Plan,
        folder: Path,
        *,
        num_replicas: int,
        on_quarantine: Callable[[bytes], None],
        broken: Callable[[BrokenLine], None],
    ) -> None:
        """`on_quarantine` is told of texts that kill engines, `broken` of a line that cannot be understood."""
        self.card = card
        self.plan = plan
        self._worker = worker
        self._frontend = Frontend(folder, card, plan)
        self._replicas = [Replica() for _ in range(num_replicas)]
        self._waiting: OrderedDict[_Pending, None] = OrderedDict()
        """Requests for which no engine is up."""
        self._orphans: dict[int, dict[int, _Pending]] = {}
        """By replica: what a life left unanswered, until the supervisor says how it ended."""
        self._quarantined: OrderedDict[bytes, float] = OrderedDict()
        self._on_quarantine = on_quarantine
        self._broken = broken
        self._tokenizing = 0
        # Tokenising holds no lock of Python's, and must not hold up the event loop.
        self._tokenizers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="whimbrel-tokenizer")

    # What the server asks

    @property
    def ready(self) -> bool:
        return any(replica.up for replica in self._replicas)

    @property
    def status(self) -> str:
        """A word or a sentence on how the engines are."""
        reasons = [replica.down.reason for replica in self._replicas if replica.down is not None]
        return "; ".join(reasons) if reasons else "ready" if self.ready else "loading"

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait or run, as far as this worker knows."""
        boards = sum(replica.board.queued_tokens for replica in self._replicas if replica.up and replica.board is not None)
        return boards + sum(pending.prepared.num_tokens for pending in self._waiting)

    async def run(self, request: Request) -> Result:
        """Answer one request, whatever becomes of the engines meanwhile. Cancelling it drops what has not run yet.

        Raises InvalidRequest, TooLong, TooLarge, Overloaded, Unavailable, DeadlineExceeded, ComputeError.
        """
        received = perf_counter()
        self._admit()
        prepared = await self._prepare(request, received)
        if not prepared.seqs:
            empty = np.empty((0, prepared.dimensions), np.float32)
            return Result(empty, 0, 0, Timings(tokenize=prepared.tokenize, total=perf_counter() - received))
        self._refuse_quarantined(prepared)
        pending = _Pending(prepared, asyncio.get_running_loop().create_future())
        self._dispatch(pending)
        try:
            if isinf(request.deadline):
                return await pending.future
            async with asyncio.timeout(max(0.0, request.deadline - perf_counter())):
                return await pending.future
        except TimeoutError:
            raise DeadlineExceeded("the time that the request gave is over.") from None
        finally:
            pending.future.cancel()
            self._waiting.pop(pending, None)

    async def _prepare(self, request: Request, received: float) -> Prepared:
        texts = request.texts
        if len(texts) <= 32 and sum(len(text) for text in texts) <= _INLINE_CHARACTERS:
            return self._frontend.prepare(request, received=received)
        if self._tokenizing >= _MAX_TOKENIZING:
            raise Overloaded(f"{self._tokenizing:,} requests wait to be tokenised. Try again later.", retry_after=1.0)
        self._tokenizing += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._tokenizers, lambda: self._frontend.prepare(request, received=received))
        finally:
            self._tokenizing -= 1

    def _admit(self) -> None:
        """Refuse at once, before a request costs anything, when it would be refused later.

        Only the engine knows its queue exactly; it refuses too, with the same words.
        """
        if failing := self._failing():
            raise Unavailable(f"{failing.reason}.", retry_after=failing.retry_after * _jitter())
        waiting = self.queued_tokens
        rate = sum(replica.board.rate for replica in self._replicas if replica.board is not None)
        full = waiting > 2 * self.plan.max_queue_tokens
        if full or (rate and waiting / rate > 2 * self.plan.max_queue_seconds):
            wait = waiting / rate if rate else 1.0
            raise Overloaded(f"{waiting:,} tokens wait already. Try again later.", retry_after=max(1.0, wait * _jitter()))

    def _failing(self) -> Down | None:
        """The supervisor's word, if every replica keeps failing."""
        downs = [replica.down for replica in self._replicas]
        return downs[0] if all(down is not None and down.failing for down in downs) else None

    # Engines come and go

    def attach(self, index: int, sock: socket.socket, board: Board) -> None:
        """A replica is ready: it gets what has waited."""
        self._replicas[index].attach(sock, board, on_end=lambda error: self._lost(index, error))
        waiting, self._waiting = self._waiting, OrderedDict()
        for pending in waiting:
            self._dispatch(pending)

    def down(self, down: Down) -> None:
        """What the supervisor says of a replica that is not up. After a death the blame is laid."""
        replica = self._replicas[down.replica]
        replica.down = down
        self._lost(down.replica, None)
        for uid, pending in self._orphans.pop(down.replica, {}).items():
            count("retries", model=self.plan.served_name)
            self._lay_blame(replica, uid, pending, down.blame)
            self._dispatch(pending)
        if (failing := self._failing()) is not None:
            waiting, self._waiting = self._waiting, OrderedDict()
            for pending in waiting:
                _fail(
                    pending,
                    Unavailable(f"{failing.reason}.", retry_after=failing.retry_after * _jitter()),
                )

    def quarantine(self, digest: bytes) -> None:
        """Refuse a text from now on."""
        self._quarantined[digest] = perf_counter() + _QUARANTINE_SECONDS
        if len(self._quarantined) > _MAX_QUARANTINED:
            self._quarantined.popitem(last=False)

    def fail_all(self, error: WhimbrelError) -> None:
        """Answer whatever is unanswered."""
        for pending in self._unanswered():
            _fail(pending, error)

    def _unanswered(self) -> Iterator[_Pending]:
        yield from self._waiting
        for replica in self._replicas:
            yield from replica.pending
        for orphans in self._orphans.values():
            yield from orphans.values()

    def _lost(self, index: int, error: BrokenLine | None) -> None:
        if error is not None:
            self._broken(error)
        replica = self._replicas[index]
        left = replica.detach()
        self._orphans.setdefault(index, {}).update(left)

    def _dispatch(self, pending: _Pending) -> None:
        """To the replica that has least to do, or to those who wait."""
        if pending.future.done():
            return
        up = [replica for replica in self._replicas if replica.up]
        if up:
            min(up, key=lambda replica: replica.outstanding_tokens).send(pending)
        elif (failing := self._failing()) is not None:
            _fail(pending, Unavailable(f"{failing.reason}.", retry_after=failing.retry_after))
        else:
            self._waiting[pending] = None
            pending.future.add_done_callback(lambda _: self._waiting.pop(pending, None))

    def _lay_blame(self, replica: Replica, uid: int, pending: _Pending, blame: float) -> None:
        """Mark what the dead engine was running of this request."""
        pending.admitted = True
        pending.segment = None
        if replica.board is None:
            return
        for flight in replica.board.flights():
            mine = flight.entries[(flight.entries["worker"] == self._worker) & (flight.entries["uid"] == uid)]
            together = len(flight.entries)
            for index in mine["index"].tolist():
                if together == 1:
                    pending.blame[index] = pending.blame.get(index, 0.0) + blame
                pending.limits[index] = max(1, min(pending.limits.get(index, together), together) // 2)
                if pending.blame.get(index, 0.0) >= MAX_BLAME:
                    self._convict(pending, index)

    def _convict(self, pending: _Pending, index: int) -> None:
        digest = _digest(pending.prepared.seqs[index])
        self.quarantine(digest)
        self._on_quarantine(digest)
        _fail(pending, _poison(index))

    def _refuse_quarantined(self, prepared: Prepared) -> None:
        if not self._quarantined:
            return
        now = perf_counter()
        for seq in prepared.seqs:
            if self._quarantined.get(_digest(seq), -inf) > now:
                raise _poison(seq.index)

    async def close(self) -> None:
        """End the threads."""
        self._tokenizers.shutdown(wait=False)


def _digest(seq: Seq) -> bytes:
    return blake2b(np.ascontiguousarray(seq.ids).data, digest_size=16).digest()


def _poison(index: int) -> EngineCrash:
    return EngineCrash("the engine dies of this text; it is refused from now on.", param=f"input[{index}]")


def _jitter() -> float:
    """A factor that keeps clients from coming back all at once."""
    return random.uniform(1.0, 1.5)  # noqa: S311
