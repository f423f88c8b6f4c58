"""Validation of fields against their annotations.

The limits of a field stand once, in its annotation: a type, and the bounds of its `msgspec.Meta`. msgspec applies them where it
decodes a body. `FieldValidator` applies the same annotations to objects that Python code constructs, and words the errors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from whimbrel.errors import InvalidRequest

_NOUNS: Final = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class FieldValidator:
    """Validator of the fields `names` of a class."""

    def __init__(self, kind: type, names: Iterable[str]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        self._kinds: dict[str, Any] = {name: hints[name] for name in names}
        self._fields = msgspec.defstruct(f"{kind.__name__}Fields", list(self._kinds.items()), gc=False)

    def __call__(self, instance: object) -> None:
        """Raise InvalidRequest for the first field whose value its annotation does not allow."""
        try:
            msgspec.convert(instance, self._fields, from_attributes=True)
        except msgspec.ValidationError:
            self._raise_for_field(instance)

    def _raise_for_field(self, instance: object) -> None:
        for name, kind in self._kinds.items():
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
