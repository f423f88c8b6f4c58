"""vLLM's own routes: /pooling, /classify, /score, /rerank, /tokenize, /detokenize. Pure functions over bytes.

Source: vLLM 0.33, entrypoints/pooling and entrypoints/serve/tokenize. As there, texts that are too long are refused unless
cutting is asked for, and fields that are not known are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from whimbrel import __version__
from whimbrel.dialects import rerank
from whimbrel.dialects.common.decode import decode
from whimbrel.dialects.common.ids import created, new_id
from whimbrel.dialects.common.responses import METADATA, OCTETS, header, json_answer, usage
from whimbrel.dialects.common.route import GetRoute, Response, Route, ServedModel
from whimbrel.dialects.common.vllm_fields import (
    UNSUPPORTED_TEXT_FIELDS,
    VLLMTextFields,
    read_normalize,
    reject_unsupported,
    vllm_text_request,
)
from whimbrel.dialects.openai import Usage
from whimbrel.dialects.vllm.errors import render_error, status
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
            description="A vector or the scores of classes, for each text or for each of its tokens; by default what the model "
            "is made for. `token_embed` of a model with dense vectors: what these would be of each token alone."
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
    """What the model gives for one input."""

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
    """What a classifier says of one input."""

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

    version: Annotated[str, Meta(description="Whimbrel's.")]


_OUTPUTS: Final[dict[str | None, OutputName]] = {
    "embed": "dense",
    "classify": "scores",
    "token_embed": "multi_vector",
    "token_classify": "token_scores",
}


_MAX_HEADER: Final = 65_000
"""Python's http.client reads lines of 65,536 bytes."""


def read_pooling(body: bytes) -> tuple[PoolingRequest, Callable[[ServedModel], Request]]:
    """The body as it was sent, and what makes the Request of it. Raises InvalidRequest or TooLarge."""
    reject_unsupported(body, UNSUPPORTED_TEXT_FIELDS)
    sent = decode(PoolingRequest, body)

    def request(model: ServedModel) -> Request:
        output = _OUTPUTS.get(sent.task) or next(iter(model.card.outputs))
        if output == "multi_vector" and output not in model.card.outputs:
            output = "token_dense"
        if output == "sparse":
            raise InvalidRequest("this model is made for sparse vectors, which /v1/embed gives.", param="task")
        by_output = (
            {"normalize": read_normalize(sent)}
            if output in ("dense", "multi_vector", "token_dense")
            else {"normalize": sent.normalize, "activate": sent.use_activation}
        )
        return vllm_text_request(sent, (output,), cuts=False, input_type=sent.input_type, **by_output)

    request_of: Callable[[ServedModel], Request] = request
    return sent, request_of


def write_pooling(sent: PoolingRequest, result: Result, model: ServedModel) -> bytes | Response:
    """The answer, as JSON or as bytes."""
    found = result.outputs
    outputs = found.dense, found.scores, found.multi_vector, found.token_scores, found.token_dense
    output = next(each for each in outputs if each is not None)
    head = _head("pooling", sent, model)
    if sent.encoding_format in ("bytes", "bytes_only"):
        return _write_bytes(sent, output, head | {"usage": usage(result)})
    columns = _as_base64(sent, output) if sent.encoding_format == "base64" else output
    data: list[dict[str, Any]] = [{"index": i, "object": "pooling", "data": columns[i]} for i in range(len(columns))]
    body = head | {"object": "list", "data": data, "usage": usage(result)}
    return json_answer(body, result, as_text=sent.encoding_format == "base64")


def _as_base64(sent: PoolingRequest, output: Float32Array | Ragged) -> Sequence[Any]:
    """The bytes of each text's numbers. Raises InvalidRequest where the type cannot hold them."""
    if not isinstance(output, Ragged):
        return base64_rows(_typed(sent, output))
    rows, places = _typed(sent, output.rows_XD), output.offsets_N1.tolist()
    return [Base64(rows[start:end]) for start, end in pairwise(places)]


