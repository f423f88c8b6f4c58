"""vLLM's own routes: /pooling, /classify, /score, /rerank, /tokenize, /detokenize. Pure functions over bytes.

Source: vLLM 0.33, entrypoints/pooling and entrypoints/serve/tokenize. As there, texts that are too long are refused unless
cutting is asked for, and fields that are not known are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from whimbrel import __version__
from whimbrel.dialects import rerank
from whimbrel.dialects.common.decode import decode
from whimbrel.dialects.common.errors import ErrorTerms
from whimbrel.dialects.common.fields import (
    UNSUPPORTED_TEXT_FIELDS,
    VLLMTextFields,
    parse_normalize,
    reject_unsupported,
    vllm_text_request,
)
from whimbrel.dialects.common.responses import METADATA, OCTETS, created, header, json_answer, new_id, usage
from whimbrel.dialects.common.route import Dialect, GetRoute, Response, Route, ServedModel
from whimbrel.dialects.openai import Usage
from whimbrel.errors import InvalidRequest, WhimbrelError
from whimbrel.types.arrays import Float32Array
from whimbrel.types.request import InputType, OutputName, Request
from whimbrel.types.result import Ragged, Result
from whimbrel.wire import Base64, EncodedArray, base64_rows, to_json

Input = Annotated[
    str | list[str | int | list[int]],
    Meta(
        description="A text, a list of texts, a list of token ids, or a list of such lists; at most 2,048 inputs and "
        "524,288 ids. Token ids are taken as they are: no special tokens are put around them."
    ),
]


class PoolingRequest(VLLMTextFields, frozen=True, kw_only=True):
    """Body of POST /pooling."""

    input: Input
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
    input_type: Annotated[
        InputType | None,
        Meta(description="Whether the texts are queries or documents, for models that treat them differently."),
    ] = None


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
    usage: Usage
    object: Literal["list"] = "list"


class VLLMClassifyRequest(VLLMTextFields, frozen=True, kw_only=True):
    """Body of POST /classify."""

    input: Input


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
    usage: Usage
    object: Literal["list"] = "list"


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
    """Return the body, and the function from a model to its Request. Raises InvalidRequest or TooLarge."""
    reject_unsupported(raw, UNSUPPORTED_TEXT_FIELDS)
    body = decode(PoolingRequest, raw)

    def request(model: ServedModel) -> Request:
        output = _OUTPUTS.get(body.task) or next(iter(model.card.outputs))
        if output == "multi_vector" and output not in model.card.outputs:
            output = "token_dense"
        if output == "sparse":
            raise InvalidRequest("this model is made for sparse vectors, which /v1/embed gives.", param="task")
        by_output = (
            {"normalize": parse_normalize(body)}
            if output in ("dense", "multi_vector", "token_dense")
            else {"normalize": body.normalize, "activate": body.use_activation}
        )
        return vllm_text_request(body, (output,), cuts=False, input_type=body.input_type, **by_output)

    request_of: Callable[[ServedModel], Request] = request
    return body, request_of


def render_pooling(body: PoolingRequest, result: Result, model: ServedModel) -> bytes | Response:
    """Return the answer, as JSON or as bytes."""
    results = result.outputs
    outputs = results.dense, results.scores, results.multi_vector, results.token_scores, results.token_dense
    output = next(each for each in outputs if each is not None)
    head = _head("pooling", body, model)
    if body.encoding_format in ("bytes", "bytes_only"):
        return _write_bytes(body, output, head | {"usage": usage(result)})
    columns = _as_base64(body, output) if body.encoding_format == "base64" else output
    data: list[dict[str, Any]] = [{"index": i, "object": "pooling", "data": columns[i]} for i in range(len(columns))]
    content = head | {"object": "list", "data": data, "usage": usage(result)}
    return json_answer(content, result, as_text=body.encoding_format == "base64")


def _as_base64(body: PoolingRequest, output: Float32Array | Ragged) -> Sequence[Any]:
    """Return the bytes of each text's numbers. Raises InvalidRequest if the type cannot hold them."""
    if not isinstance(output, Ragged):
        return base64_rows(_typed(body, output))
    rows, places = _typed(body, output.rows_XD), output.offsets_N1.tolist()
    return [Base64(rows[start:end]) for start, end in pairwise(places)]


def _typed(body: PoolingRequest, rows_XD: Float32Array) -> EncodedArray:
    return EncodedArray(rows_XD, body.embed_dtype or "float32", body.endianness or "native", "the answer")


