"""vLLM's /pooling, vectors or scores of texts or of their tokens, and /classify, the scores of classes. Pure functions.

Texts that exceed the limit are refused by default, but late-interaction models cut them as their libraries do; there, texts
are documents by default. Unknown fields are ignored. Source: vLLM 0.33, entrypoints/pooling.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from whimbrel.dialects.common import responses, vllm_fields
from whimbrel.dialects.common.answers import VLLMUsage, answer_type, described, usage, vllm_usage, word
from whimbrel.dialects.common.bodies import decode, schema
from whimbrel.dialects.common.responses import Response, ServedModel, json_answer
from whimbrel.dialects.common.route import Parsed, ready
from whimbrel.dialects.common.texts import TextUse, TokenInputs, side_of
from whimbrel.dialects.common.vllm_fields import UNSUPPORTED_TEXT_FIELDS, VLLMTextFields
from whimbrel.dialects.vllm.status import TEXT_TERMS, VLLM
from whimbrel.errors import InvalidRequest
from whimbrel.types.options import require
from whimbrel.types.request import OutputName, Request
from whimbrel.types.result import Ragged, Result
from whimbrel.wire.dtypes import EncodedArray
from whimbrel.wire.json_base64 import Base64, base64_rows


class PoolingRequest(VLLMTextFields, frozen=True, kw_only=True):
    input: TokenInputs
    task: Annotated[
        Literal["embed", "classify", "token_embed", "token_classify"] | None,
        schema(
            "A vector or the scores of classes, for each text or for each of its tokens. Default: the task that the model is "
            "made for. For a model with dense vectors, `token_embed` gives each token the vector that pooling it alone would "
            "give."
        ),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64", "bytes", "bytes_only"] | None,
        schema(
            "`float` (default): JSON numbers. `base64`: their bytes. `bytes`: the bytes of all texts one after another as the "
            "answer, and JSON in its header `metadata` says the rest; `bytes_only`: without it."
        ),
    ] = None
    input_type: TextUse = None


Pooled: Final = answer_type(
    "Pooled", "The vector, token vectors or scores of one input.",
    index=int, data=described(list[float | list[float]] | str, "Numbers, a list of them for each token, or base64."),
    object=word("pooling"),
)  # fmt: skip
PoolingResponse: Final = answer_type(
    "PoolingResponse", "Answer of POST /pooling.",
    id=str, created=int, model=str, data=list[Pooled], usage=VLLMUsage, object=word("list"),
)  # fmt: skip


_OUTPUTS: Final[dict[str | None, OutputName]] = {
    "embed": "dense",
    "classify": "scores",
    "token_embed": "multi_vector",
    "token_classify": "token_scores",
}
_MAX_HEADER: Final = 65_000
"""The limit of bytes in a header: Python's http.client reads lines of 65,536 bytes."""


def parse_pooling(raw: bytes) -> Parsed[PoolingRequest]:
    vllm_fields.reject_unsupported(raw, UNSUPPORTED_TEXT_FIELDS)
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
            message = f"Unsupported task: {body.task!r}. Supported tasks: {', '.join(given) or 'none'}."
            raise InvalidRequest(message, param="outputs")
        if output == "sparse":
            raise InvalidRequest("this model is made for sparse vectors, which /v1/embed gives.", param="task")
        options: dict[str, Any] = {"normalize": body.normalize, "activate": body.use_activation}
        if output in ("dense", "multi_vector", "token_dense"):
            options = {"normalize": vllm_fields.parse_normalize(body)}
        cuts, side = bool(model.card.text_formats), side_of(model.card, body.input_type)
        return vllm_fields.text_request(body, (output,), cuts=cuts, input_type=side, **options)

    return Parsed(body, request)


def _list_request(body: PoolingRequest) -> Request:
    """Return the request for the vectors of a list: documents, and last their query, in vLLM's words where it is refused."""
    request = vllm_fields.text_request(body, ("multi_vector",), cuts=True, normalize=vllm_fields.parse_normalize(body))
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
    head, as_text = vllm_fields.response_head("pooling", body, model), body.encoding_format == "base64"
    weights = results.token_scores is not None and "sparse" in model.card.outputs  # a number for each token
    columns: Any = [output[i].reshape(-1) for i in range(len(output))] if weights else output
    if body.encoding_format not in (None, "float"):
        array, offsets_N1 = (output.rows_XD, output.offsets_N1.tolist()) if isinstance(output, Ragged) else (output, None)
        array = array.reshape(-1) if weights else array
        rows = EncodedArray(array, body.embed_dtype or "float32", body.endianness or "native", "the answer")
        if not as_text:
            blocks = {"usage": usage(result), "data": responses.row_blocks(rows, offsets_N1)}
            return _bytes_response(rows, None if body.encoding_format == "bytes_only" else responses.header(head | blocks))
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
    return Response(rows.chunks(), responses.OCTETS, {} if metadata is None else {responses.METADATA: metadata}, rows.nbytes)


POOLING: Final = VLLM(
    "/pooling", "Vectors or scores of texts or of their tokens (vLLM).",
    parse_pooling, render_pooling, response_type=PoolingResponse,
    example='{"input": ["A whimbrel is a wader."]}', terms=TEXT_TERMS,
)  # fmt: skip


class VLLMClassifyRequest(VLLMTextFields, frozen=True, kw_only=True):
    input: TokenInputs


Classified: Final = answer_type(
    "Classified", "The classes of one input.",
    index=int, label=described(str | None, "The class with the highest score; null if the classes have no names."),
    probs=list[float], num_classes=int,
)  # fmt: skip
VLLMClassifyResponse: Final = answer_type(
    "VLLMClassifyResponse", "Answer of POST /classify.",
    id=str, created=int, model=str, data=list[Classified], usage=VLLMUsage, object=word("list"),
)  # fmt: skip


def parse_classify(raw: bytes) -> Parsed[VLLMClassifyRequest]:
    vllm_fields.reject_unsupported(raw, UNSUPPORTED_TEXT_FIELDS)
    body = decode(VLLMClassifyRequest, raw)
    options = {"activate": body.use_activation, "normalize": body.normalize}
    return ready(body, vllm_fields.text_request(body, ("scores",), cuts=False, **options))


def render_classify(body: VLLMClassifyRequest, result: Result, model: ServedModel) -> bytes | Response:
    scores_NC, labels = require(result.outputs.scores), model.card.labels
    data: list[dict[str, Any]] = [
        {"index": i, "label": labels[best] if labels else None, "probs": scores_NC[i], "num_classes": scores_NC.shape[1]}
        for i, best in enumerate(result.outputs.order.argmax(axis=1).tolist())
    ]
    head = vllm_fields.response_head("classify", body, model)
    return json_answer(head | {"object": "list", "data": data, "usage": vllm_usage(result)}, result)


CLASSIFY: Final = VLLM(
    "/classify", "The scores of a classifier's classes (vLLM).",
    parse_classify, render_classify, response_type=VLLMClassifyResponse,
    made_for="classes", example='{"input": ["What a fine bird."]}', terms=TEXT_TERMS.extended({"outputs": "model"}),
)  # fmt: skip
