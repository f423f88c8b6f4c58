"""Routes of llama.cpp: its own /embedding, and its paths of the rerank API. Pure functions over bytes.

Vectors have norm 1, as with llama.cpp's default `embd_normalize`. Texts that exceed the limit are an error. Unknown fields are
ignored. Source: ggml-org/llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from whimbrel.dialects import rerank
from whimbrel.dialects.common.bodies import ModelName, TokenInputs, decode, parse_texts
from whimbrel.dialects.common.responses import Response, ServedModel, json_answer
from whimbrel.dialects.common.route import PLACEHOLDERS, ErrorTerms, Route
from whimbrel.dialects.openai import OpenAIError, render_error
from whimbrel.errors import InvalidRequest
from whimbrel.types.request import Request
from whimbrel.types.result import Result


class LlamaEmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /embedding."""

    content: Annotated[TokenInputs | None, Meta(description="A text, texts, token ids, or lists of token ids.")] = None
    input: Annotated[TokenInputs | None, Meta(description="The same as `content`.")] = None
    model: ModelName = None
    embd_normalize: Annotated[
        int | None, Meta(description="2 (default): divide vectors by their Euclidean norm; -1: do not. No other norm is known.")
    ] = None


class LlamaEmbedding(msgspec.Struct):
    """The vector of one input, in a list."""

    index: int
    embedding: list[list[float]]


def parse_embedding(raw: bytes) -> tuple[LlamaEmbeddingRequest, Request]:
    body = decode(LlamaEmbeddingRequest, raw)
    inputs = body.input if body.content is None else body.content
    if inputs is None or (body.content is not None and body.input is not None):
        raise InvalidRequest("give either content or input.", param="content")
    if body.embd_normalize not in (None, -1, 2):
        raise InvalidRequest(f"is {body.embd_normalize}; only 2 (Euclidean) and -1 (none) are known.", param="embd_normalize")
    return body, Request(parse_texts(inputs), ("dense",), normalize=body.embd_normalize != -1, truncate="never")


def render_embedding(body: LlamaEmbeddingRequest, result: Result, model: ServedModel) -> bytes | Response:
    vectors: list[dict[str, Any]] = [{"index": i, "embedding": row_1D} for i, row_1D in enumerate(result.dense[:, None])]
    return json_answer(vectors, result)


_EMBEDDING: Final = Route(
    "/embedding", "Dense vectors of texts (llama.cpp).",
    parse_embedding, render_embedding, response_type=list[LlamaEmbedding],
    example='{"content": "A whimbrel is a wader."}',
    render=render_error, error_type=OpenAIError, placeholders=PLACEHOLDERS,
    terms=ErrorTerms({"input": "content", "outputs": "model"}, {"truncate": None}),
)  # fmt: skip
ROUTES: Final = (
    _EMBEDDING,
    *(
        replace(route, path=path, summary="The same as /v1/rerank (llama.cpp).")
        for path in ("/v1/reranking", "/reranking")
        for route in rerank.ROUTES
        if route.path == "/v1/rerank"
    ),
)
