"""A model in engine processes, as the AsyncEmbedder that a worker serves.

Theory of operation. A request is tokenised here and sent to the engine with the fewest outstanding tokens; it stays here
until it is answered. If an engine dies, its unanswered requests go to another, or wait until it is back. What was on the
device at that moment is suspect: it is sent again with a limit on how many may share its batch, half as many as before, and
engines run such batches while nothing else runs. So batch-mates are cleared and a text that kills engines ends up alone; after
two deaths on which it was alone it is refused, and remembered (suspicion.py). A kill from outside blames less than a crash.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf, isinf
from pathlib import Path
from time import perf_counter
from typing import Final, ParamSpec, TypeVar, cast

import numpy as np

from whimbrel.engine.admission import QueueState, admit, admit_any
from whimbrel.engine.prepare import AsyncPreprocessor, Preprocessor, input_size
from whimbrel.engine.prepared import EngineRequest
from whimbrel.errors import DeadlineExceeded, EngineCrash, Unavailable, WhimbrelError
from whimbrel.outputs.layout import build_outputs, concat_sparse, response_layout
from whimbrel.outputs.merge import ChunkMerge, Deduplication, map_error_location, merge_chunks
from whimbrel.outputs.multi_vector import reduce_tokens
from whimbrel.outputs.pair_scoring import scores_by_similarity
from whimbrel.server.processes.channel import ProtocolError
from whimbrel.server.processes.messages import EngineDown
from whimbrel.server.processes.quarantine import QuarantineList
from whimbrel.server.processes.replica import Pending, Replica, fail
from whimbrel.server.processes.sharding import Shard, merge_shards, split_into_shards
from whimbrel.server.processes.shared_memory import StatusBoard
from whimbrel.telemetry.trace import count
from whimbrel.types.card import Card
from whimbrel.types.plan import Plan
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.result import Result, Timings
from whimbrel.types.seq import TokenInfo

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("whimbrel")

_MANY: Final = 256
"""More seqs or pairs take milliseconds to share out."""


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
        max_segments: int,
        on_quarantine: Callable[[bytes], None],
        broken: Callable[[ProtocolError], None],
    ) -> None:
        """`max_segments`: of shared memory, per replica. `on_quarantine` is told of texts that kill engines, `broken` of a line
        that cannot be understood."""
        self.card = card
        self.plan = plan
        self._worker = worker
        self._preprocessor = AsyncPreprocessor(Preprocessor(folder, card, plan))
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="whimbrel-remote")
        """For what would hold the event loop up."""
        self._replicas = [Replica(max_segments) for _ in range(num_replicas)]
        self._waiting: OrderedDict[Pending, None] = OrderedDict()
        """Requests for which no engine is up."""
        self._quarantine = QuarantineList()
        self._aborted: WhimbrelError | None = None
        self._on_quarantine = on_quarantine
        self._broken = broken
        self._preparing_tokens = {True: 0, False: 0}
        """Of the requests that are being tokenised, estimated: of small ones, and of others."""
        self._tokens_per_character = 0.3

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
        return boards + sum(pending.request.num_tokens for pending in self._waiting)

    async def run(self, request: Request) -> Result:
        """Answer one request, whatever becomes of the engines meanwhile. Cancelling it drops what has not run yet.

        Raises InvalidRequest, TooLong, TooLarge, Overloaded, Unavailable, DeadlineExceeded, ComputeError.
        """
        tokens = self._check(request)
        small = self._is_small(tokens)
        self._preparing_tokens[small] += tokens
        try:
            prepared = await self._preprocessor.preprocess(request)
        finally:
            self._preparing_tokens[small] -= tokens
        self._learn(request, prepared)
        if not prepared.seqs and prepared.pair_scoring is None:
            places = response_layout(prepared.layout, prepared.pair_scoring)
            outputs = build_outputs(
                places, places.arrays(np.empty(0, np.uint8)), None if places.dynamic_output is None else concat_sparse({})
            )
            return Result(
                reduce_tokens(outputs, prepared.reduction),
                0,
                0,
                Timings(tokenize=prepared.tokenize, total=perf_counter() - prepared.received),
                prepared.token_offsets,
            )
        result = await self._compute(prepared)
        if prepared.reduction is None or prepared.pair_scoring is not None:
            return result
        return replace(result, outputs=await self._in_thread(reduce_tokens, result.outputs, prepared.reduction))

    async def tokenize(self, asked: TokenizeRequest) -> list[TokenInfo]:
        """The tokens of each text. Raises InvalidRequest and TooLarge."""
        return await self._preprocessor.tokenize(asked)

    async def decode(self, asked: DetokenizeRequest) -> list[str]:
        """The text of each row of ids. Raises InvalidRequest."""
        return await self._preprocessor.decode(asked)

    async def _compute(self, prepared: EngineRequest) -> Result:
        """By one engine, or by several at once if it is a long list of pairs."""
        found = await self._shares(prepared)
        if not found:
            return await self._ask(Pending(prepared, asyncio.get_running_loop().create_future()))
        parts = [asyncio.ensure_future(self._ask_share(share, prepared.merge)) for share in found]
        try:
            results = await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()
        outputs = merge_chunks(merge_shards([result.outputs for result in results], found), prepared.merge)
        queue, compute = (max(getattr(result.timings, name) for result in results) for name in ("queue", "compute"))
        timings = Timings(prepared.tokenize, queue, compute, perf_counter() - prepared.received)
        return Result(
            outputs, prepared.num_tokens, prepared.num_truncated, timings, prepared.token_offsets, prepared.pair_tokens
        )

    async def _shares(self, prepared: EngineRequest) -> list[Shard]:
        keeps = self.plan.document_cache_bytes > 0
        num_engines = len(self._replicas) if keeps else sum(replica.up for replica in self._replicas)
        if num_engines < 2:
            return []
        share = partial(
            split_into_shards, prepared, self.card, num_engines, least_tokens=self.plan.max_batch_tokens, fixed=keeps
        )
        num_pairs = 0 if prepared.pair_scoring is None else prepared.pair_scoring.num_pairs
        return await self._in_thread(share) if max(len(prepared.seqs), num_pairs) > _MANY else share()

    async def _ask_share(self, share: Shard, merge: ChunkMerge | Deduplication | None) -> Result:
        try:
            return await self._ask(Pending(share.request, asyncio.get_running_loop().create_future(), home=share.engine))
        except WhimbrelError as error:
            raise map_error_location(share.map_error_location(error), merge) from None

    async def _ask(self, pending: Pending) -> Result:
        """The answer of an engine, whatever becomes of the engines meanwhile."""
        prepared = pending.request
        self._dispatch(pending)
        try:
            if isinf(prepared.deadline):
                result = await pending.future
            else:
                async with asyncio.timeout(max(0.0, prepared.deadline - perf_counter())):
                    result = await pending.future
            for index in pending.limits:
                self._quarantine.clear(prepared.seqs[index])
            return result
        except TimeoutError:
            raise DeadlineExceeded("the time that the request gave is over.") from None
        finally:
            pending.future.cancel()
            self._waiting.pop(pending, None)

    async def _in_thread(self, action: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await asyncio.wrap_future(self._threads.submit(action, *args, **options))

    def _check(self, request: Request) -> int:
        """Refuse at once, before a request costs anything, what would be refused later. Returns its tokens, estimated.

        Only an engine knows its queue exactly, and what a request with a key or of high priority would wait for: it checks
        again.
        """
        if failing := self._failing():
            raise _unavailable(failing)
        tokens = self._estimate(request)
        boards = [replica.board for replica in self._replicas if replica.up and replica.board is not None]
        if request.priority >= 0:
            small = self._is_small(tokens)
            here = self._preparing_tokens[True] + sum(pending.request.num_tokens for pending in self._waiting)
            bulk = self._preparing_tokens[False]
            each = max(1, len(boards))
            queued = (here + bulk + sum(board.queued_tokens for board in boards)) // each
            ahead = (here + sum(board.small_tokens for board in boards)) // each if small else queued
            rate, chance = sum(board.rate for board in boards) / each, random.random()  # noqa: S311
            if request.tenant:
                admit_any(self.plan, queued, tokens=tokens, rate=rate, chance=chance)
            else:
                admit(
                    self.plan,
                    QueueState(queued, ahead + tokens, 0, rate),
                    tokens=tokens,
                    num_bytes=0,
                    small=small,
                    chance=chance,
                )
        return tokens

    def _is_small(self, tokens: int) -> bool:
        """As the scheduler has it."""
        return tokens <= self.plan.max_batch_tokens // 4

    def _estimate(self, request: Request) -> int:
        """Tokens of a request before it is tokenised, by the number of its characters or ids. What is too long will be cut."""
        ids = bool(request.texts) and isinstance(request.texts[0], np.ndarray)
        rate = 1.0 if ids else self._tokens_per_character
        limit = inf if request.split_long else self.plan.max_length
        texts: Iterable[object] = request.texts
        if scores_by_similarity(self.card, request):  # a query that stands in a thousand pairs is computed once
            parts = {id(part): part for pair in request.texts for part in cast("tuple[object, ...]", pair)}
            texts = [part for part in parts.values() if isinstance(part, str)]
        return round(sum(min(input_size(text) * rate, limit) for text in texts))

    def _learn(self, request: Request, prepared: EngineRequest) -> None:
        """Make the next estimate a better one."""
        size = sum(map(len, request.texts))
        if size and isinstance(request.texts[0], str) and not prepared.num_truncated:
            self._tokens_per_character += 0.02 * (min(1.0, prepared.num_tokens / size) - self._tokens_per_character)

    def _failing(self) -> EngineDown | None:
        """The supervisor's word, if every replica keeps failing."""
        downs = [replica.down for replica in self._replicas]
        return downs[0] if all(down is not None and down.failing for down in downs) else None

    # Engines come and go

    def attach(self, index: int, sock: socket.socket, board: StatusBoard) -> None:
        """A replica is ready: it gets what has waited."""
        replica = self._replicas[index]
        replica.attach(sock, board, on_end=lambda error: self._lost(replica, error))
        waiting, self._waiting = self._waiting, OrderedDict()
        for pending in waiting:
            self._dispatch(pending)

    def down(self, down: EngineDown) -> None:
        """What the supervisor says of a replica that is not up. After a death the blame is laid."""
        replica = self._replicas[down.replica]
        replica.down = down
        left = replica.end()
        self._attribute_crash(replica, left, down.blame)
        for pending in left.values():
            pending.admitted, pending.segment = True, None
            if not pending.future.done():
                count("retries", model=self.plan.served_name)
                self._dispatch(pending)
        if (failing := self._failing()) is not None:
            waiting, self._waiting = self._waiting, OrderedDict()
            for pending in waiting:
                fail(pending, _unavailable(failing))

    def quarantine(self, digest: bytes) -> None:
        """Refuse a text from now on."""
        self._quarantine.add(digest, perf_counter())

    def fail_all(self, error: WhimbrelError) -> None:
        """Answer whatever is unanswered, and what is still being prepared."""
        self._aborted = error
        for pending in self._unanswered():
            fail(pending, error)

    def _unanswered(self) -> Iterator[Pending]:
        yield from self._waiting
        for replica in self._replicas:
            yield from replica.pending

    def _lost(self, replica: Replica, error: ProtocolError | None) -> None:
        """A line has ended; the supervisor will say how its engine did."""
        if error is not None:
            self._broken(error)
        replica.disconnect()

    def _dispatch(self, pending: Pending) -> None:
        """To the replica that has least to do, or to those who wait."""
        if pending.future.done():
            return
        guilty, alone = self._quarantine.check(pending.request.seqs, perf_counter())
        if guilty is not None or self._aborted is not None:
            fail(pending, self._aborted or _quarantined(guilty or 0))
            return
        pending.limits |= dict.fromkeys(alone, 1)
        up = [replica for replica in self._replicas if replica.up]
        if up:
            home = None if pending.home is None else self._replicas[pending.home]
            (home if home in up else min(up, key=lambda replica: replica.outstanding_tokens)).send(pending)
        elif (failing := self._failing()) is not None:
            fail(pending, _unavailable(failing))
        else:
            self._waiting[pending] = None

    def _attribute_crash(self, replica: Replica, left: dict[int, Pending], blame: float) -> None:
        """Mark what the dead engine was running of these requests."""
        flights = replica.board.flights() if replica.board is not None else []
        for flight in flights:
            together = len(flight.entries)
            entries: list[tuple[int, int, int]] = flight.entries.tolist()
            for worker, index, uid in entries:
                if worker != self._worker or (pending := left.get(uid)) is None:
                    continue
                if together == 1 and len(flights) == 1:
                    seq = pending.request.seqs[index]
                    if (digest := self._quarantine.record_crash(seq, blame, perf_counter())) is not None:
                        self._on_quarantine(digest)
                pending.limits[index] = max(1, min(pending.limits.get(index, together), together) // 2)


def _quarantined(index: int) -> EngineCrash:
    return EngineCrash("the engine dies of this text; it is refused for now.", item=index)


def _unavailable(down: EngineDown) -> Unavailable:
    """With a chance in it, so that clients do not come back all at once."""
    return Unavailable(f"{down.reason}.", retry_after=down.retry_after * random.uniform(1.0, 1.5))  # noqa: S311