def _typed(sent: PoolingRequest, rows_XD: Float32Array) -> EncodedArray:
    return EncodedArray(rows_XD, sent.embed_dtype or "float32", sent.endianness or "native", "the answer")


def _write_bytes(sent: PoolingRequest, output: Float32Array | Ragged, about: dict[str, Any]) -> Response:
    rows = _typed(sent, output.rows_XD if isinstance(output, Ragged) else output)
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
    if sent.encoding_format == "bytes":
        headers[METADATA] = header(about)
        if (length := len(headers[METADATA])) > _MAX_HEADER:
            raise InvalidRequest(
                f"the header metadata would have {length:,} bytes; clients read {_MAX_HEADER:,}. Ask for bytes_only, or send "
                "fewer texts at once.",
                param="encoding_format",
            )
    return Response(rows.chunks(), OCTETS, headers, rows.nbytes)


def read_classify(body: bytes) -> tuple[VLLMClassifyRequest, Request]:
    """The body as it was sent, and the Request it stands for. Raises InvalidRequest or TooLarge."""
    reject_unsupported(body, UNSUPPORTED_TEXT_FIELDS)
    sent = decode(VLLMClassifyRequest, body)
    return sent, vllm_text_request(sent, ("scores",), cuts=False, activate=sent.use_activation, normalize=sent.normalize)


def write_classify(sent: VLLMClassifyRequest, result: Result, model: ServedModel) -> bytes | Response:
    """The answer, in the order of the inputs."""
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
    head = _head("classify", sent, model)
    return json_answer(head | {"object": "list", "data": data, "usage": usage(result)}, result)


def _head(prefix: str, sent: VLLMTextFields, model: ServedModel) -> dict[str, Any]:
    return {"id": new_id(prefix, sent.request_id), "created": created(), "model": model.plan.served_name}


def write_version(models: Sequence[ServedModel]) -> bytes:
    """The answer of GET /version."""
    return to_json({"version": __version__})


_NAMES: Final = {"max_tokens": "truncate_prompt_tokens", "activate": "use_activation", "outputs": "task"}
"""Fields of a Request that have another name here."""


def write_error(error: WhimbrelError) -> bytes:
    """An error over a body of /pooling."""
    return render_error(error.renamed(_NAMES))


def write_classify_error(error: WhimbrelError) -> bytes:
    """An error over a body of /classify, which does not choose an output."""
    return render_error(error.renamed({**_NAMES, "outputs": "model"}))


_SHARED_WITH_V1: Final = {"/v1/rerank": rerank.named_of_rerank, "/v1/score": rerank.named_of_score}
"""Routes that are also served without /v1, and the words of their errors."""


def _without_v1(route: Route, name: Callable[[WhimbrelError], WhimbrelError]) -> Route:
    """A route of /v1 under vLLM's other path, with vLLM's errors."""
    path = route.path.removeprefix("/v1")

    def write(error: WhimbrelError) -> bytes:
        return render_error(name(error))

    return replace(route, path=path, write_error=write, status=status)


ROUTES: Final = (
    Route(
        path="/pooling",
        summary="What a model gives for texts or their tokens (vLLM).",
        parse_request=read_pooling,
        render_response=write_pooling,
        render_error=write_error,
        request_type=PoolingRequest,
        response_type=PoolingResponse,
        example='{"input": ["A whimbrel is a wader."]}',
        status=status,
    ),
    Route(
        path="/classify",
        summary="The scores of a classifier's classes (vLLM).",
        parse_request=read_classify,
        render_response=write_classify,
        render_error=write_classify_error,
        request_type=VLLMClassifyRequest,
        response_type=VLLMClassifyResponse,
        example='{"input": ["What a fine bird."]}',
        status=status,
    ),
    *(_without_v1(route, _SHARED_WITH_V1[route.path]) for route in rerank.ROUTES if route.path in _SHARED_WITH_V1),
)

GET_ROUTES: Final = (
    GetRoute("/version", "The version of the server (vLLM).", write_version, render_error, VLLMVersionResponse),
)
