"""OpenAI's embeddings API, and the fields that other servers add to it. Pure functions over bytes.

A field of vLLM that would change numbers and that is not honoured is refused by its name; other unknown fields are ignored.
Sources: openai/openai-openapi, `CreateEmbeddingRequest` and its response; vLLM 0.33, entrypoints/pooling/base/protocol.py; TEI.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from whimbrel.dialects.common.bodies import (
    TextFields,
    TextObject,
    Truncation,
    TruncationSide,
    decode,
    is_packed,
    side_of,
    text_request,
)
from whimbrel.dialects.common.body_rules import (
    ID_LISTS,
    IDS,
    ONE_SIDE,
    SPLIT_HAS_NO_SIDE,
    TEXT,
    TEXTS_OR_OBJECTS,
    Rule,
    narrowed,
)
from whimbrel.dialects.common.responses import (
    METADATA,
    OCTETS,
    Response,
    ServedModel,
    binary_answer,
    created,
    encoded_outputs,
    header,
    json_answer,
    new_id,
    row_blocks,
    served_names,
    usage,
)
from whimbrel.dialects.common.route import PLACEHOLDERS, ErrorTerms, Route, binary_formats
from whimbrel.dialects.common.vllm_words import with_vllm_words
from whimbrel.errors import InvalidRequest, TooLarge, WhimbrelError
from whimbrel.types.arrays import Int32Array
from whimbrel.types.request import OutputName, Request, Truncate, read_truncate
from whimbrel.types.result import Ragged, Result
from whimbrel.wire import Base64, ByteOrder, EncodedArray, FloatType, base64_list, to_json

CUTS: Final[dict[object, Truncate]] = {"END": "right", "START": "left", "NONE": "never"}
"""Cohere's and NVIDIA's words for truncation."""
_BEFORE: Final = b'{"object":"embedding","index":%d,"embedding":"'
"""JSON before the base64 letters of a vector."""
_MAX_BLOCKS: Final = 512
"""The limit of entries in a header, of about 100 bytes each: clients read headers of less than 64 KiB."""

EncodingFormat: TypeAlias = Literal["float", "base64", "bytes", "bytes_only", "npy", "arrow"]


class VLLMTextFields(TextFields, frozen=True, kw_only=True):
    """Fields of vLLM's routes that encode texts."""

    RULES: ClassVar[tuple[Rule, ...]] = (*TextFields.RULES, *SPLIT_HAS_NO_SIDE, *ONE_SIDE)

    embed_dtype: Annotated[
        FloatType | None, Meta(description="The type of numbers in binary formats. Default: `float32` (vLLM).")
    ] = None
    endianness: Annotated[
        ByteOrder | None,
        Meta(description="The byte order in binary formats. Default: `native`, the machine's own (vLLM)."),
    ] = None
    use_activation: Annotated[
        bool | None,
        Meta(description="For vectors the same as `normalize`; for scores, whether the activation is applied (vLLM)."),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Cut each text to N tokens; -1 cuts to the model's maximum."),
    ] = None
    truncation_side: TruncationSide = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Put special tokens around texts. Default: true. Token ids are taken as they are (vLLM)."),
    ] = None
    request_id: Annotated[str | None, Meta(description="The end of the answer's `id` (vLLM).")] = None
    user: Annotated[str | None, Meta(description="Accepted and ignored.")] = None


class LateChunkingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of late chunking by length."""

    chunk_size: Annotated[int, Meta(ge=1, le=2**63 - 1, description="The number of tokens of a chunk; the last has the rest.")]


class EmbeddingsRequest(VLLMTextFields, frozen=True, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Annotated[
        str | list[str | int | list[int] | TextObject],
        Meta(
            description="A text, a list of texts, a list of token ids, or a list of such lists; at most 2,048 inputs and "
            "524,288 ids. Token ids are taken as they are: no special tokens are put around them. A text may be an object."
        ),
        narrowed(any_of=(TEXT, TEXTS_OR_OBJECTS, IDS, ID_LISTS)),
    ]
    input_type: Annotated[
        Literal["query", "document", "passage"] | None,
        Meta(description="Whether texts are queries or documents, for models that treat them differently (Voyage, NIM)."),
    ] = None
    modality: Annotated[Literal["text"] | None, Meta(description="The kind of the inputs (Infinity).")] = None
    dimensions: Annotated[
        int | None,
        Meta(
            description="Keep the first N columns of each vector; for models trained with Matryoshka loss. 0 keeps all "
            "(Infinity)."
        ),
        narrowed(minimum=0),
    ] = None
    truncate: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride] - `parse_request` replaces the further words
        bool | Literal["right", "left", "never", "END", "START", "NONE"] | None,
        Meta(
            description="The end at which a text that is too long is cut. `false`, `never` or `NONE` makes it an error. The "
            "words in capitals are NVIDIA's."
        ),
    ] = None
    late_chunking_params: Annotated[
        LateChunkingParams | None,
        Meta(
            description="Give a vector for every so many tokens of a text, in place of one: their mean, after the whole text "
            "has run in one pass. Special tokens count. For models with mean pooling (vLLM)."
        ),
    ] = None
    encoding_format: Annotated[
        EncodingFormat | None,
        Meta(
            description="`float` (default): JSON numbers. `base64`: JSON with each vector's bytes. `bytes`: the bytes of all "
            "vectors, and a header `metadata` that says in JSON where each begins and ends. `bytes_only`: the same without "
            "the header. `npy`, `arrow`: a file for numpy, a stream for Arrow. By default what `Accept` asks for."
        ),
    ] = None


class LateChunk(msgspec.Struct):
    """A chunk of a text, from a first to before an end."""

    token_range: tuple[int, int]
    char_range: Annotated[tuple[int, int] | None, Meta(description="Null for a chunk of special tokens.")]


class LateChunks(msgspec.Struct):
    """The chunks of a text, one for each of its vectors."""

    chunk_size: int
    input_tokens: int
    chunks: list[LateChunk]
    strategy: Literal["fixed_tokens"] = "fixed_tokens"


class Embedding(msgspec.Struct):
    """One vector of the answer, or the vectors of the tokens or chunks of a text."""

    index: int
    embedding: Annotated[
        list[float | list[float]] | str,
        Meta(
            description="JSON numbers, or base64 of little-endian float32; a list of vectors for `late_chunking_params`, or "
            "of a model with a vector for each token, which in base64 are one string of all rows."
        ),
    ]
    object: Literal["embedding"] = "embedding"
    late_chunking: LateChunks | None = None


class Usage(msgspec.Struct):
    """Tokens of all texts after truncation, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class VLLMUsage(Usage):
    """Tokens of all texts after truncation, special tokens included; no text is written (vLLM)."""

    completion_tokens: Literal[0] = 0
    prompt_tokens_details: None = None


class EmbeddingsResponse(msgspec.Struct):
    """Answer of POST /v1/embeddings."""

    id: str
    created: int
    data: list[Embedding]
    model: str
    usage: VLLMUsage
    object: Literal["list"] = "list"


class OpenAIErrorDetail(msgspec.Struct):
    """The error itself."""

    message: str
    type: str
    param: Annotated[str | None, Meta(description="The place of the fault in the request.")]
    code: Annotated[str, Meta(description="A stable word for programs.")]


class OpenAIError(msgspec.Struct):
    """An error of OpenAI's API and of Whimbrel's own routes."""

    error: OpenAIErrorDetail


class Model(msgspec.Struct):
    """One model of GET /v1/models."""

    id: str
    created: int
    max_model_len: Annotated[int, Meta(description="The maximum of tokens per text.")]
    object: Literal["model"] = "model"
    owned_by: str = "whimbrel"


class ModelCapabilities(msgspec.Struct):
    """The kinds of requests that a model takes, among those that Mistral's clients know."""

    classification: bool
    completion_chat: Literal[False] = False
    completion_fim: Literal[False] = False
    function_calling: Literal[False] = False
    fine_tuning: Literal[False] = False
    vision: Literal[False] = False


