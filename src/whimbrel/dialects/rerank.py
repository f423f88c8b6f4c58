"""POST /v1/rerank and /v1/score, in the shapes that Jina's API and vLLM share. Pure functions over bytes.

Models that compare vectors also take vectors in place of any text, as /v1/embed gives them in base64, or in fewer bits. Bodies
are JSON or MessagePack, where vectors are bytes. Unknown fields are ignored.

Texts that exceed the limit are an error by default, because a score of half a document looks like any other. Models of late
interaction cut queries and documents to their lengths, as their libraries do.
Sources: Jina's API (api.jina.ai/openapi.json); vLLM 0.33, entrypoints/pooling/scoring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from whimbrel.dialects.common.bodies import (
    AdapterName,
    Empty,
    ModelName,
    Priority,
    Truncation,
    TruncationSide,
    check_count,
    decode,
    is_packed,
)
from whimbrel.dialects.common.body_rules import ONE_PROMPT, ONE_SIDE, Rule, any_of, narrowed, present
from whimbrel.dialects.common.pair_inputs import Queries, Query, Text, Texts, parse_part, parse_parts, text_of
from whimbrel.dialects.common.responses import JSON, Response, ServedModel, created, json_answer, new_id, usage
from whimbrel.dialects.common.route import MESSAGE_PACK, PLACEHOLDERS, ErrorTerms, Route
from whimbrel.dialects.openai import (
    UNSUPPORTED_PAIR_FIELDS,
    DetailedError,
    Usage,
    VLLMUsage,
    parse_truncation,
    reject_unsupported,
    render_detailed_error,
    vllm_usage,
)
from whimbrel.errors import InvalidRequest, Location, locate_pairs
from whimbrel.outputs.scoring import descending
from whimbrel.types.arrays import Float32Array
from whimbrel.types.late_interaction import TokenPooling, read_token_pooling
from whimbrel.types.options import MAX_PAIRS
from whimbrel.types.request import PairInput, Request
from whimbrel.types.result import Result


class TextDocument(msgspec.Struct, frozen=True):
    """A text as an object."""

    text: str
    multi_modal: Annotated[None, Meta(description="Always null: documents are texts (vLLM).")] = None


class PairFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both routes take."""

    RULES: ClassVar[tuple[Rule, ...]] = (*ONE_PROMPT, *ONE_SIDE)
    model: ModelName = None
    adapter: AdapterName = None
    truncate: Annotated[
        Truncation,
        Meta(
            description="The end at which a text that is too long is cut; `true` cuts as the model does. Default: such a text "
            "is an error."
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(
            description="Cut each pair to N tokens; -1 cuts to the model's maximum (vLLM). Where vectors are compared each "
            "text is cut; queries of a fixed length keep it."
        ),
    ] = None
    truncation_side: TruncationSide = None
    max_tokens_per_query: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Cut queries to N tokens before they are joined with documents; 0 does not (vLLM)."),
    ] = None
    max_tokens_per_doc: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Cut documents to N tokens before they are joined with queries; 0 does not (vLLM, Cohere)."),
    ] = None
    request_id: Annotated[str | None, Meta(description="The end of the answer's `id` (vLLM).")] = None
    score_by: Annotated[
        Literal["dense", "sparse", "multi_vector"] | None,
        Meta(
            description="For models that give vectors: the kind that is compared. Default: the kind that the model is made for."
        ),
    ] = None
    dimensions: Annotated[
        int | None,
        Meta(description="Compare only the first N columns of vectors; for models trained with Matryoshka loss."),
        narrowed(minimum=1),
    ] = None
    explain: Annotated[
        bool | None,
        Meta(description="For late-interaction models: report the best match of each query token in each document."),
    ] = None
    token_pooling: Annotated[
        float | TokenPooling | None,
        Meta(
            description="For late-interaction models: merge similar token vectors of documents before scoring. A factor keeps "
            "about 1 / factor of them. Default: as the model does."
        ),
        narrowed(minimum=1),
    ] = None
    instruction: Annotated[str | None, Meta(description="The task that a reranker with a template is told to judge by.")] = None
    prompt_name: Annotated[
        str | None, Meta(description="The name of one of the model's prompts, which is put before queries.")
    ] = None
    prompt: Annotated[str | None, Meta(description="Text put before queries, instead of a named prompt.")] = None
    use_activation: Annotated[bool | None, Meta(description="Apply the activation to scores. Default: as the model does.")] = (
        None
    )
    priority: Priority = None


