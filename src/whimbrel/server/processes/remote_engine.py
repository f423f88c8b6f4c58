"""Remote engine: a model in engine processes, as the `AsyncEmbedder` that a worker serves.

Theory of operation. The worker tokenizes a request, sends it to the engine with the fewest outstanding tokens and keeps it
until it is answered. If an engine dies, its unanswered requests go to another, or wait until an engine is up. The seqs that
were on the device at that moment are suspects. Each is sent again with a limit on the seqs that may share its batch, half as
many as before, and engines run such batches alone. So innocent seqs are cleared, and a text that crashes engines ends up alone.
After two deaths on which it was alone it is refused, and remembered (quarantine.py). A kill from outside counts less than a
crash.

The engines of a model may be released while no request needs them. A request that comes then waits as after a death, and says
that the model is wanted.
"""

import asyncio
import random
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import isinf
from pathlib import Path
from time import perf_counter
from typing import Final, cast

import numpy as np

from whimbrel.engine.admission import QueueState, admit, admit_any
from whimbrel.engine.engine_request import EngineRequest
from whimbrel.engine.prepare import AsyncPreprocessor, Preprocessor
from whimbrel.errors import DeadlineExceeded, EngineCrash, Unavailable, WhimbrelError
from whimbrel.outputs.finishers import locate_error
from whimbrel.outputs.layout import build_outputs, concat_sparse
from whimbrel.outputs.multi_vector import TokenReduction
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.server.processes.messages import EngineDown
from whimbrel.server.processes.quarantine import QuarantineList
from whimbrel.server.processes.replica import Replica, Unanswered, fail
from whimbrel.server.processes.sharding import Shard, merge_shards, split_into_shards
from whimbrel.server.processes.shared_memory import StatusBoard
from whimbrel.telemetry.trace import count
from whimbrel.types.card import Card
from whimbrel.types.plan import Plan
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.residence import Residence
from whimbrel.types.result import Result, Timings
from whimbrel.types.scheduling import ORDINARY, Scheduling
from whimbrel.types.seq import TokenInfo

_INLINE_PAIRS: Final = 256
"""Seqs or pairs above which sharding takes milliseconds, so that it runs in a thread."""


