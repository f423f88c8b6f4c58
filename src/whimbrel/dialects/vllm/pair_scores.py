"""vLLM's /v1/score, /score and /rerank: scores of pairs of texts. Pure functions over bytes.

Unknown fields are ignored. Source: vLLM 0.33, entrypoints/pooling/scoring.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from whimbrel.dialects.common import pairs
from whimbrel.dialects.common.answers import VLLMUsage, answer_type, vllm_usage, word
from whimbrel.dialects.common.bodies import NOT_EMPTY, decode, is_packed, schema
from whimbrel.dialects.common.pairs import PAIRS, Explained, PairFields
from whimbrel.dialects.common.rerank import RERANK
from whimbrel.dialects.common.responses import Response, ServedModel, created, json_answer, new_id
from whimbrel.dialects.common.route import ErrorTerms, Parsed, Route
from whimbrel.dialects.common.schemas import Schema, any_of, present
from whimbrel.dialects.common.vllm_fields import UNSUPPORTED_PAIR_FIELDS, reject_unsupported
from whimbrel.dialects.vllm.status import TERMS, VLLMError, render_error, status
from whimbrel.errors import InvalidRequest, Location, locate_pairs
from whimbrel.types.result import Result

_Queries: TypeAlias = Annotated[pairs.Query | pairs.Queries | None, schema(**PAIRS.schema)]
_Documents: TypeAlias = Annotated[pairs.Text | pairs.Texts | None, schema(**PAIRS.schema)]
FORMS: Final = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""The pairs of fields that hold queries and documents; the first pair that is complete counts."""


class ScoreRequest(PairFields, frozen=True, kw_only=True):
    """Body of POST /v1/score: pairs as `queries` and `documents`, `queries` and `items`, `text_1` and `text_2`, or `data_1` and
    `data_2`."""

    RULES: ClassVar[tuple[Schema, ...]] = (*PairFields.RULES, any_of(*(present(*names) for names in FORMS)))
    queries: Annotated[_Queries, schema("One query for all documents, or one for each document.")] = None
    documents: _Documents = None
    items: Annotated[_Documents, schema("The same as `documents` (vLLM).")] = None
    data_1: Annotated[_Queries, schema("The same as `queries` (vLLM).")] = None
    data_2: Annotated[_Documents, schema("The same as `documents` (vLLM).")] = None
    text_1: Annotated[_Queries, schema("The same as `queries` (vLLM).")] = None
    text_2: Annotated[_Documents, schema("The same as `documents` (vLLM).")] = None
    return_logits: Annotated[
        bool | None, schema("Report each score before its activation too, by which scores are ordered that it makes equal.")
    ] = None


Score: Final = answer_type(
    "Score", "The score of a pair.",
    index=int, score=float, object=word("score"), explanation=(Explained | None, None), logit=(float | None, None),
)  # fmt: skip
ScoreResponse: Final = answer_type(
    "ScoreResponse", "Answer of POST /v1/score.",
    id=str, created=int, data=list[Score], model=str, usage=VLLMUsage, object=word("list"),
)  # fmt: skip


def parse_score(raw: bytes) -> Parsed[ScoreRequest]:
    reject_unsupported(raw, UNSUPPORTED_PAIR_FIELDS, text=None)
    body = decode(ScoreRequest, raw, packed=is_packed(raw))
    forms = [form for form in FORMS if any(getattr(body, name) is not None for name in form)] or FORMS[-1:]
    names = next((form for form in forms if all(getattr(body, name) is not None for name in form)), forms[0])
    first, second = (getattr(body, name) for name in names)
    if first is None or second is None:
        name = names[0] if first is None else names[1]
        raise InvalidRequest("is missing; give queries and documents, or text_1 and text_2.", param=name)
    for name, value in zip(names, (first, second), strict=True):
        PAIRS.check(value, Location(name))
    queries, documents = pairs.parse_parts(first, names[0]), pairs.parse_parts(second, names[1])
    for index, query in enumerate(queries):
        NOT_EMPTY.check(query, Location(names[0], index))
    one_query = len(queries) == 1
    if one_query:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        message = (
            f"{len(queries):,} for {len(documents):,} {names[1]}; give one, or one for each. Input lengths must be either 1:1, "
            "1:N or N:N."
        )
        raise InvalidRequest(message, param=names[0])
    request = pairs.pairs_request(body, list(zip(queries, documents, strict=True)), listwise=one_query)
    return Parsed(body, pairs.cut_by_format(body, request))


def render_score(body: ScoreRequest, result: Result, model: ServedModel) -> bytes | Response:
    scores_P = pairs.pair_scores(result)
    data: list[dict[str, Any]] = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores_P)]
    for each in data:
        if body.explain:
            each["explanation"] = pairs.explained(result, each["index"])
        if body.return_logits and result.outputs.logits is not None:
            each["logit"] = result.outputs.logits[each["index"], 0]
    head = {"id": new_id("score", body.request_id), "object": "list", "created": created()}
    return json_answer(head | {"data": data, "model": model.plan.served_name, "usage": vllm_usage(result)}, result)


V1_SCORE: Final = replace(
    RERANK,
    path="/v1/score", summary="The scores of pairs of texts (vLLM).",
    parse=parse_score, render_response=render_score, response_type=ScoreResponse,
    example='{"queries": "What is a whimbrel?", "documents": ["A wader with a curved bill.", "A sandwich."]}',
    terms=ErrorTerms({**pairs.PAIR_FIELDS, "input": locate_pairs("queries", "documents")}),
)  # fmt: skip


def _without_version(route: Route) -> Route:
    terms = route.terms.extended({}, TERMS.options)
    path = route.path.removeprefix("/v1")
    return replace(route, path=path, render=render_error, error_type=VLLMError, terms=terms, status=status)


VLLM_RERANK: Final = _without_version(RERANK)
SCORE: Final = _without_version(V1_SCORE)
