"""vLLM's own routes: /pooling, /classify, /score, /rerank, /tokenize, /detokenize. Pure functions over bytes.

Texts that exceed the limit are refused by default, but late-interaction models cut them as their libraries do; there, texts
are documents by default. Unknown fields are ignored.
Source: vLLM 0.33, entrypoints/pooling and entrypoints/serve/tokenize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from whimbrel import __version__
from whimbrel.dialects import openai, rerank
from whimbrel.dialects.common.bodies import TextUse, TokenInputs, decode, side_of
from whimbrel.dialects.common.body_rules import MAX_IDS, narrowed
from whimbrel.dialects.common.responses import (
    JSON,
    METADATA,
    OCTETS,
    Response,
    ServedModel,
    header,
    json_answer,
    row_blocks,
    usage,
)
from whimbrel.dialects.common.route import PLACEHOLDERS, ErrorTerms, GetRoute, Route
from whimbrel.dialects.common.vllm_words import with_vllm_words
from whimbrel.dialects.openai import (
    UNSUPPORTED_TEXT_FIELDS,
    EmbeddingsRequest,
    VLLMTextFields,
    VLLMUsage,
    parse_normalize,
    reject_unsupported,
    response_head,
    vllm_text_request,
    vllm_usage,
)
from whimbrel.errors import InvalidRequest, Location, WhimbrelError
from whimbrel.types.request import DetokenizeRequest, OutputName, Request, TokenizeRequest
from whimbrel.types.result import Ragged, Result
from whimbrel.types.seq import TokenInfo
from whimbrel.wire import Base64, EncodedArray, base64_rows, to_json


class PoolingRequest(VLLMTextFields, frozen=True, kw_only=True):
    """Body of POST /pooling."""

    input: TokenInputs
    task: Annotated[
        Literal["embed", "classify", "token_embed", "token_classify"] | None,
        Meta(
            description="A vector or the scores of classes, for each text or for each of its tokens. Default: the task that "
            "the model is made for. For a model with dense vectors, `token_embed` gives each token the vector "
            "that pooling it alone would give."
        ),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64", "bytes", "bytes_only"] | None,
        Meta(
            description="`float` (default): JSON numbers. `base64`: their bytes. `bytes`: the bytes of all texts one after "
            "another as the answer, and JSON in its header `metadata` says the rest; `bytes_only`: without it."
        ),
    ] = None
    input_type: TextUse = None


class Pooled(msgspec.Struct):
    """The vector, token vectors or scores of one input."""

    index: int
    data: Annotated[list[float | list[float]] | str, Meta(description="Numbers, a list of them for each token, or base64.")]
    object: Literal["pooling"] = "pooling"


class PoolingResponse(msgspec.Struct):
    """Answer of POST /pooling."""

    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: VLLMUsage
    object: Literal["list"] = "list"


class VLLMClassifyRequest(VLLMTextFields, frozen=True, kw_only=True):
    """Body of POST /classify."""

    input: TokenInputs


class Classified(msgspec.Struct):
    """The classes of one input."""

    index: int
    label: Annotated[str | None, Meta(description="The class with the highest score; null if the classes have no names.")]
    probs: list[float]
    num_classes: int


class VLLMClassifyResponse(msgspec.Struct):
    """Answer of POST /classify."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: VLLMUsage
    object: Literal["list"] = "list"


class VLLMTokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Annotated[
        bool | None, Meta(description="Return the tokens as text too, as they stand in the vocabulary.")
    ] = None


class VLLMTokenizeResponse(msgspec.Struct):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class VLLMDetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[
        list[Annotated[int, Meta(ge=0, le=2**63 - 1)]],
        Meta(description="At most 524,288 token ids."),
        narrowed(maxItems=MAX_IDS),
    ]
    model: str | None = None


class VLLMDetokenizeResponse(msgspec.Struct):
    """Answer of POST /detokenize."""

    prompt: str


class VLLMTokenizerInfo(msgspec.Struct):
    """Answer of GET /tokenizer_info, with the special tokens of further roles as `..._token`."""

    tokenizer_class: Annotated[str, Meta(description="The class of transformers that reads the tokenizer's files.")]
    model_max_length: Annotated[int, Meta(description="The limit in tokens per text.")]
    truncation_side: Literal["right", "left"]
    do_lower_case: bool
    strip_accents: bool | None
    tokenize_chinese_chars: bool
    add_prefix_space: bool | None
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None


class VLLMVersionResponse(msgspec.Struct):
    """Answer of GET /version."""

    version: Annotated[str, Meta(description="Whimbrel's version.")]