class RerankRequest(PairFields, frozen=True, kw_only=True):
    """Body of POST /v1/rerank."""

    query: Query
    documents: Annotated[
        list[Text],
        Meta(
            description="At most 10,000 documents. An object has a `text`, or in its place `data` (vectors) or `ids` and "
            "`weights` (a sparse vector).",
            max_length=100_000,
        ),
        narrowed(minItems=1, maxItems=MAX_PAIRS),
    ]
    top_n: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Return only the N best. Default: 0, which returns all.")
    ] = None
    return_documents: Annotated[
        bool | Literal["true", "false", "True", "False"] | None,
        Meta(description="Send the texts back. Default: true. The words are those of Xinference's clients."),
    ] = None


_Queries: TypeAlias = Annotated[Query | Queries | None, narrowed(minItems=1, maxItems=MAX_PAIRS)]
_Documents: TypeAlias = Annotated[Text | Texts | None, narrowed(minItems=1, maxItems=MAX_PAIRS)]
FORMS: Final = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""The pairs of fields that hold queries and documents; the first pair that is complete counts."""


class ScoreRequest(PairFields, frozen=True, kw_only=True):
    """Body of POST /v1/score: pairs as `queries` and `documents`, `queries` and `items`, `text_1` and `text_2`, or `data_1` and
    `data_2`."""

    RULES: ClassVar[tuple[Rule, ...]] = (*PairFields.RULES, any_of(*(present(*names) for names in FORMS)))
    queries: Annotated[_Queries, Meta(description="One query for all documents, or one for each document.")] = None
    documents: _Documents = None
    items: Annotated[_Documents, Meta(description="The same as `documents` (vLLM).")] = None
    data_1: Annotated[_Queries, Meta(description="The same as `queries` (vLLM).")] = None
    data_2: Annotated[_Documents, Meta(description="The same as `documents` (vLLM).")] = None
    text_1: Annotated[_Queries, Meta(description="The same as `queries` (vLLM).")] = None
    text_2: Annotated[_Documents, Meta(description="The same as `documents` (vLLM).")] = None
    return_logits: Annotated[
        bool | None,
        Meta(description="Report each score before its activation too, by which scores are ordered that it makes equal."),
    ] = None


class Explained(msgspec.Struct):
    """The best match of each query token in a document. Tokens are null where vectors came in place of a text."""

    query_tokens: list[str] | None
    document_tokens: list[str] | None
    maxima: Annotated[list[float], Meta(description="The greatest similarity of each query token to a document token.")]
    places: Annotated[list[int], Meta(description="The index of that document token; -1 if the document has none.")]


class RankedDocument(msgspec.Struct):
    """A document among those that were sent."""

    index: int
    relevance_score: float
    document: TextDocument | None = None
    explanation: Explained | None = None


class RankedText(msgspec.Struct):
    """A document among those that were sent, with its text if `return_documents` is true (Voyage)."""

    index: int
    relevance_score: float
    document: str | None = None


class PairUsage(Usage):
    """Tokens of all pairs after truncation, special tokens included; no text is written (Together)."""

    completion_tokens: Literal[0] = 0


class RerankResponse(msgspec.Struct):
    """Answer of POST /v1/rerank, best first by the scores before activation; of equal ones the first document comes first."""

    id: str
    results: list[RankedDocument]
    model: str
    usage: PairUsage
    data: Annotated[
        list[RankedText] | None,
        Meta(
            description="The same as Voyage gives it, where the body has no other fields than `query`, `documents`, `model` "
            "and `return_documents`: then it may come from a client of Voyage."
        ),
    ] = None


class Score(msgspec.Struct):
    """The score of a pair."""

    index: int
    score: float
    object: Literal["score"] = "score"
    explanation: Explained | None = None
    logit: float | None = None


class ScoreResponse(msgspec.Struct):
    """Answer of POST /v1/score."""

    id: str
    created: int
    data: list[Score]
    model: str
    usage: VLLMUsage
    object: Literal["list"] = "list"


def parse_rerank(raw: bytes) -> tuple[RerankRequest, Callable[[ServedModel], Request]]:
    reject_unsupported(raw, UNSUPPORTED_PAIR_FIELDS, text=None)
    body = decode(RerankRequest, raw, packed=is_packed(raw))
    return body, _cut_by_format(body, request_of(body))


def _cut_by_format(body: PairFields, request: Request) -> Callable[[ServedModel], Request]:
    """Return the function from a model to its Request.

    Where the body does not say otherwise, late-interaction models cut queries and documents to their lengths, as their
    libraries do.
    """
    if body.truncate is not None or body.truncate_prompt_tokens is not None:
        return lambda _: request
    cut = replace(request, truncate=body.truncation_side)
    return lambda model: cut if model.card.text_formats or model.card.list_template else request


def request_of(body: RerankRequest) -> Request:
    query = parse_part(body.query, Location("query"))
    pairs = [(query, parse_part(each, Location("documents", index))) for index, each in enumerate(body.documents)]
    return _request(body, pairs, ("query", "documents"), listwise=True)


def parse_score(raw: bytes) -> tuple[ScoreRequest, Callable[[ServedModel], Request]]:
    reject_unsupported(raw, UNSUPPORTED_PAIR_FIELDS, text=None)
    body = decode(ScoreRequest, raw, packed=is_packed(raw))
    forms = [form for form in FORMS if any(getattr(body, name) is not None for name in form)] or FORMS[-1:]
    names = next((form for form in forms if all(getattr(body, name) is not None for name in form)), forms[0])
    first, second = (getattr(body, name) for name in names)
    if first is None or second is None:
        name = names[0] if first is None else names[1]
        raise InvalidRequest("is missing; give queries and documents, or text_1 and text_2.", param=name)
    queries, documents = parse_parts(first, names[0]), parse_parts(second, names[1])
    if not queries:
        raise Empty("is empty; give at least one text.", param=names[0])
    one_query = len(queries) == 1
    if one_query:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        message = (
            f"{len(queries):,} for {len(documents):,} {names[1]}; give one, or one for each. Input lengths must be either 1:1, "
            "1:N or N:N."
        )
        raise InvalidRequest(message, param=names[0])
    return body, _cut_by_format(body, _request(body, list(zip(queries, documents, strict=True)), names, listwise=one_query))


def _request(body: PairFields, pairs: list[PairInput], names: tuple[str, str], *, listwise: bool) -> Request:
    if not pairs:
        raise Empty("is empty; give at least one text.", param=names[1])
    check_count(len(pairs), MAX_PAIRS, " texts", param=names[1])
    for index, (query, _) in enumerate(pairs):
        if isinstance(query, str) and not query:
            raise InvalidRequest("is empty.", param=names[0], item=None if names[0] == "query" else index)
    truncate, limit = parse_truncation(body.truncate, body.truncation_side, body.truncate_prompt_tokens, default=False)
    return Request(
        pairs,
        ("scores",),
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        adapter=body.adapter,
        instruction=body.instruction,
        listwise=listwise,
        activate=body.use_activation,
        score_by=body.score_by,
        token_pooling=read_token_pooling(body.token_pooling),
        dimensions=body.dimensions,
        explain=bool(body.explain),
        truncate=truncate,
        max_tokens=limit,
        max_query_tokens=body.max_tokens_per_query or None,
        max_document_tokens=body.max_tokens_per_doc or None,
        priority=body.priority or 0,
    )


def render_rerank(body: RerankRequest, result: Result, model: ServedModel) -> bytes | Response:
    results = rank(body, result, documents=_flag(body.return_documents) is not False)
    for each in results:
        if "document" in each:
            each["document"]["multi_modal"] = None
    name, counts = new_id("rerank", body.request_id), usage(result) | {"completion_tokens": 0}
    content: dict[str, Any] = {"id": name, "model": model.plan.served_name, "usage": counts, "results": results}
    if all(getattr(body, field) is None for field in _OPTIONS):
        content["data"] = [_plain(each, body) for each in results]
    return json_answer(content, result)


_OPTIONS: Final = tuple(
    field
    for field in RerankRequest.__struct_fields__
    if field not in ("query", "documents", "model", "adapter", "return_documents")
)


def _flag(value: bool | str | None) -> bool | None:
    return value.lower() == "true" if isinstance(value, str) else value


def _plain(ranked: dict[str, Any], body: RerankRequest) -> dict[str, Any]:
    """Return an entry of the results in Voyage's shape."""
    number: int = ranked["index"]
    text = {"document": text_of(body.documents[number])} if _flag(body.return_documents) else {}
    return {"index": number, "relevance_score": ranked["relevance_score"]} | text


