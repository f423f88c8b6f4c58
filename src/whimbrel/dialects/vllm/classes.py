"""vLLM's /classify: the scores of a classifier's classes. Pure functions over bytes."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from whimbrel.dialects.common.bodies import decode, schema
from whimbrel.dialects.common.responses import Response, ServedModel, VLLMUsage, json_answer, vllm_usage
from whimbrel.dialects.common.route import Parsed, ready
from whimbrel.dialects.common.texts import TokenInputs
from whimbrel.dialects.common.vllm_fields import (
    UNSUPPORTED_TEXT_FIELDS,
    VLLMTextFields,
    reject_unsupported,
    response_head,
    vllm_text_request,
)
from whimbrel.dialects.vllm.status import TEXT_TERMS, VLLM
from whimbrel.types.result import Result


class VLLMClassifyRequest(VLLMTextFields, frozen=True, kw_only=True):
    """Body of POST /classify."""

    input: TokenInputs


class Classified(msgspec.Struct):
    """The classes of one input."""

    index: int
    label: Annotated[str | None, schema("The class with the highest score; null if the classes have no names.")]
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


def parse_classify(raw: bytes) -> Parsed[VLLMClassifyRequest]:
    reject_unsupported(raw, UNSUPPORTED_TEXT_FIELDS)
    body = decode(VLLMClassifyRequest, raw)
    return ready(body, vllm_text_request(body, ("scores",), cuts=False, activate=body.use_activation, normalize=body.normalize))


def render_classify(body: VLLMClassifyRequest, result: Result, model: ServedModel) -> bytes | Response:
    scores_NC, labels = result.outputs.scores, model.card.labels
    assert scores_NC is not None
    data: list[dict[str, Any]] = [
        {"index": i, "label": labels[best] if labels else None, "probs": scores_NC[i], "num_classes": scores_NC.shape[1]}
        for i, best in enumerate(result.outputs.order.argmax(axis=1).tolist())
    ]
    head = response_head("classify", body, model)
    return json_answer(head | {"object": "list", "data": data, "usage": vllm_usage(result)}, result)


CLASSIFY: Final = VLLM(
    "/classify", "The scores of a classifier's classes (vLLM).",
    parse_classify, render_classify, response_type=VLLMClassifyResponse,
    made_for="classes", example='{"input": ["What a fine bird."]}', terms=TEXT_TERMS.extended({"outputs": "model"}),
)  # fmt: skip
