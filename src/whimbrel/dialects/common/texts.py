"""Texts and token ids of request bodies, and the fields beside them that several APIs share: purposes, prompts, truncation."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, cast

import msgspec
import numpy as np
from msgspec import Meta

from whimbrel.dialects.common import schemas
from whimbrel.dialects.common.bodies import Positive, schema, text_inputs
from whimbrel.dialects.common.schemas import ID_LISTS, IDS, TEXT, TEXTS, Schema
from whimbrel.errors import InvalidRequest, Location
from whimbrel.types.card import Card
from whimbrel.types.request import InputType, OutputName, Request, Truncate, read_truncate, splits

Truncation: TypeAlias = bool | Literal["right", "left", "never"] | None
TruncationSide: TypeAlias = Annotated[Literal["right", "left"] | None, schema("The end at which texts are cut (vLLM).")]
CUTS: Final[dict[object, Truncate]] = {"END": "right", "START": "left", "NONE": "never"}
"""Cohere's and NVIDIA's words for truncation."""


def parse_truncation(
    truncate: Truncation, side: Literal["right", "left"] | None, limit: int | None, *, default: bool
) -> tuple[Truncate | None, int | None]:
    """Return (truncate, max_tokens) of a Request. Texts are truncated by default if `default`. Raises InvalidRequest."""
    cuts = truncate if truncate is not None else default or limit is not None
    end = read_truncate(cuts)
    if end in ("right", "left") and side not in (None, end):
        raise InvalidRequest(f"is {side!r}, and truncate is {end!r}; give one of them.", param="truncation_side")
    return end or side, None if limit == -1 else limit


def side_of(card: Card, input_type: InputType | None) -> InputType | None:
    """Return the input type of texts whose side a body may leave out: documents, if the model has a format for these."""
    return "document" if input_type is None and "document" in card.text_formats else input_type


SIDES: Final[Mapping[str, InputType]] = {"query": "query", "passage": "document"}
"""Input types of tasks that end in a dot and a key."""


def prompt_for_task(card: Card, word: str | None, input_type: InputType | None) -> dict[str, Any]:
    """Return the input type, and the model's prompt or task named `word`, if it has one, as fields of a Request.

    Case is ignored, and a task may be followed by a dot and one of SIDES. The field `adapter` is there for a task only.
    """
    tower, sought = card.tower(card.tower_for(input_type)), (word or "").casefold()
    prompts = {} if word is None else {name.casefold(): name for name in tower.prompts}
    stem, _, side = sought.rpartition(".")
    tasks = {name.casefold(): name for name in tower.tasks}
    task = tasks.get(stem if side in SIDES else sought)
    return {"prompt_name": prompts.get(sought), "input_type": input_type, **({"adapter": task} if task else {})}


TokenInputs: TypeAlias = Annotated[
    str | list[str | int | list[int]],
    text_inputs(TEXT, TEXTS, IDS, ID_LISTS).says(
        "A text, a list of texts, a list of token ids, or a list of such lists; at most {most} inputs and {ids} ids. Token ids "
        "are taken as they are: no special tokens are put around them."
    ),
]
ModelName: TypeAlias = Annotated[str | None, schema("The served model's name, as /v1/models lists it.")]
AdapterName: TypeAlias = Annotated[
    str | None,
    schema("One of the adapters that the server was started with, as in a model's name after a colon, or of the model's own."),
]
Columns: TypeAlias = Annotated[
    Positive | None, schema("Keep the first N columns of each vector; for models trained with Matryoshka loss.")
]
PromptName: TypeAlias = Annotated[str | None, schema("The name of one of the model's prompts, which is put before each text.")]
Priority: TypeAlias = Annotated[
    Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None, schema("Requests with lower numbers run first. Default: 0 (vLLM).")
]
Instruction: TypeAlias = Annotated[str | None, schema("The task that a reranker with a template is told to judge by.")]
RequestId: TypeAlias = Annotated[str | None, schema("The end of the answer's `id` (vLLM).")]
TextUse: TypeAlias = Annotated[
    InputType | None, schema("Whether the texts are queries or documents, for models that treat them differently.")
]


class TextObject(msgspec.Struct, frozen=True):
    """A text as an object (Jina)."""

    text: str | None = None


def parse_texts(raw: str | Sequence[str | int | Sequence[int | str] | TextObject]) -> Any:
    """Return texts, pairs of texts, or arrays of token ids, of a field with the rule `text_inputs`. Raises InvalidRequest."""
    if isinstance(raw, str):
        return [raw]
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

    RULES: ClassVar[tuple[Schema, ...]] = (*schemas.ONE_PROMPT, *schemas.TEXTS_WITH_PROMPTS, *schemas.SPLIT_IS_NOT_CUT)
    input: Any
    model: ModelName = None
    adapter: AdapterName = None
    dimensions: Columns = None
    prompt_name: PromptName = None
    prompt: Annotated[str | None, schema("Text put before each text, instead of a named prompt.")] = None
    normalize: Annotated[bool | None, schema("Divide vectors by their Euclidean norm. Default: as the model does.")] = None
    truncate: Annotated[
        Truncation,
        schema(
            "The end at which a text that is too long is cut. `false` or `never` makes it an error. Default: as the model's "
            "tokenizer does."
        ),
    ] = None
    late_chunking: Annotated[
        bool | None,
        schema(
            "Treat the inputs as consecutive parts of one document, as in Jina's API. They are joined and run in one pass, and "
            "each vector is the mean over the tokens of its part. Only for models with mean pooling."
        ),
    ] = None
    split_long: Annotated[
        bool | None,
        schema(
            "Run a text that is too long in parts, in place of cutting it. Its vector is the mean of theirs, weighted by their "
            "tokens. Default: as the server was started, unless the request asks to cut."
        ),
    ] = None
    priority: Priority = None


def text_request(
    body: TextFields, outputs: tuple[OutputName, ...], *, input_type: InputType | Literal["passage"] | None = None, **more: Any
) -> Request:
    """Return the Request of a body; `more` has the fields that its dialect parses. Raises InvalidRequest and TooLarge."""
    default: dict[str, Any] = {
        "normalize": body.normalize,
        "truncate": read_truncate(body.truncate),
        "split_long": splits(body.split_long, body.truncate),
    }
    return Request(
        parse_texts(body.input),
        outputs,
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        input_type="document" if input_type == "passage" else input_type,
        adapter=body.adapter,
        late_chunking=bool(body.late_chunking),
        **(default | more),
    )
