"""Request bodies: decoding of JSON and MessagePack, and the fields that several dialects share.

Every failure is an InvalidRequest with its location.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Meta

from whimbrel.dialects.common.body_rules import (
    ID_LISTS,
    IDS,
    MAX_IDS,
    MAX_INPUTS,
    ONE_PROMPT,
    SPLIT_IS_NOT_CUT,
    TEXT,
    TEXTS,
    TEXTS_WITH_PROMPTS,
    Rule,
    narrowed,
)
from whimbrel.errors import InvalidRequest, Location, TooLarge
from whimbrel.types.request import InputType, OutputName, Request, read_truncate, splits
from whimbrel.wire import whole_numbers

if TYPE_CHECKING:
    from whimbrel.types.card import Card

T = TypeVar("T")

_MAX_STRINGS: Final = 100_000


class MalformedBody(InvalidRequest):
    """The body is empty or is not valid JSON."""


class MissingField(InvalidRequest):
    """A field that the body must have is not there."""


class Empty(InvalidRequest):
    """A list of inputs is empty."""


class UnknownWord(InvalidRequest):
    """A field has a value that is none of the words it takes."""


_MAPS: Final = frozenset(bytes([first]) for first in (*range(0x80, 0x90), 0xDE, 0xDF))
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_PATH: Final = re.compile(r" - at `\$\.?((\w*).*)`$")


@lru_cache(maxsize=64)
def _decoder(kind: Any, packed: bool) -> msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind) if packed else msgspec.json.Decoder(kind)


def is_packed(body: bytes) -> bool:
    """Return whether a body is an object in MessagePack: no JSON begins with these bytes."""
    return body[:1] in _MAPS


def decode(kind: type[T], body: bytes, *, packed: bool = False) -> T:
    """Decode JSON or, if `packed`, MessagePack. Raises InvalidRequest with the path of the fault, and TooLarge."""
    if not body or body.isspace():
        raise MalformedBody("the body is empty; send a JSON object.")
    if not packed:
        reject_many(body)
    language = "MessagePack" if packed else "JSON"
    try:
        return whole_numbers.decode(_decoder(kind, packed), body)
    except msgspec.ValidationError as error:
        raise _located(str(error), kind) from None
    except RecursionError:
        raise MalformedBody(f"the {language} is nested too deeply.") from None
    except UnicodeDecodeError:
        raise MalformedBody("the body is not valid UTF-8.") from None
    except (msgspec.MsgspecError, ValueError, MemoryError) as error:
        raise MalformedBody(f"the body is not valid {language}: {error}.") from None


def _located(text: str, kind: type) -> InvalidRequest:
    """Return the error of a value that is not of its type, with its place."""
    match = _PATH.search(text)
    path = match[1] if match else ""
    if missing := _MISSING.match(text):
        path = f"{path}.{missing[1]}" if path else missing[1]
    field = re.match(r"\w*", path)
    location = Location(field[0], path=path.removeprefix(field[0])) if field and path else None
    if missing:
        return MissingField("is missing; it is required.", location=location)
    choices = _choices(kind, path)
    error_type = UnknownWord if choices else InvalidRequest
    return error_type(f"{_PATH.sub('', text)}{choices}.", location=location)


def check_count(count: int, limit: int, noun: str, *, param: str) -> None:
    if count > limit:
        raise TooLarge(f"{count:,}{noun}; the limit is {limit:,}. Split the request.", param=param)


def reject_many(body: bytes) -> None:
    """Raise TooLarge if a body has too many strings or items: decoding a million lists blocks the event loop for a second."""
    if len(body) <= MAX_IDS:
        return
    if _count(body, b'"') > 2 * _MAX_STRINGS and (strings := (_count(body, b'"') - body.count(b'\\"')) // 2) > _MAX_STRINGS:
        raise TooLarge(f"about {strings:,} strings; the limit is {_MAX_STRINGS:,}. Split the request.", param="input")
    if _count(body, b",") > MAX_IDS and (commas := _count(_without_strings(body), b",")) > MAX_IDS:
        raise TooLarge(f"more than {commas:,} token ids or items; the limit is {MAX_IDS:,}. Split the request.", param="input")


def _count(body: bytes, letter: bytes) -> int:
    """Return the count of a byte; bytes.count is slow for frequent bytes."""
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == letter[0]))


def _without_strings(body: bytes) -> bytes:
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    return b"".join(plain.split(b'"')[::2])


def _choices(kind: type, path: str) -> str:
    """Return the accepted words of a field, if it takes only some."""
    types = list(_inside(msgspec.inspect.type_info(kind)))
    for name in path.split("."):
        structs = [info for info in types if isinstance(info, msgspec.inspect.StructType)]
        fields = [field for info in structs for field in info.fields if field.encode_name == name.partition("[")[0]]
        types = [info for field in fields for info in _inside(field.type)]
    words = [repr(value) for info in types if isinstance(info, msgspec.inspect.LiteralType) for value in info.values]
    return f"; it takes {', '.join(words)}" if words else ""


def _inside(info: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    """Yield the types that a value, or an item of a list, may have."""
    if isinstance(info, msgspec.inspect.Metadata):
        yield from _inside(info.type)
    elif isinstance(info, msgspec.inspect.UnionType):
        for each in info.types:
            yield from _inside(each)
    elif isinstance(info, msgspec.inspect.ListType):
        yield from _inside(info.item_type)
    else:
        yield info


TokenInputs: TypeAlias = Annotated[
    str | list[str | int | list[int]],
    Meta(
        description="A text, a list of texts, a list of token ids, or a list of such lists; at most 2,048 inputs and 524,288 "
        "ids. Token ids are taken as they are: no special tokens are put around them."
    ),
    narrowed(any_of=(TEXT, TEXTS, IDS, ID_LISTS)),
]
Truncation: TypeAlias = bool | Literal["right", "left", "never"] | None
ModelName: TypeAlias = Annotated[str | None, Meta(description="The served model's name, as /v1/models lists it.")]
AdapterName: TypeAlias = Annotated[
    str | None,
    Meta(
        description="One of the adapters that the server was started with, as in a model's name after a colon, or of the "
        "model's own."
    ),
]
Columns: TypeAlias = Annotated[
    int | None,
    Meta(description="Keep the first N columns of each vector; for models trained with Matryoshka loss."),
    narrowed(minimum=1),
]
PromptName: TypeAlias = Annotated[
    str | None, Meta(description="The name of one of the model's prompts, which is put before each text.")
]
Priority: TypeAlias = Annotated[
    Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None,
    Meta(description="Requests with lower numbers run first. Default: 0 (vLLM)."),
]
TruncationSide: TypeAlias = Annotated[
    Literal["right", "left"] | None, Meta(description="The end at which texts are cut (vLLM).")
]
TextUse: TypeAlias = Annotated[
    InputType | None,
    Meta(description="Whether the texts are queries or documents, for models that treat them differently."),
]


class TextObject(msgspec.Struct, frozen=True):
    """A text as an object (Jina)."""

    text: str | None = None


def parse_texts(raw: str | Sequence[str | int | Sequence[int | str] | TextObject]) -> Any:
    """Return texts, pairs of texts, or arrays of token ids. Raises InvalidRequest if kinds are mixed, and TooLarge."""
    if isinstance(raw, str):
        return [raw]
    if not raw:
        raise Empty("is an empty list; give at least one text.", param="input")
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
    check_count(len(raw), MAX_INPUTS, " inputs", param="input")
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

    RULES: ClassVar[tuple[Rule, ...]] = (*ONE_PROMPT, *TEXTS_WITH_PROMPTS, *SPLIT_IS_NOT_CUT)
    input: Any
    model: ModelName = None
    adapter: AdapterName = None
    dimensions: Columns = None
    prompt_name: PromptName = None
    prompt: Annotated[str | None, Meta(description="Text put before each text, instead of a named prompt.")] = None
    normalize: Annotated[
        bool | None, Meta(description="Divide vectors by their Euclidean norm. Default: as the model does.")
    ] = None
    truncate: Annotated[
        Truncation,
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
            "weighted by their tokens. Default: as the server was started, unless the request asks to cut."
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
        priority=body.priority or 0,
        **(default | more),
    )


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