_OUTPUTS: Final[dict[str | None, OutputName]] = {
    "embed": "dense",
    "classify": "scores",
    "token_embed": "multi_vector",
    "token_classify": "token_scores",
}
_MAX_HEADER: Final = 65_000
"""The limit of bytes in a header: Python's http.client reads lines of 65,536 bytes."""


def parse_pooling(raw: bytes) -> tuple[PoolingRequest, Callable[[ServedModel], Request]]:
    reject_unsupported(raw, UNSUPPORTED_TEXT_FIELDS)
    body = decode(PoolingRequest, raw)

    def request(model: ServedModel) -> Request:
        if model.card.list_template is not None and body.task in (None, "token_embed"):
            return _list_request(body)
        output = _OUTPUTS.get(body.task) or next(iter(model.card.outputs))
        if body.task is None and output == "scores" and "token_scores" in model.card.outputs:
            output = "token_scores"  # vLLM has no other reward
        if output == "multi_vector" and output not in model.card.outputs:
            output = "token_dense"
        if body.task is not None and (output not in model.card.all_outputs or model.card.list_template is not None):
            given = [task for task, name in _OUTPUTS.items() if task and name in model.card.all_outputs]
            given = ["token_embed"] if model.card.list_template else given
            given += ["token_embed"] if "token_dense" in model.card.all_outputs and "token_embed" not in given else []
            raise InvalidRequest(
                f"Unsupported task: {body.task!r}. Supported tasks: {', '.join(given) or 'none'}.", param="outputs"
            )
        if output == "sparse":
            raise InvalidRequest("this model is made for sparse vectors, which /v1/embed gives.", param="task")
        by_output = (
            {"normalize": parse_normalize(body)}
            if output in ("dense", "multi_vector", "token_dense")
            else {"normalize": body.normalize, "activate": body.use_activation}
        )
        cuts, side = bool(model.card.text_formats), side_of(model.card, body.input_type)
        return vllm_text_request(body, (output,), cuts=cuts, input_type=side, **by_output)

    return body, request


def _list_request(body: PoolingRequest) -> Request:
    """Return the request for the vectors of a list: documents, and last their query, in vLLM's words where it is refused."""
    request = vllm_text_request(body, ("multi_vector",), cuts=True, normalize=parse_normalize(body))
    *documents, query = request.texts
    if any(not isinstance(text, str) for text in request.texts):
        raise InvalidRequest("The JinaForRanking model only supports text as input.", param="input")
    if not documents:
        message = "The JinaForRanking model requires at least 2 inputs. The last is the query, those before it are documents."
        raise InvalidRequest(message, param="input")
    pairs = [(str(query), str(document)) for document in documents]
    return replace(request, texts=pairs, listwise=True)


def render_pooling(body: PoolingRequest, result: Result, model: ServedModel) -> bytes | Response:
    results = result.outputs
    outputs = results.dense, results.scores, results.multi_vector, results.token_scores, results.token_dense
    output = next(each for each in outputs if each is not None)
    head, as_text = response_head("pooling", body, model), body.encoding_format == "base64"
    weights = results.token_scores is not None and "sparse" in model.card.outputs  # a number for each token
    columns: Any = [output[i].reshape(-1) for i in range(len(output))] if weights else output
    if body.encoding_format not in (None, "float"):
        array, offsets_N1 = (output.rows_XD, output.offsets_N1.tolist()) if isinstance(output, Ragged) else (output, None)
        array = array.reshape(-1) if weights else array
        rows = EncodedArray(array, body.embed_dtype or "float32", body.endianness or "native", "the answer")
        if not as_text:
            blocks = {"usage": usage(result), "data": row_blocks(rows, offsets_N1)}
            return _bytes_response(rows, None if body.encoding_format == "bytes_only" else header(head | blocks))
        columns = base64_rows(rows) if offsets_N1 is None else [Base64(rows[a:b]) for a, b in pairwise(offsets_N1)]
    data: list[dict[str, Any]] = [{"index": i, "object": "pooling", "data": columns[i]} for i in range(len(columns))]
    return json_answer(head | {"object": "list", "data": data, "usage": vllm_usage(result)}, result, as_text=as_text)


def _bytes_response(rows: EncodedArray, metadata: str | None) -> Response:
    if metadata is not None and len(metadata) > _MAX_HEADER:
        raise InvalidRequest(
            f"the header metadata would have {len(metadata):,} bytes; clients read {_MAX_HEADER:,}. Ask for bytes_only, or "
            "send fewer texts at once.",
            param="encoding_format",
        )
    return Response(rows.chunks(), OCTETS, {} if metadata is None else {METADATA: metadata}, rows.nbytes)


