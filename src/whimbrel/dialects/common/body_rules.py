"""Rules of request bodies that types do not express, as JSON Schema for /openapi.json. The parsers enforce them.

A struct lists the rules over several fields in `RULES`. `narrowed` narrows one field. A field that is null counts as absent.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from msgspec import Meta

Rule: TypeAlias = dict[str, Any]
REPLACES: Final = "x-"
"""The prefix of keywords that replace the keywords that msgspec derives from a type."""
MAX_IDS: Final = 2**19
"""The limit of token ids in a request, all inputs together."""
MAX_INPUTS: Final = 2048


def narrowed(*, any_of: tuple[Rule, ...] | None = None, **keywords: Any) -> Meta:
    """Return the annotation that narrows a field to some forms, or by keywords of JSON Schema."""
    keywords |= {} if any_of is None else {"anyOf": list(any_of)}
    return Meta(extra_json_schema={f"{REPLACES}{name}": value for name, value in keywords.items()})


def absent(*names: str) -> Rule:
    return {"properties": {name: {"type": "null"} for name in names}}


def present(*names: str) -> Rule:
    return {"required": list(names), "properties": {name: {"not": {"type": "null"}} for name in names}}


def only(*names: str, of: tuple[str, ...]) -> Rule:
    """Return the rule that, of some fields, those with these names are present and the others absent."""
    others = absent(*(name for name in of if name not in names))
    return {"allOf": [present(*names), others]}


def never(**fields: Rule) -> Rule:
    """Return the rule that not all of these fields have such values at once."""
    return {"not": {"required": list(fields), "properties": fields}}


def any_of(*options: Rule) -> Rule:
    return {"anyOf": list(options)}


def list_of(item: Rule, most: int, least: int = 1) -> Rule:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


TEXT: Final[Rule] = {"type": "string"}
TEXTS: Final = list_of(TEXT, MAX_INPUTS)
TEXTS_OR_OBJECTS: Final = list_of(
    any_of(TEXT, {"type": "object", "required": ["text"], "properties": {"text": TEXT}}), MAX_INPUTS
)
TEXT_LISTS: Final = list_of(list_of(TEXT, 1), MAX_INPUTS)
TEXT_PAIRS: Final = list_of(list_of(TEXT, 2, 2), MAX_INPUTS)
_ID: Final[Rule] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
IDS: Final = list_of(_ID, MAX_IDS)
ID_LISTS: Final = list_of(list_of(_ID, MAX_IDS), MAX_INPUTS)
EMPTY_OR_ID_LISTS: Final = list_of(list_of(_ID, MAX_IDS, 0), MAX_INPUTS)
_LEFT: Final[Rule] = {"const": "left"}
_RIGHT: Final[Rule] = {"const": "right"}
_TRUE: Final[Rule] = {"const": True}

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