class RemoteEngine:
    """A model that runs in engine processes: an `AsyncEmbedder` for one event loop."""

    def __init__(
        self,
        worker: int,
        card: Card,
        plan: Plan,
        folder: Path,
        *,
        replicas: list[Replica],
        on_crash: Callable[[bytes], None],
        on_wanted: Callable[[], None] | None = None,
    ) -> None:
        """`on_crash` gets the digest of a text that crashes engines.

        `on_wanted` has the engines started, of a model that is loaded by its first request; None: it is always loaded.
        """
        self.card = card
        self.plan = plan
        self._worker = worker
        self._preprocessor = AsyncPreprocessor(Preprocessor(folder, card, plan))
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="whimbrel-remote")
        self._replicas = replicas
        self._waiting: dict[Unanswered, None] = {}
        self._quarantine = QuarantineList()
        self._aborted: WhimbrelError | None = None
        self._on_crash = on_crash
        self._on_wanted = on_wanted
        self._has_asked = False
        """True if `on_wanted` was called, and no engine has come or failed since."""
        self._on_released: Callable[[], None] | None = None
        self._is_released = False
        """True from `release` until an engine is attached."""
        self._retry_at = 0.0
        """Time from which a model that failed to load may be wanted again."""
        self.told = Residence("unloaded")
        """The residence that the supervisor has told."""
        self.in_flight = 0
        self.last_used = 0.0
        """Time (perf_counter) at which the last request ended; 0: there was none."""
        self._idle = asyncio.Event()
        self._idle.set()

    # AsyncEmbedder

    @property
    def ready(self) -> bool:
        """True if an engine is up, or the next request has it started."""
        return self._on_wanted is not None or any(replica.up for replica in self._replicas)

    @property
    def status(self) -> str:
        """The state of the engines, as a word or a sentence."""
        reasons = [replica.down.reason for replica in self._replicas if replica.down is not None]
        if reasons or any(replica.up for replica in self._replicas):
            return "; ".join(reasons) or "ready"
        return self.residence.state

    @property
    def residence(self) -> Residence:
        """The state of the engines, as far as this worker sees it, and what the supervisor has told of them."""
        if any(replica.up for replica in self._replicas):
            return self.told if self.told.state == "loaded" else Residence()
        if self._unavailable() is not None:
            return Residence("failed")
        asked = self._on_wanted is None or self._has_asked or self.told.state == "loading"
        return Residence("loading" if asked else "unloaded")

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait here until an engine is up. Engines report those that they have."""
        return sum(pending.request.num_tokens for pending in self._waiting)

    async def run(
        self, request: Request, scheduling: Scheduling = ORDINARY, *, charge: Callable[[int], None] | None = None
    ) -> Result:
        """Answer a request, also if engines die meanwhile. Cancelling it drops the texts that have not run yet.

        `charge` gets the number of tokens before any is computed, and may raise.

        Raises InvalidRequest, TooLong, TooLarge, Overloaded, Unavailable, DeadlineExceeded, ComputeError.
        """
        self._enter()
        try:
            return await self._run(request, scheduling, charge)
        finally:
            self._leave()

    async def tokenize(self, request: TokenizeRequest) -> list[TokenInfo]:
        """Return the tokens of each text. Raises InvalidRequest and TooLarge."""
        self._enter()
        try:
            return await self._preprocessor.tokenize(request)
        finally:
            self._leave()

    async def decode(self, request: DetokenizeRequest) -> list[str]:
        """Return the text of each row of token ids. Raises InvalidRequest."""
        self._enter()
        try:
            return await self._preprocessor.decode(request)
        finally:
            self._leave()

    def _enter(self) -> None:
        self.in_flight += 1
        self._idle.clear()

    def _leave(self) -> None:
        self.in_flight -= 1
        self.last_used = perf_counter()
        if not self.in_flight:
            self._idle.set()

    async def _run(self, request: Request, scheduling: Scheduling, charge: Callable[[int], None] | None) -> Result:
        self._check_admission(request, scheduling)
        tokenized = await self._preprocessor.preprocess(request, scheduling)
        if charge is not None:
            charge(tokenized.num_tokens)
        result = _empty_result(tokenized) if tokenized.is_empty else await self._compute(tokenized)
        finish = tokenized.finish
        if isinstance(finish, TokenReduction):
            loop = asyncio.get_running_loop()
            return replace(result, outputs=await loop.run_in_executor(self._threads, finish.apply, result.outputs))
        return result if isinstance(finish, PairScoring) else replace(result, outputs=finish.apply(result.outputs))

    async def _compute(self, request: EngineRequest) -> Result:
        """Return the response of one engine, or of several that each score a shard of a long list of pairs."""
        try:
            shards = await self._split(request)
            if not shards:
                return await self._answer(request)
            tasks = [asyncio.ensure_future(self._answer_shard(shard)) for shard in shards]
            try:
                results = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
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
        if max(len(request.seqs), num_pairs) <= _INLINE_PAIRS:
            return split()
        return await asyncio.get_running_loop().run_in_executor(self._threads, split)

    async def _answer_shard(self, shard: Shard) -> Result:
        try:
            return await self._answer(shard.request, home=shard.engine)
        except WhimbrelError as error:
            raise shard.locate_error(error) from None

    async def _answer(self, request: EngineRequest, *, home: int | None = None) -> Result:
        pending = Unanswered(request, asyncio.get_running_loop().create_future(), home=home)
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

    def _check_admission(self, request: Request, scheduling: Scheduling) -> None:
        """Raise Unavailable or Overloaded if the engines would refuse a request, before it is tokenized.

        The engine decides exactly. Here a request counts as small if it has no more characters than a batch has tokens. A
        token has about four characters, and a small request fills at most a quarter of a batch.
        """
        if (error := self._unavailable()) is not None:
            raise error
        if scheduling.priority < 0:  # only the engine knows the tokens ahead of it
            return
        boards = [replica.board for replica in self._replicas if replica.up and replica.board is not None]
        num_engines, waiting = max(1, len(boards)), self.queued_tokens
        queued = (waiting + sum(board.queued_tokens for board in boards)) // num_engines
        tokens = request.num_inputs
        rate, jitter = sum(board.rate for board in boards) / num_engines, random.random()  # noqa: S311
        if scheduling.tenant:
            admit_any(self.plan, queued, tokens=tokens, rate=rate, jitter=jitter)
            return
        small = num_characters(request) <= self.plan.max_batch_tokens
        ahead = (waiting + sum(board.small_tokens for board in boards)) // num_engines if small else queued
        queue = QueueState(queued, ahead + tokens, 0, rate)
        admit(self.plan, queue, tokens=tokens, num_bytes=0, small=small, returns=scheduling.waited > 0, jitter=jitter)

    def _unavailable(self) -> Unavailable | None:
        """Return the error of all requests if every replica keeps failing. Its delay is random, so that clients spread out."""
        downs = [replica.down for replica in self._replicas if replica.down is not None and replica.down.failing]
        if len(downs) < len(self._replicas):
            return None
        retry_after = downs[0].retry_after
        if self._on_wanted is not None and (retry_after := self._retry_at - perf_counter()) <= 0.0:
            return None
        return Unavailable(f"{downs[0].reason}.", retry_after=retry_after * random.uniform(1.0, 1.5))  # noqa: S311

    # Engines

    def attach(self, index: int, sock: socket.socket, board: StatusBoard) -> None:
        """Connect a replica that is ready, and send it the waiting requests."""
        self._replicas[index].attach(sock, board)
        self._is_released = self._has_asked = False
        self._dispatch_waiting()

    def release(self, on_released: Callable[[], None]) -> None:
        """Send the engines no further requests, and disconnect from them once they have answered those that they have."""
        self._is_released, self._has_asked, self._on_released = True, False, on_released
        for replica in self._replicas:
            for pending in replica.pending.values():
                pending.future.add_done_callback(self._check_released)
        self._check_released()

    def _check_released(self, *_: object) -> None:
        pending = (each for replica in self._replicas for each in replica.pending.values())
        if self._on_released is None or any(not each.future.done() for each in pending):
            return
        on_released, self._on_released = self._on_released, None
        for replica in self._replicas:
            replica.end()
        on_released()
        if self._waiting:  # since before: the engines were down
            self._ask()

    def _ask(self) -> None:
        """Have the engines started, once for all requests that wait."""
        if self._on_wanted is not None and not self._has_asked:
            self._has_asked = True
            self._on_wanted()

    async def close(self) -> None:
        """Wait for the requests that have begun, then give up engines and threads. No name leads here any more."""
        await self._idle.wait()
        for replica in self._replicas:
            replica.end()
        self._threads.shutdown(wait=False)
        await asyncio.to_thread(self._preprocessor.close)

    def down(self, down: EngineDown) -> None:
        """Handle the end of a replica. Its unanswered requests go to others; the seqs that it ran become suspects."""
        replica = self._replicas[down.replica]
        replica.down = down
        if down.failing:
            self._has_asked, self._retry_at = False, perf_counter() + down.retry_after
        unanswered = replica.end()
        self._attribute_crash(replica, unanswered, down.blame)
        for pending in unanswered.values():
            pending.admitted, pending.segment = True, None
            if not pending.future.done():
                count("retries", model=self.plan.served_name)
                self._dispatch(pending)
        if down.failing:
            self._dispatch_waiting()
        self._check_released()

    def quarantine(self, digest: bytes) -> None:
        self._quarantine.add(digest, perf_counter())

    def fail_all(self, error: WhimbrelError) -> None:
        """Answer every request with an error, including those that are still being tokenized."""
        self._aborted = error
        for pending in [*self._waiting, *(each for replica in self._replicas for each in replica.pending.values())]:
            fail(pending, error)

    def _dispatch_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for pending in waiting:
            self._dispatch(pending)

    def _dispatch(self, pending: Unanswered) -> None:
        """Send a request to the replica with the fewest outstanding tokens, or let it wait until an engine is up."""
        if pending.future.done():
            return
        if self._aborted is not None:
            fail(pending, self._aborted)
            return
        if self._quarantine.entries:
            refused, alone = self._quarantine.check(pending.request.seqs, perf_counter())
            if refused is not None:
                fail(pending, EngineCrash("the engine dies of this text; it is refused for now.", item=refused))
                return
            pending.suspects |= dict.fromkeys(alone, 1)
        up = [] if self._is_released else [replica for replica in self._replicas if replica.up]
        if up:
            home = None if pending.home is None else self._replicas[pending.home]
            (home if home in up else min(up, key=lambda replica: replica.outstanding_tokens)).send(pending)
        elif (error := self._unavailable()) is not None:
            fail(pending, error)
        else:
            self._waiting[pending] = None
            self._ask()

    def _attribute_crash(self, replica: Replica, unanswered: dict[int, Unanswered], blame: float) -> None:
        """Mark the seqs of these requests that the dead engine ran as suspects."""
        batches = replica.board.in_flight() if replica.board is not None else []
        for batch in batches:
            together = len(batch.entries)
            entries: list[tuple[int, int, int]] = batch.entries.tolist()
            for worker, index, uid in entries:
                if worker != self._worker or (pending := unanswered.get(uid)) is None:
                    continue
                if together == 1 and len(batches) == 1:
                    seq = pending.request.seqs[index]
                    if (digest := self._quarantine.record_crash(seq, blame, perf_counter())) is not None:
                        self._on_crash(digest)
                pending.suspects[index] = max(1, min(pending.suspects.get(index, together), together) // 2)


def _empty_result(request: EngineRequest) -> Result:
    """Return the result of a request without texts, which needs no engine."""
    entries = None if request.response.dynamic_output is None else concat_sparse({})
    outputs = build_outputs(request.response, np.empty(request.response.num_bytes, np.uint8), entries)
    return request.result(outputs, Timings(request.tokenize, total=perf_counter() - request.received))


def num_characters(request: Request) -> int:
    """Return about how many characters the model reads: distinct texts, once for each hypothesis, and beside each its words.

    A query counts once in a list of pairs. Hypotheses are read with every text, and so are labels.
    """
    texts: Iterable[object] = request.texts
    parts = (part for text in texts for part in (cast("tuple[object, ...]", text) if isinstance(text, tuple) else (text,)))
    own = sum({id(part): len(part) for part in parts if isinstance(part, str)}.values())
    beside = sum(map(len, (*request.hypotheses, *request.labels)))
    return own * max(1, len(request.hypotheses)) + len(request.texts) * beside
