"""Whole numbers that are written as doubles, such as 256.0 or 1e2, where an integer is due.

Programs that have only doubles write them so, and JSON does not tell the two apart. msgspec does, and refuses a double in place
of an integer. A message that is refused for this reason is decoded once more, with the whole doubles of its fields as integers,
which fields of doubles take too. A message that is right at first costs nothing more, and one that is not costs little more:
Python looks at short fields and at lists of numbers alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar, cast

import msgspec

T = TypeVar("T")
Decoder: TypeAlias = "msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]"

_DOUBLE_FOR_INTEGER: Final = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_MOST: Final = 2**63
"""Size from which on a double is left as it is: no field takes such an integer."""
_SHORT: Final = 2**12
"""Bytes of a field up to which it is looked through, whatever it holds: a megabyte of empty lists would take half a second."""


@lru_cache(maxsize=64)
def _json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


def decode_json(kind: type[T], text: bytes | str) -> T:
    """Decode JSON; whole doubles count as integers. Raises msgspec.ValidationError and DecodeError."""
    return decode(_json_decoder(kind), text.encode() if isinstance(text, str) else text)


def decode(decoder: Decoder[T], message: bytes) -> T:
    """Decode JSON or MessagePack; whole doubles count as integers. Raises what the decoder raises."""
    try:
        return decoder.decode(message)
    except msgspec.ValidationError as error:
        if not _DOUBLE_FOR_INTEGER.match(str(error)) or (rewritten := _rewrite(message, decoder)) is None:
            raise
    return decoder.decode(rewritten)


def as_whole(value: object) -> Any:
    """Return a whole double as an integer, and all else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() and -_MOST <= value < _MOST else value


@lru_cache(maxsize=64)
def _raw_fields(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a struct that takes the same fields as `kind`, of any type, and leaves them as they are written."""
    names = {f"field_{i}": name for i, name in enumerate(kind.__struct_encode_fields__)}
    strict = kind.__struct_config__.forbid_unknown_fields
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in names]
    return msgspec.defstruct("RawFields", fields, rename=names, forbid_unknown_fields=strict)


def _rewrite(message: bytes, decoder: Decoder[Any]) -> bytes | None:
    """Return a message with its whole doubles as integers, or None if it holds numbers that cannot be written again.

    Raises msgspec.ValidationError for a field that the type has not and does not ignore.
    """
    form: Any = msgspec.json if isinstance(decoder, msgspec.json.Decoder) else msgspec.msgpack
    kind: Any = decoder.type
    raw = None
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        raw = form.decode(message, type=_raw_fields(kind))
    try:
        if raw is None:
            return cast(bytes, form.encode(_walk(form.decode(message))))
        fields = zip(decoder.type.__struct_encode_fields__, msgspec.structs.astuple(raw), strict=True)
        return cast(bytes, form.encode({name: _rewrite_field(value, form) for name, value in fields if len(value)}))
    except (msgspec.ValidationError, OverflowError, TypeError):  # beyond doubles, beyond 64 bits, keys of no JSON
        return None


def _rewrite_field(value: Any, form: Any) -> Any:
    if len(value) <= _SHORT:
        return _walk(form.decode(value))
    try:
        return _walk(form.decode(value, type=list[float | list[float]]))
    except msgspec.ValidationError:  # texts and the like
        return value


def _walk(value: Any) -> Any:
    walk = _WALKS.get(type(cast(object, value)))
    return value if walk is None else walk(value)


def _walk_list(values: list[Any]) -> list[Any]:
    kinds = set(map(type, values))
    if kinds == {float} and all(map(float.is_integer, values)) and -_MOST <= min(values) <= max(values) < _MOST:
        return list(map(int, values))  # token ids: there may be many
    return [*map(_walk, values)] if not kinds.isdisjoint(_WALKS) else values


_WALKS: Final[dict[type, Callable[[Any], Any]]] = {
    float: as_whole,
    list: _walk_list,
    dict: lambda values: {name: _walk(value) for name, value in values.items()},
}
