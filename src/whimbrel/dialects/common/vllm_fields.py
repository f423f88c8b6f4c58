"""Fields that vLLM adds to bodies of other APIs and its own routes have too.

A field that would change numbers and that is not honoured is refused by its name; other unknown fields are ignored.
Source: vLLM 0.33, entrypoints/pooling/base/protocol.py.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from whimbrel.dialects.common import texts
from whimbrel.dialects.common.bodies import decode, is_packed, schema
from whimbrel.dialects.common.responses import ServedModel, created, new_id
from whimbrel.dialects.common.schemas import ONE_SIDE, SPLIT_HAS_NO_SIDE, Schema
from whimbrel.dialects.common.texts import RequestId, TextFields, TruncationSide, parse_truncation
from whimbrel.errors import InvalidRequest
from whimbrel.types.request import OutputName, Request
from whimbrel.wire.dtypes import ByteOrder, FloatType


class VLLMTextFields(TextFields, frozen=True, kw_only=True):
    """Fields of vLLM's routes that encode texts."""

    RULES: ClassVar[tuple[Schema, ...]] = (*TextFields.RULES, *SPLIT_HAS_NO_SIDE, *ONE_SIDE)

    embed_dtype: Annotated[FloatType | None, schema("The type of numbers in binary formats. Default: `float32` (vLLM).")] = None
    endianness: Annotated[
        ByteOrder | None, schema("The byte order in binary formats. Default: `native`, the machine's own (vLLM).")
    ] = None
    use_activation: Annotated[
        bool | None, schema("For vectors the same as `normalize`; for scores, whether the activation is applied (vLLM).")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None, schema("Cut each text to N tokens; -1 cuts to the model's maximum.")
    ] = None
    truncation_side: TruncationSide = None
    add_special_tokens: Annotated[
        bool | None, schema("Put special tokens around texts. Default: true. Token ids are taken as they are (vLLM).")
    ] = None
    request_id: RequestId = None
    user: Annotated[str | None, schema("Accepted and ignored.")] = None


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


def parse_normalize(body: VLLMTextFields) -> bool | None:
    """Return `normalize`, by either of its names. Raises InvalidRequest if they differ."""
    if body.normalize is not None and body.use_activation not in (None, body.normalize):
        raise InvalidRequest("contradicts normalize, which is the same for vectors; give one of them.", param="use_activation")
    return body.use_activation if body.normalize is None else body.normalize


def text_request(body: VLLMTextFields, outputs: tuple[OutputName, ...], *, cuts: bool, **more: Any) -> Request:
    """Return the Request of a body of texts, by default with truncation if `cuts`. Raises InvalidRequest and TooLarge."""
    side, max_tokens = body.truncation_side, body.truncate_prompt_tokens
    truncate, limit = parse_truncation(body.truncate, side, max_tokens, default=cuts)
    more["add_special_tokens"] = body.add_special_tokens is not False
    if max_tokens == -1 and body.split_long is None:
        more["split_long"] = False
    return texts.text_request(body, outputs, truncate=truncate, max_tokens=limit, **more)


def response_head(prefix: str, body: VLLMTextFields, model: ServedModel) -> dict[str, Any]:
    """Return the first fields of answers in vLLM's order."""
    return {"id": new_id(prefix, body.request_id), "created": created(), "model": model.plan.served_name}
