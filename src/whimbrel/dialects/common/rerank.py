"""POST /v1/rerank in the shape that Jina's API, vLLM and llama.cpp share. Pure functions over bytes.

Unknown fields are ignored. Sources: Jina's API (api.jina.ai/openapi.json); vLLM 0.33, entrypoints/pooling/scoring.
"""

from typing import Any, Final, Literal

from whimbrel.dialects.common import pairs
from whimbrel.dialects.common.answers import BEST_FIRST, COUNTS, answer_type, described, usage
from whimbrel.dialects.common.bodies import decode, is_packed
from whimbrel.dialects.common.openai_errors import DETAILED
from whimbrel.dialects.common.pairs import RERANK_TERMS, RankedDocument, RankedText, RerankRequest
from whimbrel.dialects.common.responses import JSON, Response, ServedModel, json_answer, new_id
from whimbrel.dialects.common.route import MESSAGE_PACK, Parsed
from whimbrel.dialects.common.vllm_fields import UNSUPPORTED_PAIR_FIELDS, reject_unsupported
from whimbrel.types.result import Result

PairUsage: Final = answer_type(
    "PairUsage", "Tokens of all pairs after truncation, special tokens included; no text is written (Together).",
    **COUNTS, completion_tokens=(Literal[0], 0),
)  # fmt: skip
RerankResponse: Final = answer_type(
    "RerankResponse", f"Answer of POST /v1/rerank, {BEST_FIRST}",
    id=str, results=list[RankedDocument], model=str, usage=PairUsage,
    data=described(
        list[RankedText] | None,
        "The same as Voyage gives it, where the body has no other fields than `query`, `documents`, `model` and "
        "`return_documents`: then it may come from a client of Voyage.",
        None,
    ),
)  # fmt: skip


def parse_rerank(raw: bytes) -> Parsed[RerankRequest]:
    reject_unsupported(raw, UNSUPPORTED_PAIR_FIELDS, text=None)
    body = decode(RerankRequest, raw, packed=is_packed(raw))
    return Parsed(body, pairs.cut_by_format(body, pairs.request_of(body)))


def render_rerank(body: RerankRequest, result: Result, model: ServedModel) -> bytes | Response:
    with_texts = _flag(body.return_documents) is not False
    results = pairs.rank(body, result, (lambda text: {"text": text, "multi_modal": None}) if with_texts else None)
    name, counts = new_id("rerank", body.request_id), usage(result) | {"completion_tokens": 0}
    content: dict[str, Any] = {"id": name, "model": model.plan.served_name, "usage": counts, "results": results}
    if all(getattr(body, field) is None for field in body.__struct_fields__ if field not in _OF_VOYAGE):
        content["data"] = [_plain(each, body) for each in results]
    return json_answer(content, result)


_OF_VOYAGE: Final = ("query", "documents", "model", "adapter", "return_documents")
"""The fields of a body that may come from a client of Voyage."""


def _flag(value: bool | str | None) -> bool | None:
    return value.lower() == "true" if isinstance(value, str) else value


def _plain(ranked: dict[str, Any], body: RerankRequest) -> dict[str, Any]:
    """Return an entry of the results in Voyage's shape."""
    number: int = ranked["index"]
    text = {"document": pairs.text_of(body.documents[number])} if _flag(body.return_documents) else {}
    return {"index": number, "relevance_score": ranked["relevance_score"]} | text


RERANK: Final = DETAILED(
    "/v1/rerank", "Documents ranked by a query (Jina, vLLM).", parse_rerank, render_rerank, response_type=RerankResponse,
    made_for="ranking",
    example='{"query": "What is a whimbrel?", "documents": ["A wader with a curved bill.", "A sandwich."]}',
    terms=RERANK_TERMS, media_types=(JSON, *MESSAGE_PACK),
)  # fmt: skip
