"""OpenAI's embeddings API and its list of models. Pure functions over bytes.

The fields that vLLM and others add to the body are honoured or refused by name; other unknown fields are ignored.
Source: openai/openai-openapi, `CreateEmbeddingRequest` and its response.
"""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from whimbrel.dialects.common import responses, vllm_fields
from whimbrel.dialects.common.answers import VLLMUsage, answer_type, described, usage, vllm_usage, word
from whimbrel.dialects.common.bodies import Natural, decode, schema, text_inputs
from whimbrel.dialects.common.openai_errors import DETAILED, OPENAI_TERMS
from whimbrel.dialects.common.responses import EncodingFormat, Response, ServedModel, json_answer
from whimbrel.dialects.common.route import Parsed, binary_formats, ready
from whimbrel.dialects.common.schemas import ID_LISTS, IDS, TEXT, TEXTS_OR_OBJECTS
from whimbrel.dialects.common.texts import CUTS, TextObject, side_of
from whimbrel.dialects.common.vllm_fields import VLLMTextFields
from whimbrel.errors import InvalidRequest, TooLarge
from whimbrel.types.arrays import Float32Array, Int32Array
from whimbrel.types.options import require
from whimbrel.types.request import Request
from whimbrel.types.result import Ragged, Result
from whimbrel.wire.dtypes import EncodedArray
from whimbrel.wire.json_base64 import Base64, base64_list, to_json

_BEFORE: Final = b'{"object":"embedding","index":%d,"embedding":"'
"""JSON before the base64 letters of a vector."""
_MAX_BLOCKS: Final = 512
"""The limit of entries in a header, of about 100 bytes each: clients read headers of less than 64 KiB."""


class LateChunkingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of late chunking by length."""

    chunk_size: Annotated[int, Meta(ge=1, le=2**63 - 1, description="The number of tokens of a chunk; the last has the rest.")]


class EmbeddingsRequest(VLLMTextFields, frozen=True, kw_only=True):
    input: Annotated[
        str | list[str | int | list[int] | TextObject],
        text_inputs(TEXT, TEXTS_OR_OBJECTS, IDS, ID_LISTS).says(
            "A text, a list of texts, a list of token ids, or a list of such lists; at most {most} inputs and {ids} ids. Token "
            "ids are taken as they are: no special tokens are put around them. A text may be an object."
        ),
    ]
    input_type: Annotated[
        Literal["query", "document", "passage"] | None,
        schema("Whether texts are queries or documents, for models that treat them differently (Voyage, NIM)."),
    ] = None
    modality: Annotated[Literal["text"] | None, schema("The kind of the inputs (Infinity).")] = None
    dimensions: Annotated[
        Natural | None,
        schema("Keep the first N columns of each vector; for models trained with Matryoshka loss. 0 keeps all (Infinity)."),
    ] = None
    truncate: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride] - `parse_request` replaces the further words
        bool | Literal["right", "left", "never", "END", "START", "NONE"] | None,
        schema(
            "The end at which a text that is too long is cut. `false`, `never` or `NONE` makes it an error. The words in "
            "capitals are NVIDIA's."
        ),
    ] = None
    late_chunking_params: Annotated[
        LateChunkingParams | None,
        schema(
            "Give a vector for every so many tokens of a text, in place of one: their mean, after the whole text has run in "
            "one pass. Special tokens count. For models with mean pooling (vLLM)."
        ),
    ] = None
    encoding_format: Annotated[
        EncodingFormat | None,
        schema(
            "`float` (default): JSON numbers. `base64`: JSON with each vector's bytes. `bytes`: the bytes of all vectors, and "
            "a header `metadata` that says in JSON where each begins and ends. `bytes_only`: the same without the header. "
            "`npy`, `arrow`: a file for numpy, a stream for Arrow. By default what `Accept` asks for."
        ),
    ] = None


LateChunk: Final = answer_type(
    "LateChunk", "A chunk of a text, from a first to before an end.",
    token_range=tuple[int, int], char_range=described(tuple[int, int] | None, "Null for a chunk of special tokens."),
)  # fmt: skip
LateChunks: Final = answer_type(
    "LateChunks", "The chunks of a text, one for each of its vectors.",
    chunk_size=int, input_tokens=int, chunks=list[LateChunk], strategy=word("fixed_tokens"),
)  # fmt: skip
Embedding: Final = answer_type(
    "Embedding", "One vector of the answer, or the vectors of the tokens or chunks of a text.",
    index=int,
    embedding=described(
        list[float | list[float]] | str,
        "JSON numbers, or base64 of little-endian float32; a list of vectors for `late_chunking_params`, or of a model "
        "with a vector for each token, which in base64 are one string of all rows.",
    ),
    object=word("embedding"), late_chunking=(LateChunks | None, None),
)  # fmt: skip
EmbeddingsResponse: Final = answer_type(
    "EmbeddingsResponse", "Answer of POST /v1/embeddings.",
    id=str, created=int, data=list[Embedding], model=str, usage=VLLMUsage, object=word("list"),
)  # fmt: skip


ModelCapabilities: Final = answer_type(
    "ModelCapabilities", "The kinds of requests that a model takes, among those that Mistral's clients know.",
    classification=bool,
    **dict.fromkeys(
        ("completion_chat", "completion_fim", "function_calling", "fine_tuning", "vision"), (Literal[False], False)
    ),
)  # fmt: skip
NamedModel: Final = answer_type(
    "NamedModel", "One model of GET /v1/models, with what Mistral's clients read.",
    id=str, created=int, max_model_len=described(int, "The maximum of tokens per text."), object=word("model"),
    owned_by=(str, "whimbrel"), type=word("base"), max_context_length=described(int, "The same as `max_model_len` (Mistral)."),
    aliases=described(list[str], "All other names of the model."), capabilities=ModelCapabilities,
)  # fmt: skip
ModelsResponse: Final = answer_type("ModelsResponse", "Answer of GET /v1/models.", data=list[NamedModel], object=word("list"))


def parse_request(raw: bytes, default: EncodingFormat = "float") -> Parsed[EmbeddingsRequest]:
    vllm_fields.reject_unsupported(raw, ("padding",))
    body = decode(EmbeddingsRequest, raw)
    if body.encoding_format is None:
        body = replace(body, encoding_format=default)
    if body.dimensions == 0 or body.truncate in CUTS:
        body = replace(body, dimensions=body.dimensions or None, truncate=CUTS.get(body.truncate, body.truncate))
    normalize = vllm_fields.parse_normalize(body)
    if body.late_chunking_params is not None:
        return ready(body, _chunked_request(body, body.late_chunking_params.chunk_size, normalize))
    request = vllm_fields.text_request(body, ("dense",), cuts=True, normalize=normalize, input_type=body.input_type)
    if body.encoding_format == "bytes" and len(request.texts) > _MAX_BLOCKS:
        raise TooLarge(
            f"{len(request.texts):,} inputs; the limit with encoding_format bytes is {_MAX_BLOCKS}, for a header says "
            "where each vector lies. Ask for bytes_only, or split the request.",
            param="input",
        )

    def of_model(model: ServedModel) -> Request:
        if "dense" in model.card.outputs or "multi_vector" not in model.card.outputs:
            return request
        return dataclasses.replace(request, outputs=("multi_vector",), input_type=side_of(model.card, request.input_type))

    return Parsed(body, of_model)


def _chunked_request(body: EmbeddingsRequest, size: int, normalize: bool | None) -> Request:
    if body.encoding_format != "float":
        raise InvalidRequest("the vectors of chunks are given as float alone.", param="encoding_format")
    if body.truncate not in (None, False, "never") or body.truncate_prompt_tokens is not None:
        raise InvalidRequest("a text with late_chunking_params is not cut.", param="truncate_prompt_tokens")
    options = {"normalize": normalize, "input_type": body.input_type, "chunk_tokens": size}
    request = vllm_fields.text_request(body, ("dense",), cuts=False, **options)
    for index, text in enumerate(request.texts):
        if isinstance(text, str) and not text:
            raise InvalidRequest("is empty, and has no chunks.", item=index)
    return request


def render_response(body: EmbeddingsRequest, result: Result, model: ServedModel) -> bytes | Response:
    """Return the vectors of texts or of their tokens. In base64 those of a text are one string, row after row, as with vLLM."""
    about, tokens = _about(body, result, model), result.outputs.multi_vector
    if (size := body.late_chunking_params) is not None:
        return json_answer(about | {"data": _chunk_embeddings(result, size.chunk_size)}, result)
    if body.encoding_format in (None, "float"):
        return json_answer(about | {"data": _embeddings(result.dense if tokens is None else tokens)}, result)
    name, numbers = ("dense", result.dense) if tokens is None else ("multi_vector", tokens.rows_XD)
    rows = EncodedArray(numbers, body.embed_dtype or "float32", body.endianness or "native", name)
    offsets_N1: list[int] = [] if tokens is None else tokens.offsets_N1.tolist()
    match body.encoding_format:
        case "base64" if tokens is None:
            size, pieces = base64_list(to_json(about)[:-1] + b',"data":', rows, b"}", before=_BEFORE, after=b'"}')
            return Response(pieces, size=size)
        case "base64":
            data = _embeddings([Base64(rows[start:end]) for start, end in pairwise(offsets_N1)])
            return json_answer(about | {"data": data}, result, as_text=True)
        case "bytes":
            head, blocks = vllm_fields.response_head("embd", body, model), responses.row_blocks(rows, offsets_N1 or None)
            head |= {"data": blocks, "usage": usage(result)}
            return Response(rows.chunks(), responses.OCTETS, {responses.METADATA: responses.header(head)}, rows.nbytes)
        case encoding:
            is_one = tokens is None or encoding == "bytes_only"
            arrays = {name: rows} if is_one else responses.encoded_outputs(result.outputs, rows.dtype, rows.order)
            return responses.binary_answer(encoding, arrays, result, model)


def _chunk_embeddings(result: Result, size: int) -> list[dict[str, Any]]:
    """Return Embeddings with the vectors of all chunks of each text."""
    data: list[dict[str, Any]] = []
    row = 0
    for index, offsets in enumerate(require(result.token_offsets)):
        chunks = _chunk_ranges(offsets.chars_T2, size)
        about: dict[str, Any] = {"strategy": "fixed_tokens", "chunk_size": size, "input_tokens": len(offsets.chars_T2)}
        about["chunks"] = [{"token_range": tokens, "char_range": characters} for tokens, characters in chunks]
        vectors_PD = result.dense[row : row + len(chunks)]
        data.append({"index": index, "object": "embedding", "embedding": vectors_PD, "late_chunking": about})
        row += len(chunks)
    return data


def _chunk_ranges(chars_T2: Int32Array, size: int) -> list[tuple[tuple[int, int], tuple[int, int] | None]]:
    """Return the tokens and the characters of each chunk; tokens without characters, as special ones, do not count."""
    num_tokens = len(chars_T2)
    starts = range(0, num_tokens, min(size, num_tokens))
    first_T, end_T = chars_T2.T
    is_text_T = first_T < end_T
    first_P = np.minimum.reduceat(np.where(is_text_T, first_T, np.iinfo(np.int32).max), starts)
    end_P = np.maximum.reduceat(np.where(is_text_T, end_T, -1), starts)
    characters = ((int(a), int(b)) if a < b else None for a, b in zip(first_P, end_P, strict=True))
    return list(zip(pairwise([*starts, num_tokens]), characters, strict=True))


def _embeddings(columns: Float32Array | Ragged | list[Base64]) -> list[dict[str, Any]]:
    return [{"object": "embedding", "index": index, "embedding": columns[index]} for index in range(len(columns))]


def _about(body: EmbeddingsRequest, result: Result, model: ServedModel) -> dict[str, object]:
    name, counts = responses.new_id("embd", body.request_id), vllm_usage(result)
    head: dict[str, object] = {"id": name, "object": "list", "created": responses.created()}
    return head | {"model": model.plan.served_name, "usage": counts}


def describe_model(name: str, model: ServedModel, started: int) -> Any:
    """Return the entry of a model by one of its names. `started` is the time that clients read as its creation."""
    classifies = "scores" in model.card.outputs and model.card.outputs["scores"].width > 1
    return NamedModel(
        id=name,
        created=started,
        max_model_len=model.plan.max_length,
        max_context_length=model.plan.max_length,
        aliases=[each for each in responses.served_names(model.plan) if each != name],
        capabilities=ModelCapabilities(classification=classifies or "token_scores" in model.card.outputs),
    )


def render_models(models: Sequence[Any]) -> bytes:
    return msgspec.json.encode({"data": models, "object": "list"})


EMBEDDINGS: Final = DETAILED(
    "/v1/embeddings", "Dense vectors of texts (OpenAI).", parse_request, render_response, response_type=EmbeddingsResponse,
    made_for="dense", example='{"input": ["A whimbrel is a wader.", "It has a curved bill."]}',
    terms=OPENAI_TERMS, accepts=binary_formats(parse_request),
)  # fmt: skip
ROUTES: Final = (EMBEDDINGS,)