def rank(body: RerankRequest, result: Result, *, documents: bool) -> list[dict[str, Any]]:
    """Return RankedDocuments, best first, with their texts if `documents`."""
    scores_P = pair_scores(result)
    order = descending(result.outputs.order[:, 0], body.top_n or None)
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": score} for index, score in zip(order, scores_P[order], strict=True)
    ]
    for index, each in zip(order, results, strict=True) if documents else ():
        if (text := text_of(body.documents[index])) is not None:
            each["document"] = {"text": text}
    for each in results if body.explain else ():
        each["explanation"] = _explained(result, each["index"])
    return results


def render_score(body: ScoreRequest, result: Result, model: ServedModel) -> bytes | Response:
    scores_P = pair_scores(result)
    data: list[dict[str, Any]] = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores_P)]
    for each in data if body.explain else ():
        each["explanation"] = _explained(result, each["index"])
    if body.return_logits and (logits_PC := result.outputs.logits) is not None:
        for each, logit in zip(data, logits_PC[:, 0], strict=True):
            each["logit"] = logit
    head = {"id": new_id("score", body.request_id), "object": "list", "created": created()}
    return json_answer(head | {"data": data, "model": model.plan.served_name, "usage": vllm_usage(result)}, result)


_FIELDS: Final = {
    "max_tokens": "truncate_prompt_tokens",
    "max_query_tokens": "max_tokens_per_query",
    "max_document_tokens": "max_tokens_per_doc",
    "activate": "use_activation",
    "outputs": "model",
}
RERANK_TERMS: Final = ErrorTerms({**_FIELDS, "input": locate_pairs("query", "documents", single=(True, False))})
SCORE_TERMS: Final = ErrorTerms({**_FIELDS, "input": locate_pairs("queries", "documents")})


