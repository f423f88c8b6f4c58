"""AsyncEngine: an Engine for asyncio, with the same verbs, awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Concatenate, Final, ParamSpec, Self, TypeVar, Unpack

from whimbrel.engine import encode_verbs
from whimbrel.engine.engine import Engine, ProgressCallback
from whimbrel.engine.engine_request import EngineRequest
from whimbrel.engine.prepare import AsyncPreprocessor
from whimbrel.errors import relocating
from whimbrel.outputs import scoring
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.scoring import Operation
from whimbrel.types.card import Card, PoolingOption, RerankerName
from whimbrel.types.options import copy_signature, warn_of_truncation
from whimbrel.types.plan import Options, Plan
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.result import Result
from whimbrel.types.scheduling import ORDINARY, Scheduling
from whimbrel.types.seq import TokenInfo

P = ParamSpec("P")
T = TypeVar("T")

_MANY_PAIRS: Final = 256
"""Pairs above which a thread starts the comparison, as that takes milliseconds."""


def _async_method(verb: Callable[Concatenate[Card, P], Operation[T]]) -> Callable[Concatenate[AsyncEngine, P], Awaitable[T]]:
    async def method(self: AsyncEngine, *args: P.args, **options: P.kwargs) -> T:
        operation = verb(self.card, *args, **options)
        with relocating(operation.locate):
            result = await self.run(operation.request)
            warn_of_truncation(result.num_truncated, options)
            return operation.postprocess(result)

    return copy_signature(method, verb)


class AsyncEngine:
    """The same engine for asyncio: the same verbs, awaited. Loading blocks, as it does for Engine."""

    def __init__(
        self,
        model: str | os.PathLike[str] | Engine | None = None,
        *,
        pooling: PoolingOption | None = None,
        reranker: RerankerName | None = None,
        progress: ProgressCallback = lambda _: None,
        **options: Unpack[Options],
    ) -> None:
        """`model` as for Engine, or an Engine that is loaded already, which is then closed with this one."""
        loaded = isinstance(model, Engine)
        self._engine = model if loaded else Engine(model, pooling=pooling, reranker=reranker, progress=progress, **options)
        self._preprocessor = AsyncPreprocessor(self._engine.preprocessor)
        self.card: Card = self._engine.card
        self.plan: Plan = self._engine.plan

    @property
    def ready(self) -> bool:
        return self._engine.ready

    @property
    def status(self) -> str:
        return "ready" if self.ready else "closed"

    @property
    def queued_tokens(self) -> int:
        return self._engine.queued_tokens

    embed = _async_method(encode_verbs.embed)
    sparse = _async_method(encode_verbs.sparse)
    multi_vector = _async_method(encode_verbs.multi_vector)
    muvera = _async_method(encode_verbs.muvera)
    encode = _async_method(encode_verbs.encode)
    score = _async_method(scoring.score)
    rerank = _async_method(scoring.rerank)
    explain = _async_method(scoring.explain)
    classify = _async_method(scoring.classify)
    token_classify = _async_method(scoring.token_classify)

    async def run(self, request: Request, scheduling: Scheduling = ORDINARY) -> Result:
        """Answer one request. Cancelling it drops what has not been computed yet."""
        self._engine.check_admission(request, scheduling)
        tokenized = await self._preprocessor.preprocess(request, scheduling)
        return await asyncio.wrap_future(await self._submit(tokenized))

    async def tokenize(self, request: TokenizeRequest) -> list[TokenInfo]:
        """Return the tokens of each text. Raises InvalidRequest and TooLarge."""
        return await self._preprocessor.tokenize(request)

    async def decode(self, request: DetokenizeRequest) -> list[str]:
        """Return the text of each row of token ids. Raises InvalidRequest."""
        return await self._preprocessor.decode(request)

    async def _submit(self, request: EngineRequest) -> Future[Result]:
        if not isinstance(request.finish, PairScoring) or request.finish.num_pairs <= _MANY_PAIRS:
            return self._engine.submit_tokenized(request)
        submitting = asyncio.ensure_future(asyncio.to_thread(self._engine.submit_tokenized, request))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda done: done.exception() or done.result().cancel())
            raise

    async def close(self) -> None:
        """Finish what was accepted, then end the threads."""
        await asyncio.to_thread(self._engine.close)
        self._preprocessor.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()
