"""Routing: requests to routes of the dialects, by path and body, and to served models, by name.

Paths are taken as clients build them: with doubled or trailing slashes, below Azure's prefixes, and with a model in them.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from starlette.types import Scope

from whimbrel.dialects import GET_ROUTES, ROUTES, Route, ollama, open_inference
from whimbrel.dialects.common import openai_errors
from whimbrel.dialects.common.bodies import is_packed
from whimbrel.dialects.common.responses import served_names
from whimbrel.dialects.common.route import Parsed, ServedModel
from whimbrel.errors import InvalidRequest, ModelNotFound, PermissionDenied, Unavailable, WhimbrelError
from whimbrel.outputs.requested import scores_by_similarity
from whimbrel.server.keys import ApiKey
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.result import Result
from whimbrel.types.scheduling import Scheduling
from whimbrel.types.seq import TokenInfo


class PathRoutes:
    """The POST routes of one path. Where several share it, the fields of the body select one."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = sorted(routes, key=lambda route: not route.discriminators)
        self.default = self.routes[-1]
        """The route without discriminators. It renders the errors of requests whose body cannot be read."""
        self._told_by_headers = [route for route in self.routes if route.of_client is not None]
        types = [route.media_types for route in self.routes]
        self.media_types = () if () in types else tuple(dict.fromkeys(each for of_route in types for each in of_route))
        """Media types that a body may be declared as; empty for any."""
        names = sorted({name for route in routes for name in route.discriminators})
        optional = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in names]
        self._fields = msgspec.defstruct("Fields", optional)
        self._json = msgspec.json.Decoder(self._fields)
        self._message_pack = msgspec.msgpack.Decoder(self._fields)

    def choose(self, body: bytes, headers: Mapping[bytes, bytes] | None = None) -> Route:
        """Return the route for a body, as far as that can be read, and its headers. Values are skipped, and not decoded."""
        default = self.default
        if headers is not None and self._told_by_headers:
            default = next((each for each in self._told_by_headers if each.of_client and each.of_client(headers)), default)
        if len(self.routes) == 1:
            return default
        try:
            fields = (self._message_pack if is_packed(body) else self._json).decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            present = {name for name in self._fields.__struct_fields__ if b'"%b"' % name.encode() in body}
        else:
            present = {name for name in self._fields.__struct_fields__ if getattr(fields, name) is not msgspec.UNSET}
        return next((route for route in self.routes if not route.discriminators.isdisjoint(present)), default)


ROUTES_BY_PATH: Final = {
    path: PathRoutes([route for route in ROUTES if route.path == path]) for path in dict.fromkeys(each.path for each in ROUTES)
}
_PREFIXES: Final = {"/api/": ollama, "/v2/": open_inference}
"""The prefixes of paths whose errors are those of one dialect where there is no route."""
_GET_ROUTES: Final = {page.path: page for page in GET_ROUTES}
DEPLOYMENT: Final = "whimbrel.deployment"
_VERSION: Final = "whimbrel.version"
_NAMING: Final = {
    re.compile(r"/openai/deployments/(.+)/embeddings"): "/v1/embeddings",
    re.compile(r"/v1/retrieval/(.+)/reranking"): "/v1/ranking",
    **{
        re.compile(rf"/v2/models/(.+?)(?:/versions/([^/]+))?{end}"): f"/v2/models/{{model}}{end}"
        for end in ("/infer", "/ready", "")
    },
}
"""Azure's path of embeddings, NVIDIA's of rankings and KServe's, which name the model, and perhaps its version -> the route."""
_AZURE: Final = "/openai/v1/"
_SLASHES: Final = re.compile(r"/{2,}")


