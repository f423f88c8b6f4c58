"""OpenAI's embeddings API, and the fields that other servers add to it. Pure functions over bytes.

Source: openai/openai-openapi, `CreateEmbeddingRequest` and its response; extra fields as in vLLM and TEI. Fields that are
not known are ignored, as other servers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.decode import decode
from whimbrel.dialects.common.errors import ErrorTerms
from whimbrel.dialects.common.fields import (
    UNSUPPORTED_TEXT_FIELDS,
    TextObject,
    VLLMTextFields,
    parse_input_type,
    parse_normalize,
    reject_unsupported,
    vllm_text_request,
)
from whimbrel.dialects.common.responses import (
    METADATA,
    OCTETS,
    arrow_answer,
    bare_answer,
    binary_formats,
    created,
    header,
    json_answer,
    new_id,
    npy_answer,
    usage,
)
from whimbrel.dialects.common.route import Dialect, Response, ServedModel
from whimbrel.errors import TooLarge, WhimbrelError
from whimbrel.types.request import Request
from whimbrel.types.result import Result
from whimbrel.wire import EncodedArray, base64_list, to_json

_BEFORE: Final = b'{"object":"embedding","index":%d,"embedding":"'
"""JSON before the base64 letters of a vector."""
_MAX_BLOCKS: Final = 512
"""The limit of entries in a header, of about 100 bytes each: clients read headers of less than 64 KiB."""

EncodingFormat: TypeAlias = Literal["float", "base64", "bytes", "bytes_only", "npy", "arrow"]


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
        EncodingFormat | None,
        Meta(
            description="`float` (default): JSON numbers. `base64`: JSON with each vector's bytes. `bytes`: the bytes of all "
            "vectors, and a header `metadata` that says in JSON where each begins and ends. `bytes_only`: the same without "
            "the header. `npy`, `arrow`: a file for numpy, a stream for Arrow. By default what `Accept` asks for."
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
    max_model_len: Annotated[int, Meta(description="The maximum of tokens per text.")]
    object: Literal["model"] = "model"
    owned_by: str = "whimbrel"


class ModelsResponse(msgspec.Struct):
    """Answer of GET /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct):
    """The cause of an error; `param` is the path of the fault, e.g. `input[3]`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail


def parse_request(raw: bytes, default: EncodingFormat = "float") -> tuple[EmbeddingsRequest, Request]:
    """Return the body, with `default` if it names no format, and the Request that it stands for.

    Raises InvalidRequest or TooLarge.
    """
    reject_unsupported(raw, UNSUPPORTED_TEXT_FIELDS)
    body = decode(EmbeddingsRequest, raw)
    if body.encoding_format is None:
        body = msgspec.structs.replace(body, encoding_format=default)
    more = {"normalize": parse_normalize(body), "input_type": parse_input_type(body.input_type)}
    request = vllm_text_request(body, ("dense",), cuts=True, **more)
    if body.encoding_format == "bytes" and len(request.texts) > _MAX_BLOCKS:
        raise TooLarge(
            f"{len(request.texts):,} inputs; the limit with encoding_format bytes is {_MAX_BLOCKS}, for a header says "
            "where each vector lies. Ask for bytes_only, or split the request.",
            param="input",
        )
    return body, request


def render_response(body: EmbeddingsRequest, result: Result, model: ServedModel) -> bytes | Response:
    """Return the answer, made of the array's memory."""
    if body.encoding_format in (None, "float"):
        data = [{"object": "embedding", "index": index, "embedding": row_D} for index, row_D in enumerate(result.dense)]
        return json_answer({**_about(body, result, model), "data": data}, result)
    dense = EncodedArray(result.dense, body.embed_dtype or "float32", body.endianness or "native", "dense")
    match body.encoding_format:
        case "bytes":
            return _bytes_answer(body, dense, result, model)
        case "bytes_only":
            return bare_answer({"dense": dense})
        case "npy":
            return npy_answer({"dense": dense})
        case "arrow":
            return arrow_answer({"dense": dense}, result, model)
        case "base64":
            head = to_json(_about(body, result, model))[:-1] + b',"data":'
            size, pieces = base64_list(head, dense, b"}", before=_BEFORE, after=b'"}')
            return Response(pieces, size=size)


def _about(body: EmbeddingsRequest, result: Result, model: ServedModel) -> dict[str, object]:
    """Return all fields of the answer but the vectors."""
    return {
        "id": new_id("embd", body.request_id),
        "object": "list",
        "created": created(),
        "model": model.plan.served_name,
        "usage": usage(result),
    }


def _bytes_answer(body: EmbeddingsRequest, vectors_ND: EncodedArray, result: Result, model: ServedModel) -> Response:
    """Return vLLM's binary answer, whose header has an entry for each vector."""
    count, width = vectors_ND.shape
    size = width * vectors_ND.storage_dtype.itemsize
    about = {
        "id": new_id("embd", body.request_id),
        "created": created(),
        "model": model.plan.served_name,
        "data": [
            {
                "index": index,
                "embed_dtype": vectors_ND.dtype,
                "endianness": "big" if vectors_ND.is_big else "little",
                "start": index * size,
                "end": (index + 1) * size,
                "shape": [width],
            }
            for index in range(count)
        ],
        "usage": usage(result),
    }
    return Response(vectors_ND.chunks(), OCTETS, {METADATA: header(about)}, vectors_ND.nbytes)


def render_models(models: Sequence[Model]) -> bytes:
    """Return the answer of GET /v1/models."""
    return msgspec.json.encode(ModelsResponse(list(models)))


_ERROR_TYPES: Final = {429: "rate_limit_error", 503: "overloaded_error"}


_TERMS: Final = ErrorTerms({"max_tokens": "truncate_prompt_tokens"})


def render_error(error: WhimbrelError, terms: ErrorTerms = _TERMS) -> bytes:
    """Return an error as OpenAI's clients expect it."""
    text, param = terms.describe(error)
    kind = _ERROR_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    return msgspec.json.encode(ErrorResponse(ErrorDetail(text, kind, param, error.code)))


_OPENAI: Final = Dialect(render_error, _TERMS)

ROUTES: Final = (
    _OPENAI.route(
        "/v1/embeddings", "Dense vectors of texts (OpenAI).", parse_request, render_response, response_type=EmbeddingsResponse,
        example='{"input": ["A whimbrel is a wader.", "It has a curved bill."]}',
        accepts=binary_formats(parse_request),
    ),
)  # fmt: skip