class NamedModel(Model, kw_only=True):
    """One model of GET /v1/models, with what Mistral's clients read."""

    type: Literal["base"] = "base"
    max_context_length: Annotated[int, Meta(description="The same as `max_model_len` (Mistral).")]
    aliases: Annotated[list[str], Meta(description="All other names of the model.")]
    capabilities: ModelCapabilities


class ModelsResponse(msgspec.Struct):
    """Answer of GET /v1/models."""

    data: list[NamedModel]
    object: Literal["list"] = "list"


_NO_TEMPLATES: Final = "a request brings no template here; that of the model is used, and `instruction` is put into it."
_REFUSED: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "padding": ((None, "do_not_pad"), "texts are not padded, which would change their numbers."),
    "late_chunking_params": ((None,), "is taken by /v1/embeddings."),
    "chat_template": ((None,), _NO_TEMPLATES),
    "chat_template_kwargs": ((None, {}), _NO_TEMPLATES),
    "return_embeddings": ((None, False), "scores are given here; /v1/embed gives the vectors."),
}
"""Values that change nothing, and the reason why others are refused."""
_LONGEST: Final = 100
"""The limit of bytes of a value that is decoded; all accepted values are shorter."""
UNSUPPORTED_TEXT_FIELDS: Final = ("padding", "late_chunking_params")
UNSUPPORTED_PAIR_FIELDS: Final = ("padding", "chat_template", "chat_template_kwargs", "return_embeddings")
_ABSENT: Final = msgspec.Raw()
_Fields: Final = msgspec.defstruct(
    "_Fields", [(name, msgspec.Raw, _ABSENT) for name in ("input", "prompt", "messages", *_REFUSED)], frozen=True
)
"""The fields that are refused, and those that stand in place of `messages`."""


def reject_unsupported(body: bytes, names: Sequence[str] = (), *, text: Literal["input", "prompt"] | None = "input") -> None:
    """Raise InvalidRequest if a field in `names` would change numbers, or if there are chats in place of the field `text`."""
    if all(body.find(name.encode()) < 0 for name in (*names, "messages")):  # `in` costs five times as much
        return
    packed = is_packed(body)
    fields = msgspec.structs.asdict(decode(_Fields, body, packed=packed))
    if text is not None and fields["messages"] is not _ABSENT and fields[text] is _ABSENT:
        raise InvalidRequest(f"chats are not taken; send {text}, a text as the model takes it.", param="messages")
    for name in names:
        (accepted, why), value = _REFUSED[name], fields[name]
        is_short = value is not _ABSENT and len(value) <= _LONGEST
        if value is not _ABSENT and not (is_short and decode(object, bytes(value), packed=packed) in accepted):
            raise InvalidRequest(why, param=name)


def parse_truncation(
    truncate: Truncation, side: Literal["right", "left"] | None, limit: int | None, *, default: bool
) -> tuple[Truncate | None, int | None]:
    """Return (truncate, max_tokens) of a Request. Texts are truncated by default if `default`. Raises InvalidRequest."""
    cuts = truncate if truncate is not None else default or limit is not None
    end = read_truncate(cuts)
    if end in ("right", "left") and side not in (None, end):
        raise InvalidRequest(f"is {side!r}, and truncate is {end!r}; give one of them.", param="truncation_side")
    return end or side, None if limit == -1 else limit


def parse_normalize(body: VLLMTextFields) -> bool | None:
    """Return `normalize`, by either of its names. Raises InvalidRequest if they differ."""
    if body.normalize is not None and body.use_activation not in (None, body.normalize):
        raise InvalidRequest("contradicts normalize, which is the same for vectors; give one of them.", param="use_activation")
    return body.use_activation if body.normalize is None else body.normalize


def vllm_text_request(body: VLLMTextFields, outputs: tuple[OutputName, ...], *, cuts: bool, **more: Any) -> Request:
    """Return the Request of a body of texts, by default with truncation if `cuts`. Raises InvalidRequest and TooLarge."""
    side, max_tokens = body.truncation_side, body.truncate_prompt_tokens
    truncate, limit = parse_truncation(body.truncate, side, max_tokens, default=cuts)
    more["add_special_tokens"] = body.add_special_tokens is not False
    if max_tokens == -1 and body.split_long is None:
        more["split_long"] = False
    return text_request(body, outputs, truncate=truncate, max_tokens=limit, **more)