def canonical(scope: Scope) -> Scope:
    """Return the scope of a request with the path that its route has here.

    Slashes are merged, and the last one is dropped. `/openai/v1/...` is `/v1/...`. `/openai/deployments/NAME/embeddings` is
    `/v1/embeddings` of the model NAME, which the scope then names under DEPLOYMENT; so are NVIDIA's and KServe's paths.
    """
    path: str = scope["path"]
    if path in ROUTES_BY_PATH or path in _GET_ROUTES:
        return scope
    plain = _SLASHES.sub("/", path).rstrip("/") or "/"
    for pattern, route in _NAMING.items():
        if found := pattern.fullmatch(plain):
            version = {_VERSION: found[2]} if found.lastindex == 2 else {}
            return {**scope, "path": route, DEPLOYMENT: found[1], **version}
    if plain.startswith(_AZURE):
        plain = plain.removeprefix("/openai")
    return scope if plain == path else {**scope, "path": plain}


def check_version(scope: Scope, model: ServedModel) -> None:
    """Raise ModelNotFound if the path names a version of a model that is not the revision that is served."""
    version, served = scope.get(_VERSION), model.plan.revision
    if version is not None and version != served:
        of_model = f"{model.plan.served_name} here; it has {served or 'none'}"
        raise ModelNotFound(f"no version {version[:100]!r} of {of_model}, which a path may leave out.", param="model")


def render_error(error: WhimbrelError, path: str = "", body: bytes = b"", route: Route | None = None) -> tuple[int, bytes]:
    """Return status and body of the answer to a request of which the path is known, and perhaps the body, or the route."""
    if route is None and path in ROUTES_BY_PATH:
        route = ROUTES_BY_PATH[path].choose(body)
    if route is not None:
        return route.status(error), route.render_error(error)
    other = next((dialect for prefix, dialect in _PREFIXES.items() if path.startswith(prefix)), openai_errors)
    return error.status, _GET_ROUTES.get(path, other).render_error(error)


class AsyncEmbedder(ServedModel, Protocol):
    """A served model: an engine in this process or in others. Cancelling `run` drops the texts that have not run yet.

    `run` calls `charge` with the number of tokens before it computes any, and raises the errors of it.
    """

    @property
    def ready(self) -> bool: ...
    @property
    def status(self) -> str: ...
    @property
    def queued_tokens(self) -> int: ...
    async def run(self, request: Request, scheduling: Scheduling, *, charge: Callable[[int], None] | None = None) -> Result: ...
    async def tokenize(self, request: TokenizeRequest) -> list[TokenInfo]: ...
    async def decode(self, request: DetokenizeRequest) -> list[str]: ...


