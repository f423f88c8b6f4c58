"""AsyncEngine: an Engine for asyncio, with the same verbs, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Final, Self, TypeVar, Unpack

from whimbrel.engine.engine import Engine, ProgressCallback, ignore_progress
from whimbrel.engine.engine_request import EngineRequest
from whimbrel.engine.prepare import AsyncPreprocessor
from whimbrel.errors import relocating
from whimbrel.outputs import scoring
from whimbrel.outputs.entities import Aggregation
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.scoring import Operation, Texts
from whimbrel.types.arrays import Float32Array
from whimbrel.types.card import Card, PoolingOption, RerankerName
from whimbrel.types.options import ScoreOptions, TextOptions, reject_muvera, require, require_muvera, text_request
from whimbrel.types.plan import Options, Plan
from whimbrel.types.request import DetokenizeRequest, OutputName, Pair, Request, TokenizeRequest, VectorInput
from whimbrel.types.result import Classes, Entity, Explanation, Outputs, Ragged, Ranked, Result, Sparse
from whimbrel.types.seq import TokenInfo

T = TypeVar("T")

_MANY_PAIRS: Final = 256
"""To begin to compare more takes milliseconds, for which an event loop is not held up."""


class AsyncEngine:
    """The same engine for asyncio: the same verbs, awaited. Loading blocks, as it does for Engine."""

    def __init__(
        self,
        model: str | Engine | None = None,
        *,
        pooling: PoolingOption | None = None,
        reranker: RerankerName | None = None,
        progress: ProgressCallback = ignore_progress,
        **options: Unpack[Options],
    ) -> None:
        """`model` as for Engine, or an Engine that is loaded already, which is then closed with this one."""
        loaded = isinstance(model, Engine)
        self._engine = model if loaded else Engine(model, pooling=pooling, reranker=reranker, progress=progress, **options)
        self._preprocessor = AsyncPreprocessor(self._engine.preprocessor)

    @property
    def card(self) -> Card:
        return self._engine.card

    @property
    def plan(self) -> Plan:
        return self._engine.plan

    @property
    def ready(self) -> bool:
        return self._engine.ready

    @property
    def status(self) -> str:
        """In a word, how it is."""
        return "ready" if self.ready else "closed"

    @property
    def queued_tokens(self) -> int:
        return self._engine.queued_tokens

    async def embed(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Float32Array:
        """Async form of `Engine.embed`."""
        vectors = (await self.run(text_request(self.card, texts, ("dense",), **options))).dense
        return vectors[0] if isinstance(texts, str) else vectors

    async def sparse(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Sparse:
        """Async form of `Engine.sparse`."""
        return require((await self.encode(texts, ("sparse",), **options)).sparse)

    async def multi_vector(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Ragged:
        """Async form of `Engine.multi_vector`."""
        reject_muvera(options)
        return require((await self.encode(texts, ("multi_vector",), **options)).multi_vector)

    async def muvera(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Float32Array:
        """Async form of `Engine.muvera`."""
        vectors = require((await self.encode(texts, ("multi_vector",), **require_muvera(options))).muvera)
        return vectors[0] if isinstance(texts, str) else vectors

    async def encode(
        self, texts: str | Iterable[str], outputs: OutputName | Sequence[OutputName] = (), **options: Unpack[TextOptions]
    ) -> Outputs:
        """Async form of `Engine.encode`."""
        return (await self.run(text_request(self.card, texts, outputs, **options))).outputs

    async def score(self, queries: Texts, documents: Texts, **options: Unpack[ScoreOptions]) -> Float32Array:
        """Async form of `Engine.score`."""
        return await self._answer(scoring.score(self.card, queries, documents, **options))

    async def rerank(
        self, query: str | VectorInput, documents: Texts, *, top_n: int | None = None, **options: Unpack[ScoreOptions]
    ) -> list[Ranked]:
        """Async form of `Engine.rerank`."""
        return await self._answer(scoring.rerank(self.card, query, documents, top_n=top_n, **options))

    async def explain(self, query: str | VectorInput, documents: Texts, **options: Unpack[ScoreOptions]) -> list[Explanation]:
        """Async form of `Engine.explain`."""
        return await self._answer(scoring.explain(self.card, query, documents, **options))

    async def classify(self, texts: str | Iterable[str | Pair], **options: Unpack[ScoreOptions]) -> Classes:
        """Async form of `Engine.classify`."""
        return await self._answer(scoring.classify(self.card, texts, **options))

    async def token_classify(
        self, texts: str | Iterable[str], aggregation: Aggregation = "simple", **options: Unpack[ScoreOptions]
    ) -> list[list[Entity]]:
        """Async form of `Engine.token_classify`."""
        return await self._answer(scoring.token_classify(self.card, texts, aggregation, **options))

    async def _answer(self, operation: Operation[T]) -> T:
        with relocating(operation.locate):
            return operation.postprocess(await self.run(operation.request))

    async def run(self, request: Request) -> Result:
        """Answer one request. Cancelling it drops what has not been computed yet."""
        self._engine.check_admission(request)
        tokenized = await self._preprocessor.preprocess(request)
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
