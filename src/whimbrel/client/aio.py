"""AsyncClient: the engine's verbs over HTTP, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx2

from whimbrel.client import whimbrel
from whimbrel.client.dialect import DialectName, encode_of, only_ours, rerank_of
from whimbrel.client.failures import error_of, seconds_until_retry, unreachable
from whimbrel.client.servers import Servers
from whimbrel.client.settings import DEFAULT_URL, Settings, halves, progress_bar, reply_of
from whimbrel.client.task import Reply, Task
from whimbrel.entities import Aggregation
from whimbrel.errors import TooLarge, Unavailable, WhimbrelError
from whimbrel.types import Classes, Entity, Explanation, Float32Array, OutputName, Outputs, Ragged, Ranked, Sparse
from whimbrel.verbs import ScoreOptions, TextOptions, asked, refuse_muvera, with_muvera

P = TypeVar("P")


class AsyncClient:
    """Client for asyncio: the same verbs, awaited. Use it as an async context manager, or await `close`."""

    def __init__(
        self,
        base_url: str | Sequence[str] = DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        dialect: DialectName = "whimbrel",
        timeout: float = 600.0,
        max_retries: int = 5,
        max_in_flight: int = 8,
        max_items: int = 512,
        progress: bool | None = None,
    ) -> None:
        """As Client."""
        self._settings = Settings.of(
            base_url, api_key=api_key, model=model, timeout=timeout, max_retries=max_retries, max_in_flight=max_in_flight,
            max_items=max_items, progress=progress,
        )  # fmt: skip
        self._dialect = dialect
        self._encode = encode_of(dialect)
        self._servers = Servers(self._settings.urls)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=max_in_flight)
        self._http = httpx2.AsyncClient(
            headers=self._settings.headers, timeout=self._settings.timeout, limits=limits, verify=self._settings.is_secure
        )
        self._room = asyncio.Semaphore(max_in_flight)

    # The verbs

    async def embed(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Float32Array:
        """Dense vectors of `texts`: float32, (N, D), or (D,) for a single string."""
        vectors = asked((await self.encode(texts, "dense", **options)).dense)
        return vectors[0] if isinstance(texts, str) else vectors

    async def sparse(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Sparse:
        """Weights of vocabulary entries, for each of `texts`."""
        return asked((await self.encode(texts, "sparse", **options)).sparse)

    async def multi_vector(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Ragged:
        """A vector for each token that counts, for each of `texts`."""
        refuse_muvera(options)
        return asked((await self.encode(texts, "multi_vector", **options)).multi_vector)

    async def muvera(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Float32Array:
        """A vector in place of token vectors: float32, (N, E), or (E,) for a single string. `input_type` must be given."""
        vectors = asked((await self.encode(texts, "multi_vector", **with_muvera(options))).muvera)
        return vectors[0] if isinstance(texts, str) else vectors

    async def encode(
        self, texts: str | Iterable[str], outputs: OutputName | Sequence[OutputName] = (), **options: Unpack[TextOptions]
    ) -> Outputs:
        """Any of the outputs that the model gives, all from one pass; none named: what the model is made for."""
        return await self._run(self._encode(self._settings.model, texts, outputs, options))

    async def score(self, queries: Any, documents: Any, **options: Unpack[ScoreOptions]) -> Float32Array:
        """How well documents answer queries: (N,). One query goes with each document, else there are as many of both.

        Of models that compare vectors, arrays may stand for texts, as the other verbs give them. An array of two dimensions is
        a vector for each text, unless `score_by` says that it is the token vectors of one.
        """
        self._only_ours("score")
        return await self._run(whimbrel.score(self._settings.model, queries, documents, options))

    async def rerank(
        self, query: Any, documents: Any, *, top_n: int | None = None, **options: Unpack[ScoreOptions]
    ) -> list[Ranked]:
        """The places of documents and their scores, the best first."""
        whimbrel.check_top_n(top_n)
        rerank = rerank_of(self._dialect)
        return whimbrel.rank(await self._run(rerank(self._settings.model, query, documents, options)), top_n)

    async def explain(self, query: Any, documents: Any, **options: Unpack[ScoreOptions]) -> list[Explanation]:
        """Of late-interaction models: what each token of the query found in each document, in their order."""
        self._only_ours("explain")
        return await self._run(whimbrel.explain(self._settings.model, query, documents, options))

    async def classify(self, texts: str | Iterable[Any], **options: Unpack[ScoreOptions]) -> Classes:
        """The classes of texts or of pairs; a single string is a list of one."""
        self._only_ours("classify")
        return await self._run(whimbrel.classify(self._settings.model, texts, options))

    async def token_classify(
        self, texts: str | Iterable[str], aggregation: Aggregation = "simple", **options: Unpack[ScoreOptions]
    ) -> list[list[Entity]]:
        """The entities in each of `texts`; a single string is a list of one."""
        self._only_ours("token_classify")
        return await self._run(whimbrel.token_classify(self._settings.model, texts, aggregation, options))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    def _only_ours(self, verb: str) -> None:
        only_ours(self._dialect, verb)

    # Requests

    async def _run(self, task: Task[P]) -> P:
        spans = list(task.spans(self._settings.max_items))
        with progress_bar(self._settings.progress, len(task.items), len(spans)) as advance:
            if len(spans) == 1:
                return task.join([await self._ask(task, spans[0], advance)])
            asking = [asyncio.ensure_future(self._ask(task, span, advance)) for span in spans]
            try:
                return task.join(await asyncio.gather(*asking))
            finally:
                for each in asking:
                    each.cancel()

    async def _ask(self, task: Task[P], span: tuple[int, int], advance: Callable[[int], None]) -> P:
        start, stop = span
        try:
            async with self._room:
                reply = await self._send(task.path, task.write(task.items[start:stop]), task.media_type)
            part = task.read_part(reply, stop - start)
        except TooLarge:
            if stop - start < 2 or task.whole:
                raise
            return task.join([await self._ask(task, half, advance) for half in halves(start, stop)])
        except WhimbrelError as error:
            raise task.located(error, start) from error.__cause__
        advance(stop - start)
        return part

    async def _send(self, path: str, body: bytes, media_type: str) -> Reply:
        """Ask one server or another until there is an answer."""
        tries = 0
        while True:
            tries += 1
            with self._servers.next() as url:
                error = await self._try(url, path, body, media_type)
            if isinstance(error, Reply):
                return error
            seconds = seconds_until_retry(error, tries, self._settings.max_retries)
            if seconds is None:
                raise error
            if not self._servers.failed(url, seconds):
                await asyncio.sleep(seconds)

    async def _try(self, url: str, path: str, body: bytes, media_type: str) -> Reply | WhimbrelError:
        try:
            response = await self._http.post(url + path, content=body, headers={"content-type": media_type})
        except httpx2.RequestError as error:
            return unreachable(url, error)
        except RuntimeError as error:  # the client is closed
            raise _closed(error) from None
        if response.status_code == 200:
            self._servers.answered(url)
            return reply_of(response)
        return error_of(response.status_code, response.headers, response.content)


def _closed(error: Exception) -> Unavailable:
    return Unavailable(f"the client is closed: {error}.")