def parse_request(
    raw: bytes, default: EncodingFormat = "float"
) -> tuple[EmbeddingsRequest, Request | Callable[[ServedModel], Request]]:
    reject_unsupported(raw, ("padding",))
    body = decode(EmbeddingsRequest, raw)
    if body.encoding_format is None:
        body = replace(body, encoding_format=default)
    if body.dimensions == 0 or body.truncate in CUTS:
        body = replace(body, dimensions=body.dimensions or None, truncate=CUTS.get(body.truncate, body.truncate))
    normalize = parse_normalize(body)
    if body.late_chunking_params is not None:
        return body, _chunked_request(body, normalize)
    request = vllm_text_request(body, ("dense",), cuts=True, normalize=normalize, input_type=body.input_type)
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

    return body, of_model


def _chunked_request(body: EmbeddingsRequest, normalize: bool | None) -> Request:
    assert body.late_chunking_params is not None
    if body.encoding_format != "float":
        raise InvalidRequest("the vectors of chunks are given as float alone.", param="encoding_format")
    if body.truncate not in (None, False, "never") or body.truncate_prompt_tokens is not None:
        raise InvalidRequest("a text with late_chunking_params is not cut.", param="truncate_prompt_tokens")
    chunk_tokens, side = body.late_chunking_params.chunk_size, body.input_type
    request = vllm_text_request(body, ("dense",), cuts=False, normalize=normalize, input_type=side, chunk_tokens=chunk_tokens)
    for index, text in enumerate(request.texts):
        if isinstance(text, str) and not text:
            raise InvalidRequest("is empty, and has no chunks.", item=index)
    return request


def render_response(body: EmbeddingsRequest, result: Result, model: ServedModel) -> bytes | Response:
    if (size := body.late_chunking_params) is not None:
        return json_answer({**_about(body, result, model), "data": _chunks(result, size.chunk_size)}, result)
    if result.outputs.multi_vector is not None:
        return _render_tokens(body, result, result.outputs.multi_vector, model)
    if body.encoding_format in (None, "float"):
        data = [{"object": "embedding", "index": index, "embedding": row_D} for index, row_D in enumerate(result.dense)]
        return json_answer({**_about(body, result, model), "data": data}, result)
    dense = EncodedArray(result.dense, body.embed_dtype or "float32", body.endianness or "native", "dense")
    match body.encoding_format:
        case "base64":
            head = to_json(_about(body, result, model))[:-1] + b',"data":'
            size, pieces = base64_list(head, dense, b"}", before=_BEFORE, after=b'"}')
            return Response(pieces, size=size)
        case "bytes":
            about = response_head("embd", body, model) | {"data": row_blocks(dense), "usage": usage(result)}
            return Response(dense.chunks(), OCTETS, {METADATA: header(about)}, dense.nbytes)
        case encoding:
            return binary_answer(encoding, {"dense": dense}, result, model)


def _render_tokens(body: EmbeddingsRequest, result: Result, vectors: Ragged, model: ServedModel) -> bytes | Response:
    """Return the vectors of tokens. In base64 those of a text are one string, row after row, as with vLLM."""
    rows = EncodedArray(vectors.rows_XD, body.embed_dtype or "float32", body.endianness or "native", "multi_vector")
    offsets_N1: list[int] = vectors.offsets_N1.tolist()
    about, as_text = _about(body, result, model), body.encoding_format == "base64"
    match body.encoding_format:
        case None | "float" | "base64":
            columns = [Base64(rows[a:b]) if as_text else vectors[i] for i, (a, b) in enumerate(pairwise(offsets_N1))]
            data = [{"object": "embedding", "index": i, "embedding": column} for i, column in enumerate(columns)]
            return json_answer({**about, "data": data}, result, as_text=as_text)
        case "bytes":
            head = response_head("embd", body, model) | {"data": row_blocks(rows, offsets_N1), "usage": usage(result)}
            return Response(rows.chunks(), OCTETS, {METADATA: header(head)}, rows.nbytes)
        case "bytes_only":
            return Response(rows.chunks(), OCTETS, size=rows.nbytes)
        case encoding:
            arrays = encoded_outputs(result.outputs, body.embed_dtype or "float32", body.endianness or "native")
            return binary_answer(encoding, arrays, result, model)


