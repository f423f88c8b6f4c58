"""Cohere's rerank API, versions 2 and 1. Pure functions over bytes.

Source: cohere-python 7.3 (v2/raw_client.py, raw_base_client.py). The fields of /v1/rerank are taken too, so vLLM's bodies of
/v2/rerank are; fields that are not known are ignored. Chunks, which are another way to run a long document, are refused where
there would be several: then scores are what they are there, or there are none.
"""

from __future__ import annotations

from typing import Annotated, Any, Final
from uuid import uuid4

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from whimbrel.dialects.cohere.embed import COHERE, CohereMeta, meta
from whimbrel.dialects.common.decode import decode, is_packed
from whimbrel.dialects.common.responses import json_answer, usage
from whimbrel.dialects.common.route import Response, ServedModel
from whimbrel.dialects.openai import Usage
from whimbrel.dialects.rerank import RERANK_TERMS, RankedDocument, RerankRequest, rank, request_of
from whimbrel.errors import InvalidRequest
from whimbrel.types.request import Request
from whimbrel.types.result import Result


class CohereSpans(msgspec.Struct, frozen=True):
    """The choice of spans of documents."""

    mode: str


class CohereRerankRequest(RerankRequest, frozen=True, kw_only=True):
    """Body of POST /v2/rerank."""

    relevant_spans: Annotated[CohereSpans | None, Meta(description="Rejected if its mode is `enabled`.")] = None
    return_documents: Annotated[bool | None, Meta(description="Send the texts back. Default: false.")] = None


class CohereRerankRequestV1(RerankRequest, frozen=True, kw_only=True):
    """Body of POST /v1/rerank where it has one of these fields."""

    rank_fields: Annotated[
        list[str] | None, Meta(description="The fields of documents that are ranked; only `text` is accepted.")
    ] = None
    max_chunks_per_doc: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="1 cuts documents that are too long. With any other number they are an error: documents are not run "
            "in chunks."
        ),
    ] = None
    return_documents: Annotated[bool | None, Meta(description="Send the texts back. Default: false.")] = None


class CohereRerankResponse(msgspec.Struct):
    """Answer of POST /v1/rerank and /v2/rerank, best first; of equal scores the first document comes first."""

    id: str
    results: list[RankedDocument]
    meta: CohereMeta
    model: str
    usage: Usage


def parse_rerank(raw: bytes) -> tuple[CohereRerankRequest, Request]:
    """Return the body and its Request, by default with truncation. Raises InvalidRequest or TooLarge."""
    body = decode(CohereRerankRequest, raw)
    if body.relevant_spans is not None and body.relevant_spans.mode != "disabled":
        raise InvalidRequest("spans are not given here; leave it out.", param="relevant_spans")
    return body, request_of(replace(body, truncate=True if body.truncate is None else body.truncate))


def parse_rerank_v1(raw: bytes) -> tuple[CohereRerankRequestV1, Request]:
    """Return the body of version 1 and its Request. Raises InvalidRequest or TooLarge."""
    body = decode(CohereRerankRequestV1, raw, packed=is_packed(raw))
    if body.rank_fields not in (None, ["text"]):
        raise InvalidRequest('only ["text"] is known here; join the fields to one text.', param="rank_fields")
    cuts = True if body.truncate is None and body.max_chunks_per_doc == 1 else body.truncate
    return body, request_of(replace(body, truncate=cuts))


def render_rerank(body: CohereRerankRequest, result: Result, model: ServedModel) -> bytes | Response:
    """Return the answer of version 2, best first."""
    return _write(body, result, model, "2")


def render_rerank_v1(body: CohereRerankRequestV1, result: Result, model: ServedModel) -> bytes | Response:
    """Return the answer of version 1, best first."""
    return _write(body, result, model, "1")


def _write(body: RerankRequest, result: Result, model: ServedModel, version: str) -> bytes | Response:
    content: dict[str, Any] = {
        "id": str(uuid4()),
        "results": rank(body, result, documents=body.return_documents is True),
        "meta": meta(version, search_units=1),
        "model": model.plan.served_name,
        "usage": usage(result),
    }
    return json_answer(content, result)


_EXAMPLE: Final = '"query": "What is a whimbrel?", "documents": ["A wader with a curved bill.", "A sandwich."]'

ROUTES: Final = (
    COHERE.route(
        "/v2/rerank", "Documents ranked by a query (Cohere v2, vLLM).",
        parse_rerank, render_rerank, response_type=CohereRerankResponse,
        example=f'{{{_EXAMPLE}, "top_n": 1}}', terms=RERANK_TERMS,
    ),
    COHERE.route(
        "/v1/rerank", "Documents ranked by a query: a body with `rank_fields` or `max_chunks_per_doc` (Cohere v1).",
        parse_rerank_v1, render_rerank_v1, response_type=CohereRerankResponse,
        example=f'{{{_EXAMPLE}, "max_chunks_per_doc": 1}}',
        terms=RERANK_TERMS.extended({}, {"truncate": "max_chunks_per_doc=1"}),
        discriminators=frozenset(("rank_fields", "max_chunks_per_doc")),
    ),
)  # fmt: skip
