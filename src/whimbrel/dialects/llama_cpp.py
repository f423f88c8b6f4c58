"""Routes of llama.cpp: its own /embedding, and its paths of the rerank API. Pure functions over bytes.

Vectors have norm 1 by default, or are divided by the norm that `embd_normalize` names. Texts that exceed the limit are an
error. Unknown fields are ignored. Sources: ggml-org/llama.cpp, tools/server/README.md and common/common.cpp.
"""

from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta

from whimbrel.dialects.common.answers import answer_type
from whimbrel.dialects.common.bodies import decode, schema
from whimbrel.dialects.common.openai_errors import OpenAIError, render_error
from whimbrel.dialects.common.rerank import RERANK
from whimbrel.dialects.common.responses import Response, ServedModel, json_answer
from whimbrel.dialects.common.route import PLACEHOLDERS, ErrorTerms, Parsed, Route, ready
from whimbrel.dialects.common.texts import ModelName, TokenInputs, parse_texts
from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array
from whimbrel.types.request import Request
from whimbrel.types.result import Result

_INT16: Final = 32760
"""The largest absolute value of vectors that are scaled to the range of int16."""


class LlamaEmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    content: Annotated[TokenInputs | None, schema("A text, texts, token ids, or lists of token ids.")] = None
    input: Annotated[TokenInputs | None, schema("The same as `content`.")] = None
    model: ModelName = None
    embd_normalize: Annotated[
        Annotated[int, Meta(ge=-1, lt=2**31)] | None,
        schema(
            "The norm that vectors are divided by: 2 (default) the Euclidean, 1 the sum of absolute values, N the "
            f"p-norm of that N; 0 scales the largest absolute value to {_INT16:,}; -1 leaves them."
        ),
    ] = None


LlamaEmbedding: Final = answer_type(
    "LlamaEmbedding", "The vector of one input, in a list.", index=int, embedding=list[list[float]]
)


def parse_embedding(raw: bytes) -> Parsed[LlamaEmbeddingRequest]:
    body = decode(LlamaEmbeddingRequest, raw)
    inputs = body.input if body.content is None else body.content
    if inputs is None or (body.content is not None and body.input is not None):
        raise InvalidRequest("give either content or input.", param="content")
    return ready(body, Request(parse_texts(inputs), ("dense",), normalize=body.embd_normalize in (None, 2), truncate="never"))


def render_embedding(body: LlamaEmbeddingRequest, result: Result, model: ServedModel) -> bytes | Response:
    vectors_ND = _normalized(result.dense, body.embd_normalize)
    vectors: list[dict[str, Any]] = [{"index": i, "embedding": row_1D} for i, row_1D in enumerate(vectors_ND[:, None])]
    return json_answer(vectors, result)


def _normalized(vectors_ND: Float32Array, norm: int | None) -> Float32Array:
    """Return vectors divided by a norm of llama.cpp's, where the engine has not done so."""
    if norm in (None, -1, 2):
        return vectors_ND
    sizes_ND = np.abs(vectors_ND.astype(np.float64))
    largest_N1 = sizes_ND.max(axis=1, keepdims=True)
    largest_N1[largest_N1 == 0] = 1  # a vector of zeros stays one
    ratios_N1 = ((sizes_ND / largest_N1) ** norm).sum(axis=1, keepdims=True) ** (1 / norm) if norm else 1 / _INT16
    return (vectors_ND / (largest_N1 * ratios_N1)).astype(np.float32)


_EMBEDDING: Final = Route(
    "/embedding", "Dense vectors of texts (llama.cpp).",
    parse_embedding, render_embedding, response_type=list[LlamaEmbedding],
    made_for="dense", example='{"content": "A whimbrel is a wader."}',
    render=render_error, error_type=OpenAIError, placeholders=PLACEHOLDERS,
    terms=ErrorTerms({"input": "content", "outputs": "model"}, {"truncate": None}),
)  # fmt: skip
ROUTES: Final = (
    _EMBEDDING,
    *(replace(RERANK, path=path, summary="The same as /v1/rerank (llama.cpp).") for path in ("/v1/reranking", "/reranking")),
)
