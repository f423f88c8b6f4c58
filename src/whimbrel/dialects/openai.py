"""OpenAI's embeddings API, and the fields that other servers add to it. Pure functions over bytes.

Source: openai/openai-openapi, `CreateEmbeddingRequest` and its response; extra fields as in vLLM and TEI. Fields that are
not known are ignored, as other servers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from whimbrel.dialects.embed_dtype import as_base64
from whimbrel.dialects.fields import read_input_type
from whimbrel.dialects.inputs import TextObject, refuse_many
from whimbrel.dialects.read import decode
from whimbrel.dialects.route import Route, ServedModel
from whimbrel.dialects.stamp import created, new_id
from whimbrel.dialects.vllm_fields import OF_TEXTS, VLLMTextFields, read_normalize, refuse_unsupported, vllm_text_request
from whimbrel.errors import WhimbrelError
from whimbrel.types import Request, Result
from whimbrel.wire import to_json


class EmbeddingsRequest(VLLMTextFields, frozen=True, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Annotated[
        str | list[str | int | list[int] | TextObject],
        Meta(
            description="A text, a list of texts, a list of token ids, or a list of such lists; at most 2,048 inputs and "
            "524,288 ids. Token ids are taken as they are: no special tokens are put around them. A text may be an object."
        ),
    ]
    input_type: Annotated[
        Literal["query", "document", "passage"] | None,
        Meta(description="Whether texts are queries or documents, for models that treat them differently (Voyage, NIM)."),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        Meta(
            description="`float` (default): JSON numbers. `base64`: bytes, of little-endian float32 unless `embed_dtype` says."
        ),
    ] = None


class Embedding(msgspec.Struct):
    """One vector of the answer."""

    index: int
    embedding: Annotated[list[float] | str, Meta(description="JSON numbers, or base64 of little-endian float32.")]
    object: Literal["embedding"] = "embedding"


class Usage(msgspec.Struct):
    """Tokens of all texts after truncation, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(msgspec.Struct):
    """Answer of POST /v1/embeddings."""

    id: str
    created: int
    data: list[Embedding]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


class Model(msgspec.Struct):
    """One model of GET /v1/models."""

    id: str
    created: int
    max_model_len: Annotated[int, Meta(description="Tokens per text.")]
    object: Literal["model"] = "model"
    owned_by: str = "whimbrel"


class ModelsResponse(msgspec.Struct):
    """Answer of GET /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct):
    """What went wrong; `param` is the path of the fault, e.g. `input[3]`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """Every answer that is not a success."""

    error: ErrorDetail


def read_request(body: bytes) -> tuple[EmbeddingsRequest, Request]:
    """The body as it was sent, and the Request it stands for. Raises InvalidRequest or TooLarge."""
    refuse_many(body)
    refuse_unsupported(body, OF_TEXTS)
    sent = decode(EmbeddingsRequest, body)
    more = {"normalize": read_normalize(sent), "input_type": read_input_type(sent.input_type)}
    return sent, vllm_text_request(sent, ("dense",), cuts=True, **more)


def write_result(sent: EmbeddingsRequest, result: Result, model: ServedModel) -> bytes:
    """The answer; its floats are printed from the array's memory."""
    vectors: Any = as_base64(result.dense, sent) if sent.encoding_format == "base64" else result.dense
    return to_json({
        "id": new_id("embd", sent.request_id),
        "object": "list",
        "created": created(),
        "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)],
        "model": model.plan.served_name,
        "usage": {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens},
    })  # fmt: skip


def write_models(models: Sequence[Model]) -> bytes:
    """The answer of GET /v1/models."""
    return msgspec.json.encode(ModelsResponse(list(models)))


_ERROR_TYPES: Final = {401: "authentication_error", 429: "rate_limit_error", 503: "overloaded_error"}


_NAMES: Final = {"max_tokens": "truncate_prompt_tokens"}
"""Fields of a Request that have another name here."""


def write_error(error: WhimbrelError) -> bytes:
    """An error over a body of this API."""
    return render_error(error.renamed(_NAMES))


def render_error(error: WhimbrelError) -> bytes:
    """An error as OpenAI's clients expect it."""
    kind = _ERROR_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    return msgspec.json.encode(ErrorResponse(ErrorDetail(str(error), kind, error.param, error.code)))


ROUTES: Final = (
    Route(
        path="/v1/embeddings",
        summary="Dense vectors of texts (OpenAI).",
        read_request=read_request,
        write_result=write_result,
        write_error=write_error,
        request_type=EmbeddingsRequest,
        response_type=EmbeddingsResponse,
        example='{"input": ["A whimbrel is a wader.", "It has a curved bill."]}',
    ),
)
