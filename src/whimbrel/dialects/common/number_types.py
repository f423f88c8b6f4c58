"""Number types of vectors as hosted services have them (Cohere, Jina, Voyage)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, TypeAlias, cast

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array
from whimbrel.types.card import Card
from whimbrel.types.request import OutputName
from whimbrel.wire.dtypes import DType, EncodedArray

NumberType: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]

_BITS: Final = frozenset(("binary", "ubinary"))


def quantize(rows_ND: Float32Array, kind: str) -> EncodedArray:
    """Return the rows in a NumberType; `base64` holds floats.

    `int8` and `uint8`: 127ths of each row's largest entry, and that + 128. `ubinary` and `binary`: bits, eight columns to a
    byte, and that - 128, for widths that `check_bits` accepts.
    """
    return EncodedArray(rows_ND, "float32" if kind in ("float", "base64") else cast(DType, kind))


def check_bits(card: Card, output: OutputName, dimensions: int | None, kinds: Collection[str], *, param: str) -> None:
    """Raise InvalidRequest at `param` if it asks for bits and the columns of vectors do not fill whole bytes."""
    if _BITS.isdisjoint(kinds):
        return
    columns = card.output(output)
    width = dimensions or columns.default_width or columns.width
    if width % 8:
        raise InvalidRequest(
            f"bits are packed eight to a byte, and {width:,} columns are no multiple of 8. Ask for another width, or for int8.",
            param=param,
        )