def pair_scores(result: Result) -> Float32Array:
    """Return the score of each pair. Raises InvalidRequest if the model gives several."""
    scores_PC = result.outputs.scores
    assert scores_PC is not None
    if scores_PC.shape[1] != 1:
        raise InvalidRequest(f"this model gives {scores_PC.shape[1]} scores for a pair, of as many classes.", param="model")
    return scores_PC[:, 0]


def _explained(result: Result, index: int) -> dict[str, Any]:
    matches, tokens = result.outputs.token_matches, result.pair_tokens
    assert matches is not None
    assert tokens is not None
    maxima, indices = np.ascontiguousarray(matches[index].T)
    return dict(zip(Explained.__struct_fields__, (*tokens[index], maxima, indices.astype(np.int32)), strict=True))


_RERANK: Final = partial(
    Route,
    render=render_detailed_error,
    error_type=DetailedError,
    media_types=(JSON, *MESSAGE_PACK),
    placeholders=PLACEHOLDERS,
)

ROUTES: Final = (
    _RERANK(
        "/v1/rerank", "Documents ranked by a query (Jina, vLLM).",
        parse_rerank, render_rerank, response_type=RerankResponse,
        made_for="ranking",
        example='{"query": "What is a whimbrel?", "documents": ["A wader with a curved bill.", "A sandwich."]}',
        terms=RERANK_TERMS,
    ),
    _RERANK(
        "/v1/score", "The scores of pairs of texts (vLLM).", parse_score, render_score, response_type=ScoreResponse,
        made_for="ranking",
        example='{"queries": "What is a whimbrel?", "documents": ["A wader with a curved bill.", "A sandwich."]}',
        terms=SCORE_TERMS,
    ),
)  # fmt: skip
