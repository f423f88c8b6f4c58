"""POST / and /invocations: the route that suits the model, as in TEI, and the bodies of `InferenceClient`. Pure.

A body with `texts` is one of /rerank; one whose inputs are a source and sentences, of /similarity. Any other is of /predict,
/embed, /embed_sparse or /embed_all: whichever is about the first thing that the model gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final, cast

from msgspec import Meta

from whimbrel.dialects.common.decode import decode
from whimbrel.dialects.common.route import Response, ServedModel
from whimbrel.dialects.tei import scores
from whimbrel.dialects.tei.answers import TEI, wrong_model_type
from whimbrel.dialects.tei.embed import (
    Direction,
    Parameters,
    Sentences,
    TruncateFlag,
    VectorFields,
    dense,
    render_embed,
    render_embed_all,
    render_embed_sparse,
    similarities,
    similarity,
    text_request,
)
from whimbrel.dialects.tei.scores import PredictParameters, PredictRequest, Raw, classes, render_predict, sequences
from whimbrel.types.request import OutputName, Request
from whimbrel.types.result import Result


class RootParameters(PredictParameters, frozen=True, kw_only=True):
    """The parameters of /predict and of /similarity."""

    truncate: TruncateFlag = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


class RootRequest(VectorFields, frozen=True, kw_only=True):
    """Body of POST /: that of /embed, /embed_all, /embed_sparse or /predict, by the kind of the model, or of /similarity."""

    inputs: Annotated[
        str | Sentences | list[str | int | list[int | str]],
        Meta(description="Inputs as the route takes them that suits the model."),
    ]
    raw_scores: Raw = None
    parameters: Annotated[
        RootParameters | None, Meta(description="Parameters of /predict and /similarity, as `InferenceClient` sends them.")
    ] = None


def parse_root(raw: bytes) -> tuple[RootRequest, Request | Callable[[ServedModel], Request]]:
    """Return the body and the request that it stands for. Raises InvalidRequest or TooLarge."""
    body = decode(RootRequest, raw)
    if isinstance(body.inputs, Sentences):
        of = body.parameters or RootParameters()
        parameters = Parameters(truncate=of.truncate, truncation_direction=of.truncation_direction, prompt_name=of.prompt_name)
        return body, similarity(body.inputs, parameters)

    def request(model: ServedModel) -> Request:
        output = _first(model)
        if output == "scores":
            predict = _predict(body)
            return classes(predict, sequences(predict.inputs), model)
        return dense(body) if output == "dense" else text_request(body, output)

    return body, request


def render_root(body: RootRequest, result: Result, model: ServedModel) -> Response:
    """Return the answer of the route that suits the model."""
    if isinstance(body.inputs, Sentences):
        return similarities(body.inputs, result, model)
    output = _first(model)
    if output == "scores":
        return render_predict(_predict(body), result, model)
    return _WRITE[output](body, result, model)


_WRITE: Final[dict[OutputName, Callable[[Any, Result, ServedModel], Response]]] = {
    "dense": render_embed,
    "sparse": render_embed_sparse,
    "multi_vector": render_embed_all,
}


def _first(model: ServedModel) -> OutputName:
    output = next(iter(model.card.outputs))
    if output == "token_scores":
        raise wrong_model_type("this model judges tokens, for which TEI has no route; ask /v1/embed.")
    return output


def _predict(body: RootRequest) -> PredictRequest:
    return PredictRequest(
        inputs=cast(Any, body.inputs),  # sequences() finds token ids
        truncate=body.truncate,
        truncation_direction=body.truncation_direction,
        raw_scores=body.raw_scores,
        parameters=body.parameters,
    )


_ROOT: Final = TEI.route(
    "/", "The route that suits the model: /embed, /embed_sparse, /embed_all or /predict; or /similarity (TEI).",
    parse_root, render_root, response_type=list[Any], example='{"inputs": "What is a whimbrel?"}',
)  # fmt: skip

ROUTES: Final = tuple(
    replace(route, path=path)
    for path in ("/", "/invocations")
    for route in (_ROOT, *(each for each in scores.ROUTES if each.path == "/rerank"))
)