class ModelRegistry:
    """The models of a server, of which some may still be loading, and its requests in flight. It lives in one event loop."""

    def __init__(self, *embedders: AsyncEmbedder, num_models: int | None = None) -> None:
        self.switch(embedders, num_models=num_models)
        self._in_flight = 0
        self.idle = asyncio.Event()
        """Set while no request is in flight."""
        self.idle.set()
        self.draining = False

    def switch(self, embedders: Sequence[AsyncEmbedder], *, num_models: int | None = None) -> None:
        """Let all names lead to these models from now on. With `num_models`, further ones up to that number are still to come.

        Requests that found their model before end on it.
        """
        self._embedders = tuple(embedders)
        self._num_models = len(embedders) if num_models is None else num_models
        named = [(_untagged(name), embedder) for embedder in embedders for name in served_names(embedder.plan)]
        self._by_name = dict(reversed(named))  # of two, the first

    def __iter__(self) -> Iterator[AsyncEmbedder]:
        return iter(self._embedders)

    def of_key(self, key: ApiKey | None) -> list[AsyncEmbedder]:
        """Return the models that a key may use; all of them without a key."""
        return [each for each in self if key is None or key.may_use((each.plan.served_name, *each.plan.aliases))]

    def find(
        self, name: str | None, route: Route | None = None, parsed: Parsed[Any] | None = None, *, key: ApiKey | None = None
    ) -> AsyncEmbedder:
        """Return the model with this name; without a name, or with a placeholder, the only model that can answer the body.

        A key sees the models that it may use. Raises Unavailable, ModelNotFound, PermissionDenied, InvalidRequest.
        """
        if key is not None and key.models is not None:
            return self._find_for(key, name, route, parsed)
        if name is not None and (embedder := self._named(name)) is not None:
            return embedder
        if name is not None and route is not None and name in route.placeholders:
            name = None
        if name is None and len(self._embedders) == self._num_models == 1:
            return self._embedders[0]
        if len(self._embedders) < self._num_models:
            raise Unavailable("the model is being loaded.", retry_after=5.0)
        if name is None:
            return _fitting(list(self), route, parsed)
        raise _not_found(name, self)

    def _find_for(self, key: ApiKey, name: str | None, route: Route | None, parsed: Parsed[Any] | None) -> AsyncEmbedder:
        """Return what `find` does for a key that may use some models only."""
        allowed = self.of_key(key)
        found = None if name is None else self._named(name)
        if found is not None and found in allowed:
            return found
        if len(self._embedders) < self._num_models:
            raise Unavailable("the model is being loaded.", retry_after=5.0)
        if found is not None or not allowed:
            may_use = ", ".join(key.models or ())
            raise PermissionDenied(f"the API key {key.name} may use {may_use} and no other model.", param="model")
        if name is not None and not (route is not None and name in route.placeholders):
            raise _not_found(name, allowed)
        return allowed[0] if len(allowed) == 1 else _fitting(allowed, route, parsed)

    def _named(self, name: str) -> AsyncEmbedder | None:
        return self._by_name.get(_untagged(name))

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
        self.idle.clear()

    def end(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self.idle.set()


def _fitting(models: Sequence[AsyncEmbedder], route: Route | None, parsed: Parsed[Any] | None) -> AsyncEmbedder:
    """Return the only one of these models that can answer a body. Raises InvalidRequest."""
    fits = [(fitness(embedder, route, parsed), embedder) for embedder in models]
    best = max((each for each, _ in fits), default=0)
    fitting = [embedder for each, embedder in fits if each == best]
    if not fits:
        raise ModelNotFound("this server serves no model now.", param="model")
    if not best:
        raise InvalidRequest(f"none of this server's models can answer this: {_names(fitting)}.", param="model")
    if len(fitting) > 1:
        raise InvalidRequest(f"several models can answer this; name one of: {_names(fitting)}.", param="model")
    return fitting[0]


def _not_found(name: str, models: Iterable[AsyncEmbedder]) -> ModelNotFound:
    error = ModelNotFound(f"no model {name[:100]!r} here; this server serves {_names(models)}.", param="model")
    error.model = name[:100]
    return error


def _names(embedders: Iterable[AsyncEmbedder]) -> str:
    return ", ".join(name for embedder in embedders for name in served_names(embedder.plan))


def fitness(embedder: AsyncEmbedder, route: Route | None, parsed: Parsed[Any] | None) -> int:
    """Return 0 if a model cannot answer a body, 1 if it can, 2 if it is made for it."""
    try:
        call = None if parsed is None else parsed.request(embedder)
    except InvalidRequest:
        return 0
    if route is None or parsed is None or not isinstance(call, Request):
        return 1
    card = embedder.card
    if scores_by_similarity(card, call):
        return 1
    if not card.all_outputs.keys() >= set(call.outputs):
        return 0
    fits = bool(call.outputs) and card.outputs.keys() >= set(call.outputs)
    if not fits or not route.suits(parsed.body, embedder):
        return 1
    ranks = isinstance(next(iter(call.texts), None), tuple)  # pairs have one score, texts a score for each class
    return 2 if call.outputs != ("scores",) or ranks == (card.output("scores").width == 1) else 1


def _untagged(name: str) -> str:
    """Return the name without the tag that Ollama's clients may put after any name."""
    return name.removesuffix(":latest")
