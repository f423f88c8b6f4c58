"""Rules of request bodies. What a rule states once is the JSON Schema of a field, its sentence in the API page and its check.

`decode` applies the rules of a body's fields. Rules over several fields are schemas in a struct's `RULES`; the Request checks
them. A field that is null counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias, cast

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.faults import Empty
from whimbrel.errors import InvalidRequest, Location, TooLarge

Schema: TypeAlias = dict[str, Any]
REPLACES: Final = "x-"
"""The prefix of keywords that replace the keywords that msgspec derives from a type."""
MAX_IDS: Final = 2**19
"""The limit of token ids in a request, all inputs together."""
MAX_INPUTS: Final = 2048
LONGEST: Final = Meta(max_length=100_000)
"""The limit of a list that is read at all."""
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


def absent(*names: str) -> Schema:
    return {"properties": {name: {"type": "null"} for name in names}}


def present(*names: str) -> Schema:
    return {"required": list(names), "properties": {name: {"not": {"type": "null"}} for name in names}}


def only(*names: str, of: tuple[str, ...]) -> Schema:
    """Return the rule that, of some fields, those with these names are present and the others absent."""
    others = absent(*(name for name in of if name not in names))
    return {"allOf": [present(*names), others]}


def never(**fields: Schema) -> Schema:
    """Return the rule that not all of these fields have such values at once."""
    return {"not": {"required": list(fields), "properties": fields}}


def any_of(*options: Schema) -> Schema:
    return {"anyOf": list(options)}


def list_of(item: Schema, most: int, least: int = 1) -> Schema:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


TEXT: Final[Schema] = {"type": "string"}
TEXTS: Final = list_of(TEXT, MAX_INPUTS)
TEXTS_OR_OBJECTS: Final = list_of(
    any_of(TEXT, {"type": "object", "required": ["text"], "properties": {"text": TEXT}}), MAX_INPUTS
)
TEXT_LISTS: Final = list_of(list_of(TEXT, 1), MAX_INPUTS)
TEXT_PAIRS: Final = list_of(list_of(TEXT, 2, 2), MAX_INPUTS)
_ID: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
IDS: Final = list_of(_ID, MAX_IDS)
ID_LISTS: Final = list_of(list_of(_ID, MAX_IDS), MAX_INPUTS)
EMPTY_OR_ID_LISTS: Final = list_of(list_of(_ID, MAX_IDS, 0), MAX_INPUTS)
_LEFT: Final[Schema] = {"const": "left"}
_RIGHT: Final[Schema] = {"const": "right"}
_TRUE: Final[Schema] = {"const": True}

ONE_PROMPT: Final = (never(prompt=TEXT, prompt_name=TEXT),)
TEXTS_WITH_PROMPTS: Final = (
    never(prompt=TEXT, input=any_of(IDS, ID_LISTS)),
    never(prompt_name=TEXT, input=any_of(IDS, ID_LISTS)),
)
SPLIT_IS_NOT_CUT: Final = (
    never(split_long=_TRUE, late_chunking=_TRUE),
    never(split_long=_TRUE, truncate=any_of(_LEFT, _RIGHT)),
)
SPLIT_HAS_NO_SIDE: Final = (never(split_long=_TRUE, truncation_side=TEXT),)
ONE_SIDE: Final = (never(truncate=_LEFT, truncation_side=_RIGHT), never(truncate=_RIGHT, truncation_side=_LEFT))
