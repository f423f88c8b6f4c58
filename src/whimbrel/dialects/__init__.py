"""Dialects: other servers' APIs as pure functions over bytes, one module each, joined in the table ROUTES.

A dialect knows Request, Result and the error tree; it knows nothing of HTTP servers, engines or tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from whimbrel.dialects import native, openai, rerank
from whimbrel.errors import WhimbrelError
from whimbrel.types import Request, Result

JSON: Final = "application/json"
MESSAGE_PACK: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


@dataclass(frozen=True, slots=True)
class Route:
    """One way to ask for something. `Sent` below is the dialect's own struct, which `write_result` gets back."""

    path: str
    summary: str
    read_request: Callable[[bytes], tuple[Any, Request]]
    """body -> (sent, request); raises InvalidRequest."""
    write_result: Callable[[Any, Result, str], bytes]
    """(sent, result, model name) -> body."""
    write_error: Callable[[WhimbrelError], bytes]
    request_type: type
    response_type: type
    example: str
    media_types: tuple[str, ...] = (JSON,)
    """What a body may be."""


ROUTES: Final = (
    Route(
        path="/v1/embeddings",
        summary="Dense vectors of texts (OpenAI).",
        read_request=openai.read_request,
        write_result=openai.write_result,
        write_error=openai.write_error,
        request_type=openai.EmbeddingsRequest,
        response_type=openai.EmbeddingsResponse,
        example='{"input": ["A whimbrel is a wader.", "It has a curved bill."]}',
    ),
    Route(
        path="/v1/embed",
        summary="Any of a model's outputs, all from one pass (Whimbrel's own).",
        read_request=native.read_request,
        write_result=native.write_result,
        write_error=openai.render_error,
        request_type=native.EmbedRequest,
        response_type=native.EmbedResponse,
        example='{"input": ["A whimbrel is a wader."], "encoding_format": "base64"}',
    ),
    Route(
        path="/v1/rerank",
        summary="Documents in the order in which they answer a query (Jina, vLLM).",
        read_request=rerank.read_rerank,
        write_result=rerank.write_rerank,
        write_error=rerank.write_rerank_error,
        request_type=rerank.RerankRequest,
        response_type=rerank.RerankResponse,
        example='{"query": "What is a whimbrel?", "documents": ["A wader with a curved bill.", "A sandwich."]}',
        media_types=(JSON, *MESSAGE_PACK),
    ),
    Route(
        path="/v1/score",
        summary="The scores of pairs of texts (vLLM).",
        read_request=rerank.read_score,
        write_result=rerank.write_score,
        write_error=rerank.write_score_error,
        request_type=rerank.ScoreRequest,
        response_type=rerank.ScoreResponse,
        example='{"queries": "What is a whimbrel?", "documents": ["A wader with a curved bill.", "A sandwich."]}',
        media_types=(JSON, *MESSAGE_PACK),
    ),
)
"""Every POST route; all are served alike."""