def parse_classify(raw: bytes) -> tuple[VLLMClassifyRequest, Request]:
    reject_unsupported(raw, UNSUPPORTED_TEXT_FIELDS)
    body = decode(VLLMClassifyRequest, raw)
    return body, vllm_text_request(body, ("scores",), cuts=False, activate=body.use_activation, normalize=body.normalize)


def render_classify(body: VLLMClassifyRequest, result: Result, model: ServedModel) -> bytes | Response:
    scores_NC, labels = result.outputs.scores, model.card.labels
    assert scores_NC is not None
    data: list[dict[str, Any]] = [
        {"index": i, "label": labels[best] if labels else None, "probs": scores_NC[i], "num_classes": scores_NC.shape[1]}
        for i, best in enumerate(result.outputs.order.argmax(axis=1).tolist())
    ]
    head = response_head("classify", body, model)
    return json_answer(head | {"object": "list", "data": data, "usage": vllm_usage(result)}, result)


@dataclass(frozen=True, slots=True)
class Invocation:
    """A body of /invocations with `input`. The kind of the model decides how it is read."""

    model: str | None
    raw: bytes
    read: dict[OutputName, tuple[Any, Request | Callable[[ServedModel], Request]]] = field(
        default_factory=dict[OutputName, Any]
    )
    """The body and its request, for each kind of model that was asked."""


def parse_invocation(raw: bytes) -> tuple[Invocation, Callable[[ServedModel], Request]]:
    named = decode(_Named, raw)
    if named.input is msgspec.UNSET:
        raise InvalidRequest(
            "Cannot find suitable handler for request: chats and prompts are not taken; send input, a text as the model takes "
            "it.",
            param="input",
        )
    body = Invocation(named.model, raw)

    def request(model: ServedModel) -> Request:
        output = _kind(model)
        if output not in body.read:
            parse, _ = _INVOKED.get(output, _POOLED)
            body.read[output] = parse(raw)
        request = body.read[output][1]
        return request(model) if callable(request) else request

    return body, request


def render_invocation(body: Invocation, result: Result, model: ServedModel) -> bytes | Response:
    _, render = _INVOKED.get(_kind(model), _POOLED)
    return render(body.read[_kind(model)][0], result, model)


def _kind(model: ServedModel) -> OutputName:
    return next(iter(model.card.outputs))


class _Named(msgspec.Struct, frozen=True):
    model: str | None = None
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_POOLED: Final = (parse_pooling, render_pooling)
_INVOKED: Final[dict[OutputName, tuple[Callable[[bytes], Any], Callable[[Any, Result, ServedModel], bytes | Response]]]] = {
    "dense": (openai.parse_request, openai.render_response),
    "scores": (parse_classify, render_classify),
}
"""Parser and renderer of /invocations by the kind of the model, as vLLM chooses them."""


def parse_tokenize(raw: bytes) -> tuple[VLLMTokenizeRequest, TokenizeRequest]:
    reject_unsupported(raw, text="prompt")
    body = decode(VLLMTokenizeRequest, raw)
    return body, TokenizeRequest([body.prompt], special=body.add_special_tokens is not False)


def render_tokenize(body: VLLMTokenizeRequest, results: Sequence[TokenInfo], model: ServedModel) -> bytes:
    (tokens,) = results
    counts = {"count": tokens.ids_T.size, "max_model_len": model.plan.max_length}
    names = list(tokens.names) if body.return_token_strs else None
    return to_json(counts | {"tokens": tokens.ids_T, "token_strs": names})


def parse_detokenize(raw: bytes) -> tuple[VLLMDetokenizeRequest, DetokenizeRequest]:
    body = decode(VLLMDetokenizeRequest, raw)
    return body, DetokenizeRequest([body.tokens])


def render_detokenize(body: VLLMDetokenizeRequest, results: Sequence[str], model: ServedModel) -> bytes:
    return to_json({"prompt": results[0]})


def render_version(models: Sequence[ServedModel]) -> bytes:
    return to_json({"version": __version__})


def render_tokenizer_info(models: Sequence[ServedModel]) -> bytes:
    if len(models) != 1:
        raise InvalidRequest("several models are served; /info tells of all of them.")
    tokenizer, limit = models[0].card.tokenizer, models[0].plan.max_length
    own = tokenizer.tokenizer_class
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if own == "tokenizer.json" else own,
        "model_max_length": limit,
        "truncation_side": tokenizer.truncate,
        "do_lower_case": tokenizer.do_lower_case or tokenizer.lowercase,
        "strip_accents": tokenizer.strip_accents,
        "tokenize_chinese_chars": tokenizer.tokenize_chinese_chars,
        "add_prefix_space": tokenizer.add_prefix_space,
    }
    roles = {f"{role}_token": token["content"] for role, token in tokenizer.special_tokens.items() if token is not None}
    return to_json(about | roles)


