"""Mixedbread's reranking API: a body with `input`. Pure functions over bytes.

Texts that exceed the limit are cut. Unknown fields are ignored. Source: mixedbread-python 0.50 (types/rerank_response.py).
"""

from typing import Annotated, Any, Final

import msgspec

from whimbrel.dialects.common.answers import Usage, answer_type, usage, word
from whimbrel.dialects.common.bodies import LONGEST, NOT_EMPTY, Positive, count, decode, is_packed, schema
from whimbrel.dialects.common.openai_errors import DETAILED
from whimbrel.dialects.common.pairs import RERANK_TERMS, RerankRequest, Text, rank, request_of
from whimbrel.dialects.common.responses import JSON, Response, ServedModel, json_answer
from whimbrel.dialects.common.route import MESSAGE_PACK, Parsed, ready
from whimbrel.dialects.common.texts import Instruction, ModelName
from whimbrel.errors import InvalidRequest, locate_pairs
from whimbrel.types.options import MAX_PAIRS
from whimbrel.types.result import Result

_TEXTS: Final = count(MAX_PAIRS, " texts", empty="is empty; give at least one text.", fault=InvalidRequest)


class MixedbreadRerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/reranking where it has `input`."""

    query: Annotated[str, NOT_EMPTY.says()]
    input: Annotated[list[str], LONGEST, _TEXTS.says("At most {most} texts.")]
    model: ModelName = None
    top_k: Annotated[Positive | None, schema("Return only the N best. Default: all.")] = None
    return_input: Annotated[bool | None, schema("Send the texts back. Default: false.")] = None
    instruction: Instruction = None


MixedbreadRank: Final = answer_type(
    "MixedbreadRank", "A text among those that were sent.", index=int, score=float, input=str | None, object=word("rank_result")
)
MixedbreadRerankResponse: Final = answer_type(
    "MixedbreadRerankResponse",
    "Answer of POST /v1/reranking, best first by the scores before activation; of equal ones the first text comes first.",
    data=list[MixedbreadRank], model=str, usage=Usage, top_k=int, return_input=bool, object=word("list"),
)  # fmt: skip


def parse_rerank(raw: bytes) -> Parsed[MixedbreadRerankRequest]:
    body = decode(MixedbreadRerankRequest, raw, packed=is_packed(raw))
    return ready(body, request_of(_pairs(body)))


def _pairs(body: MixedbreadRerankRequest) -> RerankRequest:
    documents: list[Text] = list(body.input)
    return RerankRequest(query=body.query, documents=documents, instruction=body.instruction, top_n=body.top_k, truncate=True)


def render_rerank(body: MixedbreadRerankRequest, result: Result, model: ServedModel) -> bytes | Response:
    data: list[dict[str, Any]] = [
        {
            "index": each["index"],
            "score": each["relevance_score"],
            "input": body.input[each["index"]] if body.return_input else None,
            "object": "rank_result",
        }
        for each in rank(_pairs(body), result)
    ]
    options = {"top_k": len(data), "return_input": bool(body.return_input), "object": "list"}
    return json_answer({"data": data, "model": model.plan.served_name, "usage": usage(result)} | options, result)


_locate_pair: Final = locate_pairs("query", "input", single=(True, False))
ROUTES: Final = tuple(
    DETAILED(
        path, "Texts ranked by a query: a body with `input` (Mixedbread).",
        parse_rerank, render_rerank, response_type=MixedbreadRerankResponse,
        made_for="ranking", example='{"query": "What is a whimbrel?", "input": ["A wader with a curved bill.", "A sandwich."]}',
        terms=RERANK_TERMS.extended({"input": lambda at: at if at.part is None else _locate_pair(at), "documents": "input"}),
        media_types=(JSON, *MESSAGE_PACK), discriminators=frozenset({"input"}),
    )
    for path in ("/v1/reranking", "/reranking")
)  # fmt: skip
