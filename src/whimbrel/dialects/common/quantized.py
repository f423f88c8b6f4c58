"""Vectors in the types of numbers that Cohere, Voyage and Jina name alike. Pure; numpy only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, TypeAlias, cast

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array
from whimbrel.types.card import Card
from whimbrel.types.request import OutputName
from whimbrel.wire import DType, EncodedArray

NumberType: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]

_BITS: Final = frozenset(("binary", "ubinary"))


def quantize(rows_ND: Float32Array, kind: str) -> EncodedArray:
    """The rows in a NumberType, or the floats that `base64` is of. `int8` and `uint8`: 127ths of each row's largest entry, and
    that + 128. `ubinary` and `binary`: bits, eight columns to a byte, and that - 128; of a width that `check_bits` lets
    through."""
    return EncodedArray(rows_ND, "float32" if kind in ("float", "base64") else cast(DType, kind))


def check_bits(card: Card, output: OutputName, dimensions: int | None, kinds: Collection[str], *, param: str) -> None:
    """Refuse bits of vectors whose columns do not fill whole bytes; `param` is the field that asks for them."""
    if _BITS.isdisjoint(kinds):
        return
    found = card.output(output)
    width = dimensions or found.default_width or found.width
    if width % 8:
        raise InvalidRequest(
            f"bits are packed eight to a byte, and {width:,} columns are no multiple of 8. Ask for another width, or for int8.",
            param=param,
        )
