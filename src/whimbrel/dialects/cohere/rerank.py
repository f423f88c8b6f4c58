"""Cohere's rerank, versions 2 and 1. Pure functions over bytes.

Source: cohere-python 7.3 (v2/raw_client.py, raw_base_client.py). The fields of /v1/rerank are taken too, so vLLM's bodies of
/v2/rerank are; fields that are not known are ignored. Chunks, which are another way to run a long document, are refused where
there would be several: then scores are what they are there, or there are none.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final
from uuid import uuid4

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from whimbrel.dialects.cohere.embed import CohereMeta, meta, render_error
from whimbrel.dialects.common.decode import decode, is_packed
from whimbrel.dialects.common.responses import json_answer, usage
from whimbrel.dialects.common.route import Response, Route, ServedModel
from whimbrel.dialects.openai import Usage
from whimbrel.dialects.rerank import RERANK_TERMS, RankedDocument, RerankRequest, rank, request_of
from whimbrel.errors import InvalidRequest
from whimbrel.types.request import Request
from whimbrel.types.result import Result


class CohereSpans(msgspec.Struct, frozen=True):
    """Whether spans of documents are wanted."""

    mode: str


class CohereRerankRequest(RerankRequest, frozen=True, kw_only=True):
    """Body of POST /v2/rerank."""

    relevant_spans: Annotated[CohereSpans | None, Meta(description="Refused if its mode is `enabled`.")] = None
    return_documents: Annotated[bool | None, Meta(description="Whether the texts are sent back; they are not by default.")] = (
        None
    )


class CohereRerankRequestV1(RerankRequest, frozen=True, kw_only=True):
    """Body of POST /v1/rerank where it has one of these fields."""

    rank_fields: Annotated[list[str] | None, Meta(description="Which fields of documents count: `text`, and no other.")] = None
    max_chunks_per_doc: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="1: documents that are too long are cut. Otherwise they are an error: they are not run in chunks."),
    ] = None
    return_documents: Annotated[bool | None, Meta(description="Whether the texts are sent back; they are not by default.")] = (
        None
    )


class CohereRerankResponse(msgspec.Struct):
    """Answer of both; the best first, and of equal ones the one that came first."""

    id: str
    results: list[RankedDocument]
    meta: CohereMeta
    model: str
    usage: Usage


def parse_rerank(raw: bytes) -> tuple[CohereRerankRequest, Request]:
    """The body as it was sent, and the Request it stands for, whose texts are cut if they are too long. Raises InvalidRequest
    and TooLarge."""
    body = decode(CohereRerankRequest, raw)
    if body.relevant_spans is not None and body.relevant_spans.mode != "disabled":
        raise InvalidRequest("spans are not given here; leave it out.", param="relevant_spans")
    return body, request_of(replace(body, truncate=True if body.truncate is None else body.truncate))


def parse_rerank_v1(raw: bytes) -> tuple[CohereRerankRequestV1, Request]:
    """The same of version 1."""
    body = decode(CohereRerankRequestV1, raw, packed=is_packed(raw))
    if body.rank_fields not in (None, ["text"]):
        raise InvalidRequest('only ["text"] is known here; join the fields to one text.', param="rank_fields")
    cuts = True if body.truncate is None and body.max_chunks_per_doc == 1 else body.truncate
    return body, request_of(replace(body, truncate=cuts))


def render_rerank(body: CohereRerankRequest, result: Result, model: ServedModel) -> bytes | Response:
    """The answer of version 2, the best first."""
    return _write(body, result, model, "2")


def render_rerank_v1(body: CohereRerankRequestV1, result: Result, model: ServedModel) -> bytes | Response:
    """That of version 1."""
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
    Route(
        path="/v2/rerank",
        summary="Documents in the order in which they answer a query (Cohere v2, vLLM).",
        parse_request=parse_rerank,
        render_response=render_rerank,
        render_error=partial(render_error, terms=RERANK_TERMS),
        request_type=CohereRerankRequest,
        response_type=CohereRerankResponse,
        example=f'{{{_EXAMPLE}, "top_n": 1}}',
    ),
    Route(
        path="/v1/rerank",
        summary="A body with `rank_fields` or `max_chunks_per_doc`: the same (Cohere v1).",
        parse_request=parse_rerank_v1,
        render_response=render_rerank_v1,
        render_error=partial(render_error, terms=RERANK_TERMS.extended({}, {"truncate": "max_chunks_per_doc=1"})),
        request_type=CohereRerankRequestV1,
        response_type=CohereRerankResponse,
        example=f'{{{_EXAMPLE}, "max_chunks_per_doc": 1}}',
        discriminators=frozenset(("rank_fields", "max_chunks_per_doc")),
    ),
)
