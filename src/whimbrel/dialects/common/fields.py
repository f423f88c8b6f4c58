"""Fields that the bodies of several dialects share, and the Request that they stand for: texts, options, and vLLM's fields.

A field of vLLM that would change numbers and that is not honoured is refused by its name. Source: vLLM 0.33,
entrypoints/pooling/base/protocol.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, cast

import msgspec
import numpy as np
from msgspec import Meta

from whimbrel.dialects.common.decode import decode, is_packed
from whimbrel.errors import InvalidRequest, Location, TooLarge
from whimbrel.types.request import InputType, OutputName, Request, Truncate, read_truncate
from whimbrel.wire import ByteOrder, FloatType

if TYPE_CHECKING:
    from whimbrel.types.card import Card

MAX_INPUTS: Final = 2048


class TextObject(msgspec.Struct, frozen=True):
    """A text as an object (Jina)."""

    text: str | None = None


def parse_texts(raw: str | Sequence[str | int | Sequence[int | str] | TextObject]) -> Any:
    """Return texts, pairs of texts, or arrays of token ids. Raises InvalidRequest if kinds are mixed; texts may be objects."""
    if isinstance(raw, str):
        return [raw]
    if not raw:
        raise InvalidRequest("is an empty list; give at least one text.", param="input")
    kinds = set(map(type, raw))
    if TextObject in kinds:
        raw = [_text(each, i) if isinstance(each, TextObject) else each for i, each in enumerate(raw)]
        kinds = set(map(type, raw))
    if len(kinds) > 1:
        first = type(raw[0])
        index = next(i for i, item in enumerate(raw) if type(item) is not first)
        raise InvalidRequest("texts, token ids and lists of them cannot be mixed in one list.", item=index)
    if kinds == {int}:
        return [_ids(cast(list[int], raw), None)]
    if len(raw) > MAX_INPUTS:
        raise TooLarge(f"{len(raw):,} inputs; the limit is {MAX_INPUTS:,}. Split the request.", param="input")
    if kinds == {str}:
        return raw
    rows = cast(list[list[int | str]], raw)
    if any(str in map(type, row) for row in rows):
        return [_pair(row, i) for i, row in enumerate(rows)]
    return [_ids(cast(list[int], ids), i) for i, ids in enumerate(rows)]


def _text(value: TextObject, item: int) -> str:
    if value.text is None:
        raise InvalidRequest("is an object without a text; this server takes texts, no images.", item=item)
    return value.text


def _pair(row: list[int | str], item: int) -> tuple[str, str]:
    if len(row) != 2 or not all(isinstance(text, str) for text in row):
        raise InvalidRequest("a list with a text in it must be a pair of two texts, as all of them must.", item=item)
    return cast(tuple[str, str], tuple(row))


def _ids(ids: list[int], item: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        return np.array(ids, np.int64)
    except OverflowError:
        index = next(i for i, value in enumerate(ids) if not -(2**63) <= value < 2**63)
        message = f"token id {ids[index]} is no 64-bit integer."
        location = Location("input", index) if item is None else Location("input", item, index)
        raise InvalidRequest(message, location=location) from None


class TextFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of bodies that encode texts; each dialect declares the forms of `input` that it takes."""

    input: Any
    model: Annotated[str | None, Meta(description="The served model's name, as /v1/models lists it.")] = None
    dimensions: Annotated[
        int | None, Meta(description="Keep the first N columns of each vector; for models trained with Matryoshka loss.")
    ] = None
    prompt_name: Annotated[
        str | None, Meta(description="The name of one of the model's prompts, which is put before each text.")
    ] = None
    prompt: Annotated[str | None, Meta(description="Text put before each text, instead of a named prompt.")] = None
    normalize: Annotated[
        bool | None, Meta(description="Divide vectors by their Euclidean norm. Default: as the model does.")
    ] = None
    truncate: Annotated[
        bool | Literal["right", "left", "never"] | None,
        Meta(
            description="The end at which a text that is too long is cut. `false` or `never` makes it an error. Default: as "
            "the model's tokenizer does."
        ),
    ] = None
    late_chunking: Annotated[
        bool | None,
        Meta(
            description="Treat the inputs as consecutive parts of one document, as in Jina's API. They are joined and run in "
            "one pass, and each vector is the mean over the tokens of its part. Only for models with mean "
            "pooling."
        ),
    ] = None
    split_long: Annotated[
        bool | None,
        Meta(
            description="Run a text that is too long in parts, in place of cutting it. Its vector is the mean of theirs, "
            "weighted by their tokens."
        ),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None,
        Meta(description="Requests with lower numbers run first. Default: 0 (vLLM)."),
    ] = None


def text_request(body: TextFields, outputs: tuple[OutputName, ...], **more: Any) -> Request:
    """Return the Request of a body; `more` has the fields that its dialect reads in its own way.

    Raises InvalidRequest and TooLarge.
    """
    default: dict[str, Any] = {"normalize": body.normalize, "truncate": read_truncate(body.truncate)}
    return Request(
        parse_texts(body.input),
        outputs,
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        late_chunking=bool(body.late_chunking),
        split_long=bool(body.split_long),
        priority=body.priority or 0,
        **(default | more),
    )


