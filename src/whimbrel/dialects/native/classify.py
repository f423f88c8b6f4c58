"""Whimbrel's own routes for classification: of texts and pairs, and of the words in texts. Pure functions over bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.decode import decode
from whimbrel.dialects.common.fields import parse_texts
from whimbrel.dialects.common.responses import json_answer, usage
from whimbrel.dialects.common.route import Response, ServedModel
from whimbrel.dialects.native.embed import NATIVE
from whimbrel.dialects.openai import Usage
from whimbrel.errors import InvalidRequest
from whimbrel.outputs import scoring
from whimbrel.outputs.scoring import Operation
from whimbrel.types.options import ScoreOptions
from whimbrel.types.request import Request
from whimbrel.types.result import Result
from whimbrel.wire import to_json


class ClassFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both routes take."""

    model: Annotated[str | None, Meta(description="The served model's name, as /v1/models lists it.")] = None
    activate: Annotated[
        bool | None, Meta(description="Apply the activation to scores; `false` gives logits. Default: as the model does.")
    ] = None
    prompt: Annotated[
        str | None, Meta(description="The name of one of the model's prompts, or text with a space or a colon in it.")
    ] = None
    truncate: Annotated[
        bool | Literal["right", "left", "never"] | None,
        Meta(description="The end at which a text that is too long is cut. `false` or `never` makes it an error."),
    ] = None


class ClassifyRequest(ClassFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/classify."""

    input: Annotated[
        str | list[str | list[str]], Meta(description="A text, a list of texts, or a list of pairs of texts; at most 2,048.")
    ]


class ClassifyResponse(msgspec.Struct):
    """Answer of POST /v1/classify."""

    labels: Annotated[list[str], Meta(description="The names of the classes.")]
    scores: Annotated[list[list[float]], Meta(description="For each input a score for each class.")]
    model: str
    usage: Usage


class TokenClassifyRequest(ClassFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/token_classify."""

    input: Annotated[str | list[str], Meta(description="A text, or a list of at most 2,048 texts.")]
    aggregation: Annotated[
        Literal["none", "simple", "first", "average", "max"],
        Meta(description="How token labels are grouped into entities, as in transformers."),
    ] = "simple"


class FoundEntity(msgspec.Struct):
    """An entity in a text; `start` and `end` count characters."""

    label: str
    score: float
    start: int
    end: int
    text: str


class TokenClassifyResponse(msgspec.Struct):
    """Answer of POST /v1/token_classify."""

    entities: Annotated[list[list[FoundEntity]], Meta(description="The entities of each input.")]
    model: str
    usage: Usage


def parse_classify(raw: bytes) -> tuple[ClassifyRequest, Callable[[ServedModel], Request]]:
    """Return the body, and the function from a model to its Request. Raises InvalidRequest or TooLarge."""
    body = decode(ClassifyRequest, raw)
    return body, partial(_request, _classify, body)


def parse_token_classify(raw: bytes) -> tuple[TokenClassifyRequest, Callable[[ServedModel], Request]]:
    """Return the body, and the function from a model to its Request. Raises InvalidRequest or TooLarge."""
    body = decode(TokenClassifyRequest, raw)
    return body, partial(_request, _token_classify, body)


def _request(question: Callable[[Any, ServedModel], Operation[Any]], body: ClassFields, model: ServedModel) -> Request:
    return question(body, model).request


def _classify(body: ClassifyRequest, model: ServedModel) -> Operation[Any]:
    return scoring.classify(model.card, parse_texts(body.input), **_options(body))


def _token_classify(body: TokenClassifyRequest, model: ServedModel) -> Operation[Any]:
    texts = parse_texts(body.input)
    if not texts:
        raise InvalidRequest("is an empty list; give at least one text.", param="input")
    return scoring.token_classify(model.card, texts, body.aggregation, **_options(body))


def _options(body: ClassFields) -> ScoreOptions:
    return {"prompt": body.prompt, "activate": body.activate, "truncate": body.truncate}


def render_classify(body: ClassifyRequest, result: Result, model: ServedModel) -> bytes | Response:
    """Return the answer, in the order of the inputs."""
    classes = _classify(body, model).postprocess(result)
    return json_answer({"labels": classes.labels, "scores": classes.scores_NC, **_about(result, model)}, result)


def render_token_classify(body: TokenClassifyRequest, result: Result, model: ServedModel) -> bytes:
    """Return the answer, in the order of the inputs."""
    entities = _token_classify(body, model).postprocess(result)
    return to_json({"entities": entities, **_about(result, model)})


def _about(result: Result, model: ServedModel) -> dict[str, Any]:
    return {"model": model.plan.served_name, "usage": usage(result)}


ROUTES: Final = (
    NATIVE.route(
        "/v1/classify", "The classes of texts or of pairs (Whimbrel's own).",
        parse_classify, render_classify, response_type=ClassifyResponse,
        example='{"input": ["A whimbrel is a wader."]}',
    ),
    NATIVE.route(
        "/v1/token_classify", "The entities in texts (Whimbrel's own).",
        parse_token_classify, render_token_classify, response_type=TokenClassifyResponse,
        example='{"input": ["Whimbrels winter in Ghana."]}',
    ),
)  # fmt: skip
