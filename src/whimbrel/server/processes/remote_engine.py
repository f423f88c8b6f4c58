"""Remote engine: a model in engine processes, as the `AsyncEmbedder` that a worker serves.

Theory of operation. A request is tokenized here and sent to the engine with the fewest outstanding tokens; it is kept here
until it is answered. If an engine dies, its unanswered requests go to another, or wait until it is back. The seqs that were on
the device at that moment are suspects: each is sent again with a limit on the seqs that may share its batch, half as many as
before, and engines run such batches while nothing else runs. So innocent seqs are cleared, and a text that crashes engines ends
up alone. After two deaths on which it was alone it is refused, and remembered (quarantine.py). A kill from outside counts less
than a crash.
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
from whimbrel.engine.engine_request import EngineRequest
from whimbrel.engine.prepare import AsyncPreprocessor, Preprocessor, input_size
from whimbrel.errors import DeadlineExceeded, EngineCrash, Unavailable, WhimbrelError
from whimbrel.outputs.finishers import locate_error, read_response
from whimbrel.outputs.layout import concat_sparse
from whimbrel.outputs.multi_vector import TokenReduction
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.requested import scores_by_similarity
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
"""Seqs or pairs above which splitting takes milliseconds, so that it runs in a thread."""


class RemoteEngine:
    """A model that runs in engine processes: an `AsyncEmbedder`. All of it runs in one event loop."""

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
        """`max_segments` limits the segments of shared memory per replica. `on_quarantine` is called with the digest of a text
        that crashes engines, `broken` with the error of a channel whose messages cannot be read.
        """
        self.card = card
        self.plan = plan
        self._worker = worker
        self._preprocessor = AsyncPreprocessor(Preprocessor(folder, card, plan))
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="whimbrel-remote")
        """Threads for work that would hold up the event loop."""
        self._replicas = [Replica(max_segments) for _ in range(num_replicas)]
        self._waiting: OrderedDict[Pending, None] = OrderedDict()
        """Requests that wait until an engine is up."""
        self._quarantine = QuarantineList()
        self._aborted: WhimbrelError | None = None
        self._on_quarantine = on_quarantine
        self._broken = broken
        self._preparing_tokens = {True: 0, False: 0}
        """Estimated tokens of the requests that are being tokenized: small ones, and others."""
        self._tokens_per_character = 0.3

    # What the server asks

    @property
    def ready(self) -> bool:
        return any(replica.up for replica in self._replicas)

    @property
    def status(self) -> str:
        """A word or a sentence on the state of the engines."""
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
            tokenized = await self._preprocessor.preprocess(request)
        finally:
            self._preparing_tokens[small] -= tokens
        self._learn(request, tokenized)
        result = _empty_result(tokenized) if tokenized.is_empty else await self._compute(tokenized)
        finish = tokenized.finish
        if isinstance(finish, TokenReduction):
            return replace(result, outputs=await self._in_thread(finish.apply, result.outputs))
        return result if isinstance(finish, PairScoring) else replace(result, outputs=finish.apply(result.outputs))

    async def tokenize(self, request: TokenizeRequest) -> list[TokenInfo]:
        """Return the tokens of each text. Raises InvalidRequest and TooLarge."""
        return await self._preprocessor.tokenize(request)

    async def decode(self, request: DetokenizeRequest) -> list[str]:
        """Return the text of each row of token ids. Raises InvalidRequest."""
        return await self._preprocessor.decode(request)

    async def _compute(self, request: EngineRequest) -> Result:
        """Return the response of one engine, or of several that each have a shard of a long list of pairs."""
        try:
            shards = await self._split(request)
            if not shards:
                return await self._ask(Pending(request, asyncio.get_running_loop().create_future()))
            asking = [asyncio.ensure_future(self._ask_shard(shard)) for shard in shards]
            try:
                results = await asyncio.gather(*asking)
            finally:
                for each in asking:
                    each.cancel()
        except WhimbrelError as error:
            raise locate_error(error, request.finish) from None
        outputs = merge_shards([result.outputs for result in results], shards)
        queue, compute = (max(getattr(result.timings, name) for result in results) for name in ("queue", "compute"))
        return request.result(outputs, Timings(request.tokenize, queue, compute, perf_counter() - request.received))

    async def _split(self, request: EngineRequest) -> list[Shard]:
        sticky = self.plan.document_cache_bytes > 0
        num_engines = len(self._replicas) if sticky else sum(replica.up for replica in self._replicas)
        if num_engines < 2:
            return []
        split = partial(
            split_into_shards, request, self.card, num_engines, least_tokens=self.plan.max_batch_tokens, sticky=sticky
        )
        num_pairs = request.finish.num_pairs if isinstance(request.finish, PairScoring) else 0
        return await self._in_thread(split) if max(len(request.seqs), num_pairs) > _MANY else split()

    async def _ask_shard(self, shard: Shard) -> Result:
        try:
            return await self._ask(Pending(shard.request, asyncio.get_running_loop().create_future(), home=shard.engine))
        except WhimbrelError as error:
            raise shard.locate_error(error) from None

    async def _ask(self, pending: Pending) -> Result:
        """Return the response of an engine, whatever becomes of the engines meanwhile."""
        request = pending.request
        self._dispatch(pending)
        try:
            if isinf(request.scheduling.deadline):
                result = await pending.future
            else:
                async with asyncio.timeout(max(0.0, request.scheduling.deadline - perf_counter())):
                    result = await pending.future
            for index in pending.suspects:
                self._quarantine.clear(request.seqs[index])
            return result
        except TimeoutError:
            raise DeadlineExceeded("the time that the request gave is over.") from None
        finally:
            pending.future.cancel()
            self._waiting.pop(pending, None)

    async def _in_thread(self, action: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await asyncio.wrap_future(self._threads.submit(action, *args, **options))

    def _check(self, request: Request) -> int:
        """Refuse a request that an engine would refuse later, before it costs anything. Return its estimated tokens.

        The engine checks again: only it knows its queue exactly, and the tokens ahead of a request with a key or of high
        priority.
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
            rate, jitter = sum(board.rate for board in boards) / each, random.random()  # noqa: S311
            if request.tenant:
                admit_any(self.plan, queued, tokens=tokens, rate=rate, jitter=jitter)
            else:
                admit(
                    self.plan,
                    QueueState(queued, ahead + tokens, 0, rate),
                    tokens=tokens,
                    num_bytes=0,
                    small=small,
                    jitter=jitter,
                )
        return tokens

    def _is_small(self, tokens: int) -> bool:
        """Return whether the scheduler would call a request of `tokens` tokens small."""
        return tokens <= self.plan.max_batch_tokens // 4

    def _estimate(self, request: Request) -> int:
        """Return the estimated tokens of a request that is not tokenized yet, from its characters or ids."""
        ids = bool(request.texts) and isinstance(request.texts[0], np.ndarray)
        rate = 1.0 if ids else self._tokens_per_character
        limit = inf if request.split_long else self.plan.max_length
        texts: Iterable[object] = request.texts
        if scores_by_similarity(self.card, request):  # a query that stands in a thousand pairs is computed once
            parts = {id(part): part for pair in request.texts for part in cast("tuple[object, ...]", pair)}
            texts = [part for part in parts.values() if isinstance(part, str)]
        return round(sum(min(input_size(text) * rate, limit) for text in texts))

    def _learn(self, request: Request, tokenized: EngineRequest) -> None:
        """Improve the estimate of tokens per character."""
        size = sum(map(len, request.texts))
        if size and isinstance(request.texts[0], str) and not tokenized.num_truncated:
            self._tokens_per_character += 0.02 * (min(1.0, tokenized.num_tokens / size) - self._tokens_per_character)

    def _failing(self) -> EngineDown | None:
        """Return the supervisor's last report if every replica keeps failing, else None."""
        downs = [replica.down for replica in self._replicas]
        return downs[0] if all(down is not None and down.failing for down in downs) else None

    # Engines come and go

    def attach(self, index: int, sock: socket.socket, board: StatusBoard) -> None:
        """Connect a replica that is ready, and send it the waiting requests."""
        replica = self._replicas[index]
        replica.attach(sock, board, on_end=lambda error: self._lost(replica, error))
        waiting, self._waiting = self._waiting, OrderedDict()
        for pending in waiting:
            self._dispatch(pending)

    def down(self, down: EngineDown) -> None:
        """Note that a replica is not up. Its unanswered requests go to others; the seqs that it ran become suspects."""
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
        """Answer every request with an error, including those that are still being tokenized."""
        self._aborted = error
        for pending in self._unanswered():
            fail(pending, error)

    def _unanswered(self) -> Iterator[Pending]:
        yield from self._waiting
        for replica in self._replicas:
            yield from replica.pending

    def _lost(self, replica: Replica, error: ProtocolError | None) -> None:
        """Note that a channel has ended; the supervisor reports the state of its engine."""
        if error is not None:
            self._broken(error)
        replica.disconnect()

    def _dispatch(self, pending: Pending) -> None:
        """Send a request to the replica with the fewest outstanding tokens, or let it wait."""
        if pending.future.done():
            return
        guilty, alone = self._quarantine.check(pending.request.seqs, perf_counter())
        if guilty is not None or self._aborted is not None:
            fail(pending, self._aborted or _quarantined(guilty or 0))
            return
        pending.suspects |= dict.fromkeys(alone, 1)
        up = [replica for replica in self._replicas if replica.up]
        if up:
            home = None if pending.home is None else self._replicas[pending.home]
            (home if home in up else min(up, key=lambda replica: replica.outstanding_tokens)).send(pending)
        elif (failing := self._failing()) is not None:
            fail(pending, _unavailable(failing))
        else:
            self._waiting[pending] = None

    def _attribute_crash(self, replica: Replica, left: dict[int, Pending], blame: float) -> None:
        """Mark the seqs of these requests that the dead engine was running as suspects."""
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
                pending.suspects[index] = max(1, min(pending.suspects.get(index, together), together) // 2)


def _quarantined(index: int) -> EngineCrash:
    return EngineCrash("the engine dies of this text; it is refused for now.", item=index)


def _unavailable(down: EngineDown) -> Unavailable:
    """With a chance in it, so that clients do not come back all at once."""
    return Unavailable(f"{down.reason}.", retry_after=down.retry_after * random.uniform(1.0, 1.5))  # noqa: S311


def _empty_result(request: EngineRequest) -> Result:
    """Return the result of a request without texts, which no engine needs to see."""
    entries = None if request.response.dynamic_output is None else concat_sparse({})
    outputs = read_response(request.response, np.empty(request.response.num_bytes, np.uint8), entries)
    return request.result(outputs, Timings(request.tokenize, total=perf_counter() - request.received))
