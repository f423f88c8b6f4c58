"""Vectors in the types of numbers that Cohere, Voyage and Jina name alike. Pure; numpy only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pybase64
from numpy.typing import NDArray

from whimbrel.card import Card
from whimbrel.errors import InvalidRequest
from whimbrel.types import Float32Array, OutputName
from whimbrel.wire import to_base64, to_bits, to_int8

NumberType: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]

_BITS: Final = frozenset(("binary", "ubinary"))
_SIGN: Final = np.uint8(0x80)
"""Flipped, it takes a byte from -128..127 to 0..255, and back."""


def as_numbers(rows_ND: Float32Array, kind: str) -> NDArray[Any]:
    """The rows in a NumberType. `int8` and `uint8`: 127ths of each row's largest entry, and that + 128. `ubinary` and `binary`:
    bits, eight columns to a byte, and that - 128. Bits take a width that `check_bits` lets through."""
    if kind == "float":
        return rows_ND
    if kind in _BITS:
        bits = to_bits(rows_ND)
        return bits if kind == "ubinary" else (bits ^ _SIGN).view(np.int8)
    numbers = to_int8(rows_ND)
    return numbers if kind == "int8" else numbers.view(np.uint8) ^ _SIGN


def as_base64(rows_ND: Float32Array, kind: str) -> list[str]:
    """The same, the bytes of each row as base64."""
    if kind == "float":
        return to_base64(rows_ND)
    return [pybase64.b64encode_as_string(row.data) for row in np.ascontiguousarray(as_numbers(rows_ND, kind))]


def check_bits(card: Card, output: OutputName, dimensions: int | None, kinds: Collection[str], *, param: str) -> None:
    """Refuse bits of vectors whose columns do not fill whole bytes; `param` is the field that asks for them."""
    if _BITS.isdisjoint(kinds):
        return
    found = card.output(output)
    width = dimensions or found.usual_width or found.width
    if width % 8:
        raise InvalidRequest(
            f"bits are packed eight to a byte, and {width:,} columns are no multiple of 8. Ask for another width, or for int8.",
            param=param,
        )
