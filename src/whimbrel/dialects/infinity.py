"""Infinity's rerank and classify APIs: bodies with `raw_scores`, which its clients always send. Pure functions over bytes.

LiteLLM leaves it out, and is known by its headers if no key is set.

Scores pass through the same activations as TEI's. Infinity's embeddings are OpenAI's, at /embeddings.
Sources: infinity_client 0.0.76 (models); infinity_emb 0.0.76, infinity_emb/fastapi_schemas/pymodels.py; LiteLLM 1.83,
llms/infinity/rerank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec

from whimbrel.dialects.common import responses
from whimbrel.dialects.common.activation import Prediction, activate, activation_of, predict
from whimbrel.dialects.common.answers import BEST_FIRST, Usage, answer_type, described, usage, word
from whimbrel.dialects.common.bodies import count, decode, is_packed, schema
from whimbrel.dialects.common.openai_errors import DETAILED, DetailedError, render_detailed_error
from whimbrel.dialects.common.pairs import RERANK_TERMS, RankedText, RerankRequest, rank, request_of, text_of
from whimbrel.dialects.common.responses import JSON, Response, ServedModel, json_answer
from whimbrel.dialects.common.route import MESSAGE_PACK, ErrorTerms, GetRoute, Parsed
from whimbrel.dialects.common.schemas import MAX_INPUTS
from whimbrel.dialects.common.texts import ModelName
from whimbrel.errors import InvalidRequest
from whimbrel.types.options import require
from whimbrel.types.request import Request
from whimbrel.types.result import Result

_Raw = Annotated[bool, schema("Return logits, without any activation.")]


class InfinityRerankRequest(RerankRequest, frozen=True, kw_only=True):
    """Body of POST /rerank where it has `raw_scores`."""

    raw_scores: _Raw = False
    return_documents: Annotated[bool | None, schema("Send the texts back. Default: false.")] = None


InfinityRerankResponse: Final = answer_type(
    "InfinityRerankResponse", f"Answer of POST /rerank, {BEST_FIRST}",
    id=str, created=int, results=list[RankedText], model=str, usage=Usage, object=word("rerank"),
)  # fmt: skip


class InfinityClassifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /classify where it has `raw_scores`."""

    input: Annotated[list[str], count(MAX_INPUTS, " texts", fault=InvalidRequest).says("At most {most} texts.")]
    model: ModelName = None
    raw_scores: _Raw = False


InfinityClassifyResponse: Final = answer_type(
    "InfinityClassifyResponse", "Answer of POST /classify.",
    id=str, created=int, data=described(list[list[Prediction]], "The classes of each text, best first."), model=str,
    usage=Usage, object=word("classify"),
)  # fmt: skip


LlamaStatus: Final = answer_type(
    "LlamaStatus", "The state of a model, as llama-server's router tells it.",
    value=Literal["loaded", "loading", "unloaded"], failed=(bool, False),
)  # fmt: skip
InfinityModel: Final = answer_type(
    "InfinityModel", "One model of GET /models. Infinity's clients take no other owner.",
    id=str, created=int, max_model_len=described(int, "The maximum of tokens per text."), object=word("model"),
    owned_by=(str, "infinity"), capabilities=list[Literal["embed", "rerank", "classify"]], backend=(str, "torch"),
    stats=described(dict[str, float], "Empty; /metrics has figures."), status=LlamaStatus,
)  # fmt: skip
InfinityModels: Final = answer_type("InfinityModels", "Answer of GET /models.", data=list[InfinityModel], object=word("list"))


def parse_rerank(raw: bytes) -> Parsed[InfinityRerankRequest]:
    body = decode(InfinityRerankRequest, raw, packed=is_packed(raw))
    request = request_of(msgspec.structs.replace(body, truncate=True if body.truncate is None else body.truncate))

    def with_activation(model: ServedModel) -> Request:
        output = model.card.outputs.get("scores")
        return request if output is None else replace(request, activate=activation_of(body.raw_scores, model) is None)

    return Parsed(body, with_activation)


def render_rerank(body: InfinityRerankRequest, result: Result, model: ServedModel) -> bytes | Response:
    activated_NC = activate(activation_of(body.raw_scores, model), require(result.outputs.scores))
    results = rank(body, result)
    for each in results:
        number: int = each["index"]
        each["relevance_score"] = activated_NC[number, 0]
        each["document"] = text_of(body.documents[number]) if body.return_documents else None
    return json_answer(_head("rerank", model) | {"results": results, "usage": usage(result)}, result)


def parse_classify(raw: bytes) -> Parsed[InfinityClassifyRequest]:
    body = decode(InfinityClassifyRequest, raw)

    def request(model: ServedModel) -> Request:
        model.card.output("scores")
        activate = activation_of(body.raw_scores, model) is None
        return Request(body.input, ("scores",), activate=activate, truncate="right")

    return Parsed(body, request)


def render_classify(body: InfinityClassifyRequest, result: Result, model: ServedModel) -> bytes | Response:
    classes = predict(result, model, activation_of(body.raw_scores, model))
    return json_answer(_head("classify", model) | {"data": classes, "usage": usage(result)}, result)


def render_models(models: Sequence[ServedModel]) -> bytes:
    entries: list[Any] = []
    for model in models:
        about: dict[str, Any] = {"max_model_len": model.plan.max_length, "capabilities": _capabilities(model), "stats": {}}
        has_failed = model.residence.state == "failed"
        about["status"] = LlamaStatus(value="unloaded" if has_failed else model.residence.state, failed=has_failed)
        names, now = responses.served_names(model.plan), responses.created()
        entries += [InfinityModel(id=name, created=now, **about) for name in names]
    return msgspec.json.encode({"data": entries, "object": "list"})


def _capabilities(model: ServedModel) -> list[str]:
    scores = model.card.outputs.get("scores")
    if scores is None:
        return ["embed"] if "dense" in model.card.outputs else []
    return ["rerank"] if scores.width == 1 else ["classify"]


def _head(kind: str, model: ServedModel) -> dict[str, Any]:
    return {"id": responses.new_id("infinity"), "object": kind, "created": responses.created(), "model": model.plan.served_name}


def _is_litellm(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether LiteLLM sends a body as to Infinity: the same as to vLLM, but that a key that is not set is `None`."""
    return headers.get(b"user-agent", b"").startswith(b"litellm/") and headers.get(b"authorization") == b"Bearer None"


_INFINITY: Final = partial(DETAILED, discriminators=frozenset({"raw_scores"}))

ROUTES: Final = (
    _INFINITY(
        "/rerank", "Documents ranked by a query: a body with `raw_scores` (Infinity).",
        parse_rerank, render_rerank, response_type=InfinityRerankResponse,
        made_for="ranking",
        example='{"query": "What is a whimbrel?", "documents": ["A wader.", "A sandwich."], "raw_scores": false}',
        terms=RERANK_TERMS, media_types=(JSON, *MESSAGE_PACK), of_client=_is_litellm,
    ),
    _INFINITY(
        "/classify", "The classes of texts: a body with `raw_scores` (Infinity).",
        parse_classify, render_classify, response_type=InfinityClassifyResponse,
        made_for="classes", example='{"input": ["What a fine bird."], "raw_scores": false}',
        terms=ErrorTerms({"outputs": "model"}),
    ),
)  # fmt: skip

GET_ROUTES: Final = (
    GetRoute(
        "/models", "The models that are served, by all their names (Infinity).",
        render_models, render_detailed_error, DetailedError, InfinityModels,
    ),
)  # fmt: skip
