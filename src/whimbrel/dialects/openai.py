"""OpenAI's embeddings API, and the fields that other servers add to it. Pure functions over bytes.

A field of vLLM that would change numbers and that is not honoured is refused by its name; other unknown fields are ignored.
Sources: openai/openai-openapi, `CreateEmbeddingRequest` and its response; vLLM 0.33, entrypoints/pooling/base/protocol.py; TEI.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from whimbrel.dialects.common.bodies import TextFields, TextObject, Truncation, TruncationSide, decode, is_packed, text_request
from whimbrel.dialects.common.body_rules import (
    ID_LISTS,
    IDS,
    ONE_SIDE,
    SPLIT_HAS_NO_SIDE,
    TEXT,
    TEXTS_OR_OBJECTS,
    TEXTS_WITH_SPECIAL_TOKENS,
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
    header,
    json_answer,
    new_id,
    row_blocks,
    usage,
)
from whimbrel.dialects.common.route import PLACEHOLDERS, ErrorTerms, Route, binary_formats
from whimbrel.dialects.common.vllm_words import with_vllm_words
from whimbrel.errors import InvalidRequest, TooLarge, WhimbrelError
from whimbrel.types.request import OutputName, Request, Truncate, read_truncate
from whimbrel.types.result import Result
from whimbrel.wire import ByteOrder, EncodedArray, FloatType, base64_list, to_json

CUTS: Final[dict[object, Truncate]] = {"END": "right", "START": "left", "NONE": "never"}
"""Cohere's and NVIDIA's words for truncation."""
_BEFORE: Final = b'{"object":"embedding","index":%d,"embedding":"'
"""JSON before the base64 letters of a vector."""
_MAX_BLOCKS: Final = 512
"""The limit of entries in a header, of about 100 bytes each: clients read headers of less than 64 KiB."""

EncodingFormat: TypeAlias = Literal["float", "base64", "bytes", "bytes_only", "npy", "arrow"]


class VLLMTextFields(TextFields, frozen=True, kw_only=True):
    """Fields of vLLM's routes that encode texts."""

    RULES: ClassVar[tuple[Rule, ...]] = (*TextFields.RULES, *TEXTS_WITH_SPECIAL_TOKENS, *SPLIT_HAS_NO_SIDE, *ONE_SIDE)

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
        Meta(
            description="Accepted as `false` only with token ids, which are taken as they are; texts always get special "
            "tokens (vLLM)."
        ),
    ] = None
    request_id: Annotated[str | None, Meta(description="The end of the answer's `id` (vLLM).")] = None
    user: Annotated[str | None, Meta(description="Accepted and ignored.")] = None


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


class ModelsResponse(msgspec.Struct):
    """Answer of GET /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"


_NO_TEMPLATES: Final = "a request brings no template here; that of the model is used, and `instruction` is put into it."
_REFUSED: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "padding": ((None, "do_not_pad"), "texts are not padded, which would change their numbers."),
    "late_chunking_params": ((None,), "is not known here; late_chunking takes the parts of a text as inputs."),
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
    request = text_request(body, outputs, truncate=truncate, max_tokens=limit, **more)
    if body.add_special_tokens is False and isinstance(request.texts[0], str):
        raise InvalidRequest("a text gets its special tokens; send token ids to do without.", param="add_special_tokens")
    return request


def parse_request(raw: bytes, default: EncodingFormat = "float") -> tuple[EmbeddingsRequest, Request]:
    reject_unsupported(raw, UNSUPPORTED_TEXT_FIELDS)
    body = decode(EmbeddingsRequest, raw)
    if body.encoding_format is None:
        body = replace(body, encoding_format=default)
    if body.dimensions == 0 or body.truncate in CUTS:
        body = replace(body, dimensions=body.dimensions or None, truncate=CUTS.get(body.truncate, body.truncate))
    normalize = parse_normalize(body)
    request = vllm_text_request(body, ("dense",), cuts=True, normalize=normalize, input_type=body.input_type)
    if body.encoding_format == "bytes" and len(request.texts) > _MAX_BLOCKS:
        raise TooLarge(
            f"{len(request.texts):,} inputs; the limit with encoding_format bytes is {_MAX_BLOCKS}, for a header says "
            "where each vector lies. Ask for bytes_only, or split the request.",
            param="input",
        )
    return body, request


def render_response(body: EmbeddingsRequest, result: Result, model: ServedModel) -> bytes | Response:
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


def _about(body: EmbeddingsRequest, result: Result, model: ServedModel) -> dict[str, object]:
    return {
        "id": new_id("embd", body.request_id),
        "object": "list",
        "created": created(),
        "model": model.plan.served_name,
        "usage": usage(result),
    }


def response_head(prefix: str, body: VLLMTextFields, model: ServedModel) -> dict[str, Any]:
    """Return the first fields of answers in vLLM's order."""
    return {"id": new_id(prefix, body.request_id), "created": created(), "model": model.plan.served_name}


def render_models(models: Sequence[Model]) -> bytes:
    return msgspec.json.encode(ModelsResponse(list(models)))


_ERROR_TYPES: Final = {429: "rate_limit_error", 503: "overloaded_error"}
_TERMS: Final = ErrorTerms({"max_tokens": "truncate_prompt_tokens"})


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
        example='{"input": ["A whimbrel is a wader.", "It has a curved bill."]}',
        accepts=binary_formats(parse_request),
    ),
)  # fmt: skip
