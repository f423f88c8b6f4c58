"""What bodies of all dialects that encode texts may say, and the Request that it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.inputs import parse_texts
from whimbrel.types.options import read_truncate
from whimbrel.types.request import InputType, OutputName, Request

if TYPE_CHECKING:
    from whimbrel.types.card import Card


class TextFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that they share; each dialect says itself which forms of `input` it takes."""

    input: Any
    model: Annotated[str | None, Meta(description="The served model's name, as /v1/models lists it.")] = None
    dimensions: Annotated[int | None, Meta(description="Keep the first so many columns of vectors (Matryoshka models).")] = None
    prompt_name: Annotated[str | None, Meta(description="The name of one of the model's prompts, put before each text.")] = None
    prompt: Annotated[str | None, Meta(description="Text put before each text, instead of a named prompt.")] = None
    normalize: Annotated[
        bool | None, Meta(description="Divide vectors by their Euclidean norm; by default as the model does.")
    ] = None
    truncate: Annotated[
        bool | Literal["right", "left", "never"] | None,
        Meta(
            description="Which end of a text that is too long is cut; `false` or `never`: it is an error. By default as "
            "the model's tokenizer does."
        ),
    ] = None
    late_chunking: Annotated[
        bool | None,
        Meta(
            description="The inputs are consecutive parts of one document (as in Jina's API): they run in one pass, joined as "
            "they are, and each vector is the mean of its part's tokens. For models that pool by the mean."
        ),
    ] = None
    split_long: Annotated[
        bool | None,
        Meta(
            description="A text that is too long is not cut but runs in parts; its vector is the mean of theirs, weighted by "
            "their tokens."
        ),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None,
        Meta(description="Requests with lower numbers run first; 0 by default (vLLM)."),
    ] = None


def text_request(body: TextFields, outputs: tuple[OutputName, ...], **more: Any) -> Request:
    """The Request of a body; `more` are fields of Request that its dialect alone has, or reads in its own way. Raises
    InvalidRequest and TooLarge."""
    usual: dict[str, Any] = {"normalize": body.normalize, "truncate": read_truncate(body.truncate)}
    return Request(
        parse_texts(body.input),
        outputs,
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        late_chunking=bool(body.late_chunking),
        split_long=bool(body.split_long),
        priority=body.priority or 0,
        **(usual | more),
    )


def parse_input_type(given: str | None) -> InputType | None:
    """A passage is a document."""
    return "query" if given == "query" else None if given is None else "document"


def prompt_for_task(card: Card, word: str | None, input_type: InputType | None) -> dict[str, Any]:
    """The fields of a Request that say what its texts are for, where an API has a `word` for it: the model's prompt of that
    name, in any case of letters, if it has one; and which `input_type` the word stands for."""
    prompts = {} if word is None else {name.casefold(): name for name in card.tower(card.tower_for(input_type)).prompts}
    return {"prompt_name": prompts.get((word or "").casefold()), "input_type": input_type}