def _write_bytes(body: PoolingRequest, output: Float32Array | Ragged, about: dict[str, Any]) -> Response:
    rows = _typed(body, output.rows_XD if isinstance(output, Ragged) else output)
    width = rows.shape[1]
    places: list[int] = output.offsets_N1.tolist() if isinstance(output, Ragged) else list(range(len(output) + 1))
    size = width * rows.storage_dtype.itemsize
    numbers = {"embed_dtype": rows.dtype, "endianness": "big" if rows.is_big else "little"}
    about["data"] = [
        {"index": index, **numbers, "start": start * size, "end": end * size}
        | {"shape": [end - start, width] if isinstance(output, Ragged) else [width]}
        for index, (start, end) in enumerate(pairwise(places))
    ]
    headers: dict[str, str] = {}
    if body.encoding_format == "bytes":
        headers[METADATA] = header(about)
        if (length := len(headers[METADATA])) > _MAX_HEADER:
            raise InvalidRequest(
                f"the header metadata would have {length:,} bytes; clients read {_MAX_HEADER:,}. Ask for bytes_only, or send "
                "fewer texts at once.",
                param="encoding_format",
            )
    return Response(rows.chunks(), OCTETS, headers, rows.nbytes)


def parse_classify(raw: bytes) -> tuple[VLLMClassifyRequest, Request]:
    """Return the body and the Request that it stands for. Raises InvalidRequest or TooLarge."""
    reject_unsupported(raw, UNSUPPORTED_TEXT_FIELDS)
    body = decode(VLLMClassifyRequest, raw)
    return body, vllm_text_request(body, ("scores",), cuts=False, activate=body.use_activation, normalize=body.normalize)


def render_classify(body: VLLMClassifyRequest, result: Result, model: ServedModel) -> bytes | Response:
    """Return the answer, in the order of the inputs."""
    scores_NC, labels = result.outputs.scores, model.card.labels
    assert scores_NC is not None
    data: list[dict[str, Any]] = [
        {
            "index": index,
            "label": labels[best] if labels else None,
            "probs": scores_NC[index],
            "num_classes": scores_NC.shape[1],
        }
        for index, best in enumerate(scores_NC.argmax(axis=1).tolist())
    ]
    head = _head("classify", body, model)
    return json_answer(head | {"object": "list", "data": data, "usage": usage(result)}, result)


def _head(prefix: str, body: VLLMTextFields, model: ServedModel) -> dict[str, Any]:
    return {"id": new_id(prefix, body.request_id), "created": created(), "model": model.plan.served_name}


def render_version(models: Sequence[ServedModel]) -> bytes:
    """Return the answer of GET /version."""
    return to_json({"version": __version__})


class ErrorDetail(msgspec.Struct):
    """The cause of an error; `param` is the path of the fault, `code` the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail


_STATUSES: Final = {415: 400, 429: 503, 507: 500}
"""Statuses that differ from those of other servers."""
_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
"""Types of errors by status; the others have the name of their status in HTTP."""


def status(error: WhimbrelError) -> int:
    """Return the HTTP status of an error."""
    return _STATUSES.get(error.status, error.status)


TERMS: Final = ErrorTerms(options={"truncate": "truncate_prompt_tokens=-1"})


def render_error(error: WhimbrelError, terms: ErrorTerms = TERMS) -> bytes:
    """Return an error as vLLM writes it."""
    text, param = terms.describe(error)
    code = status(error)
    kind = _TYPES.get(code) or HTTPStatus(code).phrase
    return msgspec.json.encode(ErrorResponse(ErrorDetail(text, kind, param, code)))


VLLM: Final = Dialect(render_error, TERMS, status)

_POOLING_TERMS: Final = TERMS.extended(
    {"max_tokens": "truncate_prompt_tokens", "activate": "use_activation", "outputs": "task"}
)
_CLASSIFY_TERMS: Final = _POOLING_TERMS.extended({"outputs": "model"})

_TERMS_OF_V1: Final = {"/v1/rerank": rerank.RERANK_TERMS, "/v1/score": rerank.SCORE_TERMS}
"""Routes that are also served without /v1, and the terms of their errors."""


def _without_v1(route: Route, terms: ErrorTerms) -> Route:
    """Return a route of /v1 under vLLM's other path, with vLLM's errors."""
    render = partial(render_error, terms=terms.extended({}, TERMS.options))
    return replace(route, path=route.path.removeprefix("/v1"), render_error=render, status=status)


ROUTES: Final = (
    VLLM.route(
        "/pooling", "Vectors or scores of texts or of their tokens (vLLM).",
        parse_pooling, render_pooling, response_type=PoolingResponse,
        example='{"input": ["A whimbrel is a wader."]}', terms=_POOLING_TERMS,
    ),
    VLLM.route(
        "/classify", "The scores of a classifier's classes (vLLM).",
        parse_classify, render_classify, response_type=VLLMClassifyResponse,
        example='{"input": ["What a fine bird."]}', terms=_CLASSIFY_TERMS,
    ),
    *(_without_v1(route, _TERMS_OF_V1[route.path]) for route in rerank.ROUTES),
)  # fmt: skip

GET_ROUTES: Final = (
    GetRoute("/version", "The version of the server (vLLM).", render_version, render_error, VLLMVersionResponse),
)
