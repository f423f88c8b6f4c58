"""Registry of served models by name, and of whether the server takes requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from whimbrel.errors import InvalidRequest

if TYPE_CHECKING:
    from whimbrel.types.card import Card
    from whimbrel.types.plan import Plan
import asyncio
from collections.abc import Iterator

from whimbrel.errors import ModelNotFound, Unavailable
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.result import Result
from whimbrel.types.seq import TokenInfo


class AsyncEmbedder(Protocol):
    """A model as a server serves it: an engine in this process, or in others. Cancelling `run` drops what has not run yet."""

    @property
    def card(self) -> Card: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def ready(self) -> bool: ...
    @property
    def status(self) -> str: ...
    @property
    def queued_tokens(self) -> int: ...
    async def run(self, request: Request) -> Result: ...
    async def tokenize(self, request: TokenizeRequest) -> list[TokenInfo]: ...
    async def decode(self, request: DetokenizeRequest) -> list[str]: ...


class ModelRegistry:
    """The models of a server; some may still be loading. Lives in one event loop."""

    def __init__(self, *embedders: AsyncEmbedder, num_models: int | None = None) -> None:
        self._num_models = len(embedders) if num_models is None else num_models
        self._embedders = dict(enumerate(embedders))
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def add(self, index: int, embedder: AsyncEmbedder) -> None:
        """The model number `index` is known now, loaded or not."""
        self._embedders[index] = embedder

    def __iter__(self) -> Iterator[AsyncEmbedder]:
        """The models that are known, in the order in which they were asked for."""
        return (self._embedders[index] for index in sorted(self._embedders))

    def find(self, name: str | None) -> AsyncEmbedder:
        """The model that goes by `name`; None: the only one. Raises Unavailable, ModelNotFound, InvalidRequest."""
        if name is None and self._num_models == 1 and 0 in self._embedders:
            return self._embedders[0]
        for embedder in self:
            if name is not None and _untagged(name) in map(_untagged, (embedder.plan.served_name, *embedder.plan.aliases)):
                return embedder
        if len(self._embedders) < self._num_models:
            raise Unavailable("the model is being loaded.", retry_after=5.0)
        names = ", ".join(embedder.plan.served_name for embedder in self)
        if name is None:
            raise InvalidRequest(f"this server serves several models; name one of: {names}.", param="model")
        raise ModelNotFound(f"no model {name[:100]!r} here; this server serves {names}.", param="model")

    @property
    def ready(self) -> bool:
        """True if every model answers and new requests are taken."""
        known = len(self._embedders) == self._num_models
        return known and not self.draining and all(embedder.ready for embedder in self)

    @property
    def status(self) -> str:
        """In a few words, why it is not ready."""
        if self.draining:
            return "draining: the server is about to stop"
        if len(self._embedders) < self._num_models:
            return "loading"
        return "; ".join(embedder.status for embedder in self if not embedder.ready) or "ok"

    def begin(self) -> None:
        """A request for work has come. It is on its way until the last byte of its answer is handed over."""
        self._in_flight += 1
        self._idle.clear()

    def end(self) -> None:
        """A request is answered, or its client is gone."""
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        """Return once no such request is on its way."""
        await self._idle.wait()


def _untagged(name: str) -> str:
    """Without the tag that Ollama's clients may put after any name, or leave out."""
    return name.removesuffix(":latest")
