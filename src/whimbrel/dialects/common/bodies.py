"""Request bodies, JSON and MessagePack: their decoding, the rules of their fields, and their faults.

A rule states once the JSON Schema of a field, its sentence in the API page and its check. `decode` applies the rules of a
body's fields. Rules over several fields are schemas in a struct's `RULES`; the Request checks them. A field that is null counts
as absent. Every failure is an InvalidRequest with its location.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, Final, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Meta

from whimbrel.dialects.common.schemas import MAX_IDS, MAX_INPUTS, Schema
from whimbrel.errors import InvalidRequest, Location, TooLarge
from whimbrel.wire import whole_numbers


class MalformedBody(InvalidRequest):
    """The body is empty or is not valid JSON."""


class MissingField(InvalidRequest):
    """A field that the body must have is not there."""


class Empty(InvalidRequest):
    """A list of inputs is empty."""


class UnknownWord(InvalidRequest):
    """A field has a value that is none of the words it takes."""


T = TypeVar("T")
REPLACES: Final = "x-"
"""The prefix of keywords that replace the keywords that msgspec derives from a type."""
LONGEST: Final = Meta(max_length=100_000)
"""The limit of a list that is read at all."""
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Natural: TypeAlias = Annotated[int, Meta(ge=0)]
EMPTY: Final = "is an empty list; give at least one text."


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a field: keywords of JSON Schema, and a function that raises InvalidRequest for other values."""

    schema: Schema
    check: Callable[[Any, Location], None]
    most: int | None = None
    """The limit that a sentence names as `{most}`."""

    def says(self, about: str = "", **keywords: Any) -> Meta:
        """Return the annotation of a field with this rule, a sentence about it, and further keywords."""
        most = "" if self.most is None else f"{self.most:,}"
        return schema(about.format(most=most, ids=f"{MAX_IDS:,}") or None, rule=self, **self.schema, **keywords)


def schema(about: str | None = None, *, rule: Rule | None = None, **keywords: Any) -> Meta:
    """Return the annotation that narrows a field by keywords of JSON Schema, which the rule checks, or the Request."""
    replacing = {f"{REPLACES}{name}": value for name, value in keywords.items()}
    return Meta(description=about, extra_json_schema=replacing, extra={"rule": rule} if rule else None)


def check(body: object, within: Location | None = None) -> None:
    """Raise InvalidRequest for the first field of a struct that breaks its rule. `within` is the place of the struct."""
    for name, field, rule in _rules(type(body)):
        value = getattr(body, name)
        if value is not None:
            rule.check(value, Location(field) if within is None else within.below(f".{field}"))


@cache
def _rules(kind: type) -> tuple[tuple[str, str, Rule], ...]:
    """Return the rules of a struct with the names of their fields, in Python and in JSON."""
    info = msgspec.inspect.type_info(kind)
    fields = info.fields if isinstance(info, msgspec.inspect.StructType) else ()
    return tuple((field.name, field.encode_name, rule) for field in fields for rule in _rules_in(field.type))


def _rules_in(info: msgspec.inspect.Type) -> Iterator[Rule]:
    if isinstance(info, msgspec.inspect.Metadata):
        if extra := cast(dict[str, Rule] | None, info.extra):  # pyright: ignore[reportUnknownMemberType]
            yield extra["rule"]
        yield from _rules_in(info.type)
    elif isinstance(info, msgspec.inspect.UnionType):
        for each in info.types:
            yield from _rules_in(each)


def count(most: int, noun: str, *, least: int = 1, empty: str = EMPTY, fault: type[InvalidRequest] = Empty) -> Rule:
    """Return the rule of the number of items in a list, where the field is one. `fault` is the error of an empty list."""

    def check_count(value: Any, location: Location) -> None:
        if not isinstance(value, list):
            return
        num_items = len(cast(list[Any], value))
        if num_items < least:
            raise fault(empty, location=location)
        if num_items > most:
            raise TooLarge(f"{num_items:,}{noun}; the limit is {most:,}. Split the request.", location=location)

    return Rule({**({"minItems": least} if least else {}), "maxItems": most}, check_count, most)


def holds(is_allowed: Callable[[Any], bool], otherwise: str, **keywords: Any) -> Rule:
    """Return the rule that a field has only some values. `otherwise` is the message for any other, which it names `{value}`."""

    def check_value(value: Any, location: Location) -> None:
        if not is_allowed(value):
            raise InvalidRequest(otherwise.format(value=value), location=location)

    return Rule(keywords, check_value)


def text_inputs(*forms: Schema, empty: str = EMPTY) -> Rule:
    """Return the rule of a field of texts or token ids in some forms, of which `parse_texts` refuses a mixture."""
    limit = count(MAX_INPUTS, " inputs", empty=empty)

    def check_inputs(value: Any, location: Location) -> None:
        is_one_input = isinstance(value, list) and type(next(iter(cast(list[Any], value)), None)) is int
        if not is_one_input:
            limit.check(value, location)

    return Rule({"anyOf": list(forms)}, check_inputs, MAX_INPUTS)


NOT_EMPTY: Final = holds(lambda value: not isinstance(value, str) or value != "", "is empty.", minLength=1)
"""The rule of a query. An array may stand for its text, and would compare with one number by number."""
_MAX_STRINGS: Final = 100_000
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
    """Decode JSON or, if `packed`, MessagePack, and check the rules of its fields.

    Raises InvalidRequest with the path of the fault, and TooLarge.
    """
    if not body or body.isspace():
        raise MalformedBody("the body is empty; send a JSON object.")
    if not packed:
        reject_many(body)
    language = "MessagePack" if packed else "JSON"
    try:
        decoded: T = whole_numbers.decode(_decoder(kind, packed), body)
    except msgspec.ValidationError as error:
        raise _located(str(error), kind) from None
    except RecursionError:
        raise MalformedBody(f"the {language} is nested too deeply.") from None
    except UnicodeDecodeError:
        raise MalformedBody("the body is not valid UTF-8.") from None
    except (msgspec.MsgspecError, ValueError, MemoryError) as error:
        raise MalformedBody(f"the body is not valid {language}: {error}.") from None
    check(decoded)
    return decoded


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
