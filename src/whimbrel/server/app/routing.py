"""Routing: requests to routes of the dialects, by path and body, and to served models, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import msgspec

from whimbrel.dialects import GET_ROUTES, ROUTES, Route, openai
from whimbrel.dialects.common.bodies import is_packed
from whimbrel.dialects.common.route import ServedModel
from whimbrel.errors import InvalidRequest, ModelNotFound, Unavailable, WhimbrelError
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.result import Result
from whimbrel.types.seq import TokenInfo


class PathRoutes:
    """The POST routes of one path. Where several share it, the fields of the body select one."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = sorted(routes, key=lambda route: not route.discriminators)
        self.default = self.routes[-1]
        """The route without discriminators. It renders the errors of requests whose body cannot be read."""
        types = [route.media_types for route in self.routes]
        self.media_types = () if () in types else tuple(dict.fromkeys(each for of_route in types for each in of_route))
        """Media types that a body may be declared as; empty for any."""
        names = sorted({name for route in routes for name in route.discriminators})
        self._discriminators = [name.encode() for name in names]
        optional = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in names]
        self._fields = msgspec.defstruct("Fields", optional)
        self._json = msgspec.json.Decoder(self._fields)
        self._message_pack = msgspec.msgpack.Decoder(self._fields)

    def choose(self, body: bytes) -> Route:
        """Return the route that a body is for, as far as the body can be read."""
        if all(body.find(name) < 0 for name in self._discriminators):  # `in` first tries the name as a number, which costs more
            return self.default
        try:
            fields = (self._message_pack if is_packed(body) else self._json).decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            present = {name.decode() for name in self._discriminators if b'"%b"' % name in body}
        else:
            present = {name for name in self._fields.__struct_fields__ if getattr(fields, name) is not msgspec.UNSET}
        return next((route for route in self.routes if not route.discriminators.isdisjoint(present)), self.default)


ROUTES_BY_PATH: Final = {
    path: PathRoutes([route for route in ROUTES if route.path == path]) for path in dict.fromkeys(each.path for each in ROUTES)
}
_GET_ROUTES: Final = {page.path: page for page in GET_ROUTES}


def render_error(error: WhimbrelError, path: str = "", body: bytes = b"") -> tuple[int, bytes]:
    """Return status and body of the answer to a request of which the path is known, and perhaps the body."""
    if path in ROUTES_BY_PATH:
        route = ROUTES_BY_PATH[path].choose(body)
        return route.status(error), route.render_error(error)
    return error.status, _GET_ROUTES.get(path, openai).render_error(error)


class AsyncEmbedder(ServedModel, Protocol):
    """A served model: an engine in this process or in others. Cancelling `run` drops the texts that have not run yet."""

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
    """The models of a server, of which some may still be loading, and its requests in flight. It lives in one event loop."""

    def __init__(self, *embedders: AsyncEmbedder, num_models: int | None = None) -> None:
        self._num_models = len(embedders) if num_models is None else num_models
        self._embedders = dict(enumerate(embedders))
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def add(self, index: int, embedder: AsyncEmbedder) -> None:
        self._embedders[index] = embedder

    def __iter__(self) -> Iterator[AsyncEmbedder]:
        return (self._embedders[index] for index in sorted(self._embedders))

    def find(self, name: str | None) -> AsyncEmbedder:
        """Return the model with this name, or the only model if None. Raises Unavailable, ModelNotFound, InvalidRequest."""
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
        """True if every model is loaded and answers, and the server is not draining."""
        known = len(self._embedders) == self._num_models
        return known and not self.draining and all(embedder.ready for embedder in self)

    @property
    def status(self) -> str:
        """The reason why the server is not ready, in a few words."""
        if self.draining:
            return "draining: the server is about to stop"
        if len(self._embedders) < self._num_models:
            return "loading"
        return "; ".join(embedder.status for embedder in self if not embedder.ready) or "ok"

    def begin(self) -> None:
        """Count a request as in flight, until the last byte of its answer is handed over or its client is gone."""
        self._in_flight += 1
        self._idle.clear()

    def end(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()


def _untagged(name: str) -> str:
    """Return the name without the tag that Ollama's clients may put after any name."""
    return name.removesuffix(":latest")