def parse_input_type(value: str | None) -> InputType | None:
    """Return the input type; a passage is a document."""
    return "query" if value == "query" else None if value is None else "document"


def prompt_for_task(card: Card, word: str | None, input_type: InputType | None) -> dict[str, Any]:
    """Return the fields of a Request for an API's `word` for the use of texts: the input type, and the model's prompt of that
    name, if it has one; case is ignored."""
    prompts = {} if word is None else {name.casefold(): name for name in card.tower(card.tower_for(input_type)).prompts}
    return {"prompt_name": prompts.get((word or "").casefold()), "input_type": input_type}


class VLLMTextFields(TextFields, frozen=True, kw_only=True):
    """Fields of vLLM's routes that encode texts."""

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
    truncation_side: Annotated[Literal["right", "left"] | None, Meta(description="The end at which texts are cut (vLLM).")] = (
        None
    )
    add_special_tokens: Annotated[
        bool | None,
        Meta(
            description="Accepted as `false` only with token ids, which are taken as they are; texts always get special "
            "tokens (vLLM)."
        ),
    ] = None
    request_id: Annotated[str | None, Meta(description="The end of the answer's `id` (vLLM).")] = None
    user: Annotated[str | None, Meta(description="Accepted and ignored.")] = None


_ABSENT: Final = msgspec.Raw()


class _Unsupported(msgspec.Struct, frozen=True):
    """Fields that are read only to be refused, and the fields that stand in place of `messages`."""

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
"""Values that change nothing, and the reason why others are refused."""
_LONGEST: Final = 100
"""The limit of bytes of a value that is decoded; all accepted values are shorter."""
UNSUPPORTED_TEXT_FIELDS: Final = ("padding", "late_chunking_params")
UNSUPPORTED_PAIR_FIELDS: Final = (
    "padding",
    "chat_template",
    "chat_template_kwargs",
    "return_embeddings",
)


def reject_unsupported(body: bytes, names: Sequence[str] = (), *, text: Literal["input", "prompt"] | None = "input") -> None:
    """Raise InvalidRequest if a field in `names` would change numbers, or if there are chats in place of the field `text`."""
    if all(body.find(name.encode()) < 0 for name in (*names, "messages")):  # `in` costs five times as much
        return
    packed = is_packed(body)
    unsupported = decode(_Unsupported, body, packed=packed)
    if text is not None and unsupported.messages is not _ABSENT and getattr(unsupported, text) is _ABSENT:
        raise InvalidRequest(f"chats are not taken; send {text}, a text as the model takes it.", param="messages")
    for name in names:
        (accepted, why), value = _REFUSED[name], getattr(unsupported, name)
        is_short = value is not _ABSENT and len(value) <= _LONGEST
        if value is not _ABSENT and not (is_short and decode(object, bytes(value), packed=packed) in accepted):
            raise InvalidRequest(why, param=name)


class TruncationFields(Protocol):
    """The fields of a body that control truncation."""

    @property
    def truncate(self) -> bool | Literal["right", "left", "never"] | None: ...
    @property
    def truncate_prompt_tokens(self) -> int | None: ...
    @property
    def truncation_side(self) -> Literal["right", "left"] | None: ...


def parse_truncation(body: TruncationFields, *, default: bool) -> tuple[Truncate | None, int | None]:
    """Return (truncate, max_tokens) of a Request. By default texts are cut if `usual`. Raises InvalidRequest."""
    limit, side = body.truncate_prompt_tokens, body.truncation_side
    cuts = body.truncate if body.truncate is not None else default or limit is not None
    truncate = read_truncate(cuts)
    if truncate in ("right", "left") and side not in (None, truncate):
        raise InvalidRequest(f"is {side!r}, and truncate is {truncate!r}; give one of them.", param="truncation_side")
    return truncate or side, None if limit == -1 else limit


def parse_normalize(body: VLLMTextFields) -> bool | None:
    """Return `normalize`, by either of its names. Raises InvalidRequest if they differ."""
    if body.normalize is not None and body.use_activation not in (None, body.normalize):
        raise InvalidRequest("contradicts normalize, which is the same for vectors; give one of them.", param="use_activation")
    return body.use_activation if body.normalize is None else body.normalize


def vllm_text_request(body: VLLMTextFields, outputs: tuple[OutputName, ...], *, cuts: bool, **more: Any) -> Request:
    """Return the Request of a body of texts, by default with truncation if `cuts`. Raises InvalidRequest and TooLarge."""
    truncate, limit = parse_truncation(body, default=cuts)
    request = text_request(body, outputs, truncate=truncate, max_tokens=limit, **more)
    if body.add_special_tokens is False and isinstance(request.texts[0], str):
        raise InvalidRequest("a text gets its special tokens; send token ids to do without.", param="add_special_tokens")
    return request
