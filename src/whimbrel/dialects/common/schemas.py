"""JSON Schemas of texts and token ids, and of rules over several fields of a body. A field that is null counts as absent."""

from typing import Any, Final, TypeAlias

Schema: TypeAlias = dict[str, Any]
MAX_IDS: Final = 2**19
"""The limit of token ids in a request, all inputs together."""
MAX_INPUTS: Final = 2048


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
