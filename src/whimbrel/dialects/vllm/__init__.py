"""vLLM's own routes, of pooling models. Those that other APIs share stand with these, with vLLM's fields.

    (here)        /invocations, as SageMaker calls it: the route that suits the model, or the body
    pooling       /pooling, /classify
    pair_scores   /v1/score, /score, /rerank
    tokenize      /tokenize, /detokenize, /tokenizer_info, /version
    status        statuses and bodies of errors

Source: vLLM 0.33, entrypoints/pooling and entrypoints/serve/tokenize.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from whimbrel.dialects.common.bodies import decode
from whimbrel.dialects.common.responses import JSON, Response, ServedModel
from whimbrel.dialects.common.route import EngineCall, Parsed, Route
from whimbrel.dialects.common.texts import Priority
from whimbrel.dialects.vllm.pair_scores import SCORE, V1_SCORE, VLLM_RERANK
from whimbrel.dialects.vllm.pooling import CLASSIFY, POOLING
from whimbrel.dialects.vllm.status import TEXT_TERMS, VLLM
from whimbrel.dialects.vllm.tokenize import GET_ROUTES, ROUTES
from whimbrel.errors import InvalidRequest
from whimbrel.types.request import OutputName
from whimbrel.types.result import Result

__all__ = ["GET_ROUTES", "routes"]


@dataclass(frozen=True, slots=True)
class Invocation:
    """A body of /invocations with `input`. The kind of the model decides how it is read."""

    model: str | None
    priority: int | None
    raw: bytes
    route: Callable[[ServedModel], Route]
    """Return the route that reads the body for a model."""
    read: dict[str, Parsed[Any]] = field(default_factory=dict[str, Parsed[Any]])
    """The body as each route that was asked parses it, by the route's path."""

    def request(self, model: ServedModel) -> EngineCall | None:
        route = self.route(model)
        if route.path not in self.read:
            self.read[route.path] = route.parse(self.raw)
        return self.read[route.path].request(model)


class _Named(msgspec.Struct, frozen=True):
    model: str | None = None
    priority: Priority = None
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _parse(raw: bytes, route: Callable[[ServedModel], Route]) -> Parsed[Invocation]:
    named = decode(_Named, raw)
    if named.input is msgspec.UNSET:
        raise InvalidRequest(
            "Cannot find suitable handler for request: chats and prompts are not taken; send input, a text as the model takes "
            "it.",
            param="input",
        )
    body = Invocation(named.model, named.priority, raw, route)
    return Parsed(body, body.request)


def _render(body: Invocation, result: Result, model: ServedModel) -> bytes | Response:
    route = body.route(model)
    return route.render_response(body.read[route.path].body, result, model)


def _invocation_routes(embeddings: Route) -> tuple[Route, ...]:
    """Return the routes of /invocations, of which models of dense vectors answer as on `embeddings`."""
    by_output: dict[OutputName, Route] = {"dense": embeddings, "scores": CLASSIFY}

    def route(model: ServedModel) -> Route:
        return by_output.get(next(iter(model.card.outputs)), POOLING)

    by_model = VLLM(
        "/invocations", "The route that suits the model: /v1/embeddings, /classify or /pooling: a body with `input` (vLLM).",
        partial(_parse, route=route), _render, response_type=dict[str, Any],
        example='{"input": ["A whimbrel is a wader."]}', terms=TEXT_TERMS,
        discriminators=frozenset({"input", "messages", "prompt"}), body_type=embeddings.request_type,
    )  # fmt: skip
    return by_model, _of_pairs(SCORE, "queries", "data_1", "text_1"), _of_pairs(VLLM_RERANK, "documents")


def _of_pairs(route: Route, *names: str) -> Route:
    """Return the route of a body of /invocations that has one of the fields that a route of pairs alone takes."""
    summary, fields = f"The same as {route.path} (vLLM).", frozenset(names)
    return replace(route, path="/invocations", summary=summary, discriminators=fields, media_types=(JSON,))


def routes(embeddings: Route) -> tuple[Route, ...]:
    """Return the routes, given that of `/v1/embeddings`, as which models of dense vectors answer on /invocations."""
    return POOLING, CLASSIFY, VLLM_RERANK, SCORE, *_invocation_routes(embeddings), *ROUTES, V1_SCORE
