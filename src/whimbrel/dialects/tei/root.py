"""POST / and /invocations: what a model is made for, as TEI has it there; and what `InferenceClient` sends. Pure.

A body with `texts` is one of /rerank; one whose inputs are a source and sentences, of /similarity. Any other is of /predict,
/embed, /embed_sparse or /embed_all: whichever is about the first thing that the model gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final, cast

from msgspec import Meta

from whimbrel.dialects.common.decode import decode
from whimbrel.dialects.common.route import Response, Route, ServedModel
from whimbrel.dialects.tei import scores
from whimbrel.dialects.tei.answers import status, write_error, wrong_model_type
from whimbrel.dialects.tei.embed import (
    Direction,
    Parameters,
    Sentences,
    TruncateFlag,
    VectorFields,
    dense,
    similarities,
    similarity,
    text_request,
    write_embed,
    write_embed_all,
    write_embed_sparse,
)
from whimbrel.dialects.tei.scores import PredictParameters, PredictRequest, Raw, classes, sequences, write_predict
from whimbrel.types.request import OutputName, Request
from whimbrel.types.result import Result


class RootParameters(PredictParameters, frozen=True, kw_only=True):
    """Those of /predict, and of /similarity."""

    truncate: TruncateFlag = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


class RootRequest(VectorFields, frozen=True, kw_only=True):
    """Body of POST /: that of /embed, /embed_all, /embed_sparse or /predict, by the kind of the model, or of /similarity."""

    inputs: Annotated[
        str | Sentences | list[str | int | list[int | str]], Meta(description="As the route takes them that is meant.")
    ]
    raw_scores: Raw = None
    parameters: Annotated[
        RootParameters | None, Meta(description="Of /predict and /similarity, as `InferenceClient` sends them.")
    ] = None


def read_root(body: bytes) -> tuple[RootRequest, Request | Callable[[ServedModel], Request]]:
    """The body as it was sent, and what it stands for. Raises InvalidRequest or TooLarge."""
    sent = decode(RootRequest, body)
    if isinstance(sent.inputs, Sentences):
        of = sent.parameters or RootParameters()
        parameters = Parameters(truncate=of.truncate, truncation_direction=of.truncation_direction, prompt_name=of.prompt_name)
        return sent, similarity(sent.inputs, parameters)

    def request(model: ServedModel) -> Request:
        output = _first(model)
        if output == "scores":
            predict = _predict(sent)
            return classes(predict, sequences(predict.inputs), model)
        return dense(sent) if output == "dense" else text_request(sent, output)

    return sent, request


def write_root(sent: RootRequest, result: Result, model: ServedModel) -> Response:
    """What that route answers."""
    if isinstance(sent.inputs, Sentences):
        return similarities(sent.inputs, result, model)
    output = _first(model)
    if output == "scores":
        return write_predict(_predict(sent), result, model)
    return _WRITE[output](sent, result, model)


_WRITE: Final[dict[OutputName, Callable[[Any, Result, ServedModel], Response]]] = {
    "dense": write_embed,
    "sparse": write_embed_sparse,
    "multi_vector": write_embed_all,
}


def _first(model: ServedModel) -> OutputName:
    output = next(iter(model.card.outputs))
    if output == "token_scores":
        raise wrong_model_type("this model judges tokens, for which TEI has no route; ask /v1/embed.")
    return output


def _predict(sent: RootRequest) -> PredictRequest:
    return PredictRequest(
        inputs=cast(Any, sent.inputs),  # sequences() finds token ids
        truncate=sent.truncate,
        truncation_direction=sent.truncation_direction,
        raw_scores=sent.raw_scores,
        parameters=sent.parameters,
    )


def _routes(path: str) -> tuple[Route, ...]:
    return (
        Route(
            path=path,
            summary="What a model is made for: /embed, /embed_sparse, /embed_all or /predict; or /similarity (TEI).",
            parse_request=read_root,
            render_response=write_root,
            render_error=write_error,
            request_type=RootRequest,
            response_type=list[Any],
            example='{"inputs": "What is a whimbrel?"}',
            status=status,
        ),
        *(replace(route, path=path) for route in scores.ROUTES if route.path == "/rerank"),
    )


ROUTES: Final = (*_routes("/"), *_routes("/invocations"))
