"""Validation of fields against their annotations.

The limits of a field stand once, in its annotation: a type, and the bounds of its `msgspec.Meta`. msgspec applies them where it
decodes a body. `fields_struct` makes a type by which it applies the same annotations to objects that Python code constructs;
`validate` words the errors.
"""

import sys
from collections.abc import Collection
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from whimbrel.errors import InvalidRequest

_NOUNS: Final = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def fields_struct(kind: type, *, without: Collection[str] = ()) -> type[msgspec.Struct]:
    """Return the type that `msgspec.convert(..., from_attributes=True)` makes only of valid fields of `kind`."""
    hints = get_type_hints(kind, include_extras=True)
    return msgspec.defstruct(f"{kind.__name__}Fields", [each for each in hints.items() if each[0] not in without], gc=False)


def validate(instance: object, valid: type[msgspec.Struct]) -> None:
    """Raise InvalidRequest for the first field whose value its annotation does not allow."""
    try:
        msgspec.convert(instance, valid, from_attributes=True)
    except msgspec.ValidationError:
        for name, kind in valid.__annotations__.items():
            value = getattr(instance, name)
            try:
                msgspec.convert(float(value) if isinstance(value, float) else value, kind)  # msgspec rejects np.float64
            except msgspec.ValidationError:
                raise InvalidRequest(_message(kind, value), param=name) from None


def _message(kind: Any, value: object) -> str:
    if get_origin(kind) in (Union, UnionType):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return f"{value!r:.80} is not known; it takes {', '.join(get_args(kind))}."
    base, bounds = (get_args(kind)[0], _bounds(get_args(kind)[1])) if get_origin(kind) is Annotated else (kind, "")
    return f"must be {_NOUNS[base]}{bounds}, is {value!r:.80}."


def _bounds(limits: Meta) -> str:
    if limits.ge is None:
        return ""
    is_bounded = limits.le is not None and limits.le < sys.float_info.max
    return f" from {limits.ge:,} to {limits.le:,}" if is_bounded else f" of at least {limits.ge:,}"
