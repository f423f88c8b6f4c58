"""The fields that vLLM's routes add to those of others, and what becomes of each. Pure functions over bytes.

A field that would change numbers and that is not honoured is refused by its name. Source: vLLM 0.33,
entrypoints/pooling/base/protocol.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.decode import decode, is_packed
from whimbrel.dialects.common.fields import TextFields, text_request
from whimbrel.errors import InvalidRequest
from whimbrel.types.options import read_truncate
from whimbrel.types.request import OutputName, Request, Truncate
from whimbrel.wire import ByteOrder, FloatType


class VLLMTextFields(TextFields, frozen=True, kw_only=True):
    """What its routes that encode texts take."""

    embed_dtype: Annotated[
        FloatType | None, Meta(description="Of the binary formats: the type of numbers; `float32` by default (vLLM).")
    ] = None
    endianness: Annotated[
        ByteOrder | None,
        Meta(description="Of the binary formats: the order of bytes; `native` (default) is the machine's (vLLM)."),
    ] = None
    use_activation: Annotated[
        bool | None,
        Meta(description="Of vectors the same as `normalize`, of scores whether the activation is applied (vLLM)."),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Cut each text to so many tokens; -1: to the model's maximum."),
    ] = None
    truncation_side: Annotated[
        Literal["right", "left"] | None, Meta(description="Which end of a text is cut, if it is (vLLM).")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="`false` is for token ids, which are taken as they are; texts have them (vLLM).")
    ] = None
    request_id: Annotated[str | None, Meta(description="What the answer's id ends with (vLLM).")] = None
    user: Annotated[str | None, Meta(description="Accepted and ignored.")] = None


_ABSENT: Final = msgspec.Raw()


class _Unsupported(msgspec.Struct, frozen=True):
    """Fields that are looked at only to be refused, and those that are there in place of `messages`."""

    input: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    padding: msgspec.Raw = _ABSENT
    late_chunking_params: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT
    return_embeddings: msgspec.Raw = _ABSENT


_NO_TEMPLATES: Final = "a request brings no template here; that of the model is used, and `instruction` is put into it."
_REFUSED: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "padding": ((None, "do_not_pad"), "texts are not padded, which would change their numbers."),
    "late_chunking_params": ((None,), "is not known here; late_chunking takes the parts of a text as inputs."),
    "chat_template": ((None,), _NO_TEMPLATES),
    "chat_template_kwargs": ((None, {}), _NO_TEMPLATES),
    "return_embeddings": ((None, False), "scores are given here; /v1/embed gives the vectors."),
}
"""Values that change nothing, and why others are refused."""
_LONGEST: Final = 100
"""Bytes of a value that is looked at: none that is accepted has more."""
UNSUPPORTED_TEXT_FIELDS: Final = ("padding", "late_chunking_params")
UNSUPPORTED_PAIR_FIELDS: Final = (
    "padding",
    "chat_template",
    "chat_template_kwargs",
    "return_embeddings",
)


def reject_unsupported(body: bytes, names: Sequence[str] = (), *, text: Literal["input", "prompt"] | None = "input") -> None:
    """Refuse those of the named fields that would change numbers and are not honoured, and chats in place of the field `text`.
    Raises InvalidRequest."""
    if all(body.find(name.encode()) < 0 for name in (*names, "messages")):  # `in` costs five times as much
        return
    packed = is_packed(body)
    found = decode(_Unsupported, body, packed=packed)
    if text is not None and found.messages is not _ABSENT and getattr(found, text) is _ABSENT:
        raise InvalidRequest(f"chats are not taken; send {text}, a text as the model takes it.", param="messages")
    for name in names:
        (accepted, why), given = _REFUSED[name], getattr(found, name)
        is_short = given is not _ABSENT and len(given) <= _LONGEST
        if given is not _ABSENT and not (is_short and decode(object, bytes(given), packed=packed) in accepted):
            raise InvalidRequest(why, param=name)


class TruncationFields(Protocol):
    """What fields of truncation a body has."""

    @property
    def truncate(self) -> bool | Literal["right", "left", "never"] | None: ...
    @property
    def truncate_prompt_tokens(self) -> int | None: ...
    @property
    def truncation_side(self) -> Literal["right", "left"] | None: ...


def parse_truncation(body: TruncationFields, *, usual: bool) -> tuple[Truncate | None, int | None]:
    """(truncate, max_tokens) of a Request. `usual`: whether texts are cut where it does not say. Raises InvalidRequest."""
    limit, side = body.truncate_prompt_tokens, body.truncation_side
    cuts = body.truncate if body.truncate is not None else usual or limit is not None
    truncate = read_truncate(cuts)
    if truncate in ("right", "left") and side not in (None, truncate):
        raise InvalidRequest(f"is {side!r}, and truncate is {truncate!r}; give one of them.", param="truncation_side")
    return truncate or side, None if limit == -1 else limit


def parse_normalize(body: VLLMTextFields) -> bool | None:
    """Whether vectors are normalised, by either name. Raises InvalidRequest."""
    if body.normalize is not None and body.use_activation not in (None, body.normalize):
        raise InvalidRequest("contradicts normalize, which is the same for vectors; give one of them.", param="use_activation")
    return body.use_activation if body.normalize is None else body.normalize


def vllm_text_request(body: VLLMTextFields, outputs: tuple[OutputName, ...], *, cuts: bool, **more: Any) -> Request:
    """The Request of a body of texts. `cuts`: whether they are cut where it does not say. Raises InvalidRequest, TooLarge."""
    truncate, limit = parse_truncation(body, usual=cuts)
    request = text_request(body, outputs, truncate=truncate, max_tokens=limit, **more)
    if body.add_special_tokens is False and isinstance(request.texts[0], str):
        raise InvalidRequest("a text gets its special tokens; send token ids to do without.", param="add_special_tokens")
    return request