def _chunks(result: Result, size: int) -> list[dict[str, Any]]:
    """Return Embeddings with the vectors of all chunks of each text."""
    assert result.token_offsets is not None
    data: list[dict[str, Any]] = []
    row = 0
    for index, offsets in enumerate(result.token_offsets):
        chunks = _chunk_ranges(offsets.chars_T2, size)
        about = {
            "strategy": "fixed_tokens",
            "chunk_size": size,
            "input_tokens": len(offsets.chars_T2),
            "chunks": [{"token_range": tokens, "char_range": characters} for tokens, characters in chunks],
        }
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


def _about(body: EmbeddingsRequest, result: Result, model: ServedModel) -> dict[str, object]:
    return {
        "id": new_id("embd", body.request_id),
        "object": "list",
        "created": created(),
        "model": model.plan.served_name,
        "usage": vllm_usage(result),
    }


def vllm_usage(result: Result) -> dict[str, int | None]:
    """Return VLLMUsage."""
    return {**usage(result), "completion_tokens": 0, "prompt_tokens_details": None}


def response_head(prefix: str, body: VLLMTextFields, model: ServedModel) -> dict[str, Any]:
    """Return the first fields of answers in vLLM's order."""
    return {"id": new_id(prefix, body.request_id), "created": created(), "model": model.plan.served_name}


def describe_model(name: str, model: ServedModel, started: int) -> NamedModel:
    """Return the entry of a model by one of its names. `started` is the time that clients read as its creation."""
    classifies = "scores" in model.card.outputs and model.card.outputs["scores"].width > 1
    return NamedModel(
        id=name,
        created=started,
        max_model_len=model.plan.max_length,
        max_context_length=model.plan.max_length,
        aliases=[each for each in served_names(model.plan) if each != name],
        capabilities=ModelCapabilities(classification=classifies or "token_scores" in model.card.outputs),
    )


def render_models(models: Sequence[NamedModel]) -> bytes:
    return msgspec.json.encode(ModelsResponse(list(models)))


_ERROR_TYPES: Final = {429: "rate_limit_error", 503: "overloaded_error"}
_TERMS: Final = ErrorTerms({"max_tokens": "truncate_prompt_tokens", "outputs": "model"})


def render_error(error: WhimbrelError, terms: ErrorTerms = _TERMS) -> bytes:
    return msgspec.json.encode(OpenAIError(_detail(error, terms)))


def _detail(error: WhimbrelError, terms: ErrorTerms) -> OpenAIErrorDetail:
    text, param = terms.describe(error)
    kind = _ERROR_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    return OpenAIErrorDetail(text, kind, param, error.code)


class DetailedError(OpenAIError):
    """An error of OpenAI's API, with its text where the clients of Jina and Voyage look for it."""

    detail: str


def render_detailed_error(error: WhimbrelError, terms: ErrorTerms = _TERMS) -> bytes:
    detail = _detail(error, terms)
    detail.message = with_vllm_words(error, detail.message)
    return msgspec.json.encode(DetailedError(detail, detail.message))


_OPENAI: Final = partial(Route, render=render_detailed_error, error_type=DetailedError, terms=_TERMS, placeholders=PLACEHOLDERS)

ROUTES: Final = (
    _OPENAI(
        "/v1/embeddings", "Dense vectors of texts (OpenAI).", parse_request, render_response, response_type=EmbeddingsResponse,
        made_for="dense", example='{"input": ["A whimbrel is a wader.", "It has a curved bill."]}',
        accepts=binary_formats(parse_request),
    ),
)  # fmt: skip