_STATUSES: Final = {415: 400, 429: 503, 507: 500}
"""Statuses that differ from those of other servers."""
_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
"""Types of errors by status; the others have the name of their status in HTTP."""


def status(error: WhimbrelError) -> int:
    return _STATUSES.get(error.status, error.status)


class VLLMErrorDetail(msgspec.Struct):
    """The error itself."""

    message: str
    type: str
    param: Annotated[str | None, Meta(description="The place of the fault in the request.")]
    code: Annotated[int, Meta(description="The HTTP status.")]


class VLLMError(msgspec.Struct):
    """An error of vLLM's own routes."""

    error: VLLMErrorDetail


TERMS: Final = ErrorTerms(options={"truncate": "truncate_prompt_tokens=-1"})


def render_error(error: WhimbrelError, terms: ErrorTerms = TERMS) -> bytes:
    text, param = terms.describe(error)
    code = status(error)
    kind = _TYPES.get(code) or HTTPStatus(code).phrase
    return msgspec.json.encode(VLLMError(VLLMErrorDetail(with_vllm_words(error, text), kind, param, code)))


_VLLM: Final = partial(Route, render=render_error, error_type=VLLMError, terms=TERMS, status=status, placeholders=PLACEHOLDERS)

_POOLING_TERMS: Final = TERMS.extended(
    {"max_tokens": "truncate_prompt_tokens", "activate": "use_activation", "outputs": "task"}
)
_CLASSIFY_TERMS: Final = _POOLING_TERMS.extended({"outputs": "model"})
_TOKENIZE_TERMS: Final = TERMS.extended({"input": lambda _: Location("prompt")})
_DETOKENIZE_TERMS: Final = TERMS.extended({"input": lambda location: Location("tokens", location.part)})

_PAIRS: Final = tuple(
    replace(
        route,
        path=route.path.removeprefix("/v1"),
        render=render_error,
        error_type=VLLMError,
        terms=route.terms.extended({}, TERMS.options),
        status=status,
    )
    for route in rerank.ROUTES
)
_INVOKED_PAIRS: Final = {"/score": ("queries", "data_1", "text_1"), "/rerank": ("documents",)}
"""The fields that tell a body of /invocations from others, by the route that takes it; those of /score are looked at first."""

ROUTES: Final = (
    _VLLM(
        "/pooling", "Vectors or scores of texts or of their tokens (vLLM).",
        parse_pooling, render_pooling, response_type=PoolingResponse,
        example='{"input": ["A whimbrel is a wader."]}', terms=_POOLING_TERMS,
    ),
    _VLLM(
        "/classify", "The scores of a classifier's classes (vLLM).",
        parse_classify, render_classify, response_type=VLLMClassifyResponse,
        made_for="classes", example='{"input": ["What a fine bird."]}', terms=_CLASSIFY_TERMS,
    ),
    *_PAIRS,
    _VLLM(
        "/invocations", "The route that suits the model: /v1/embeddings, /classify or /pooling: a body with `input` (vLLM).",
        parse_invocation, render_invocation, response_type=dict[str, Any],
        example='{"input": ["A whimbrel is a wader."]}', terms=_POOLING_TERMS,
        discriminators=frozenset({"input", "messages", "prompt"}), body_type=EmbeddingsRequest,
    ),
    *(
        replace(
            route, path="/invocations", summary=f"The same as {path} (vLLM).", discriminators=frozenset(names),
            media_types=(JSON,),
        )
        for path, names in _INVOKED_PAIRS.items()
        for route in _PAIRS
        if route.path == path
    ),
    _VLLM(
        "/tokenize", "The token ids of a text (vLLM).", parse_tokenize, render_tokenize, response_type=VLLMTokenizeResponse,
        example='{"prompt": "A whimbrel is a wader.", "return_token_strs": true}', terms=_TOKENIZE_TERMS,
        discriminators=frozenset({"prompt", "messages"}),
    ),
    _VLLM(
        "/detokenize", "The text of token ids (vLLM).",
        parse_detokenize, render_detokenize, response_type=VLLMDetokenizeResponse,
        example='{"tokens": [101, 102]}', terms=_DETOKENIZE_TERMS,
    ),
)  # fmt: skip

GET_ROUTES: Final = (
    GetRoute("/version", "The version of the server (vLLM).", render_version, render_error, VLLMError, VLLMVersionResponse),
    GetRoute(
        "/tokenizer_info", "The settings of the tokenizer, of a server of one model (vLLM).",
        render_tokenizer_info, render_error, VLLMError, VLLMTokenizerInfo,
    ),
)  # fmt: skip
