"""Numbers in fewer bits and in either byte order, as vLLM's `embed_dtype` and `endianness` name them. numpy only.

What lies between two numbers of a type becomes the nearer one, of two equally near ones the even one, as in torch. What lies
beyond its largest is refused, where torch gives infinity or NaN.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import pybase64
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest
from whimbrel.types import Float32Array, Ragged

EmbedDtype: TypeAlias = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness: TypeAlias = Literal["native", "big", "little"]
"""`native` is little here, whatever the machine."""

_LARGEST: Final[dict[EmbedDtype, float]] = {
    "float32": float(np.finfo(np.float32).max),
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
    "fp8_e4m3": 448.0,
    "fp8_e5m2": 57344.0,
}
_MANTISSA: Final[dict[EmbedDtype, int]] = {"fp8_e4m3": 3, "fp8_e5m2": 2}
"""Bits of the fraction; the sign has one of the eight, and the exponent the others."""


def encoded(array: Float32Array, dtype: EmbedDtype, endianness: Endianness = "native") -> NDArray[Any]:
    """An array of which the bytes are the numbers in this type and order, row by row. Raises InvalidRequest.

    Where numpy has no such type, its items are the bits as unsigned integers.
    """
    if (largest := float(np.abs(array).max(initial=0.0))) > _LARGEST[dtype]:
        raise InvalidRequest(
            f"the numbers reach {largest:g}; {dtype} ends at {_LARGEST[dtype]:g}. Ask for float32 or bfloat16.",
            param="embed_dtype",
        )
    found = _rounded(array, dtype)
    order = ">" if endianness == "big" else "<"
    return np.ascontiguousarray(found, found.dtype.newbyteorder(order))


def _rounded(array: Float32Array, dtype: EmbedDtype) -> NDArray[Any]:
    if dtype == "float32":
        return array
    if dtype == "float16":
        return array.astype(np.float16)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    codes = np.searchsorted(_borders(dtype), np.abs(array)).astype(np.uint8)
    return codes | np.signbit(array).astype(np.uint8) << 7


@lru_cache
def _borders(dtype: EmbedDtype) -> Float32Array:
    """Border i is the largest number that becomes code i rather than i + 1, signs aside."""
    values = _values(dtype)
    borders = (values[:-1] + values[1:]) * np.float32(0.5)
    borders[1::2] = np.nextafter(borders[1::2], np.float32(0))  # the middle goes to the even code
    return borders


def _values(dtype: EmbedDtype) -> Float32Array:
    """What the codes from 0 on stand for, up to the largest number."""
    bits = _MANTISSA[dtype]
    exponent, fraction = np.divmod(np.arange(128), 2**bits)
    mantissa = fraction + np.where(exponent > 0, 2**bits, 0)
    values = np.ldexp(mantissa, np.maximum(exponent, 1) - 2 ** (6 - bits) + 1 - bits).astype(np.float32)
    return values[values <= _LARGEST[dtype]]


class Wanted(Protocol):
    """A body that says which numbers it wants."""

    @property
    def embed_dtype(self) -> EmbedDtype | None: ...
    @property
    def endianness(self) -> Endianness | None: ...


def as_bytes(output: Float32Array | Ragged, wanted: Wanted) -> tuple[memoryview, list[tuple[int, ...]], NDArray[np.int64]]:
    """(the bytes of all texts, the shape of each text's numbers, where each begins and the last ends)."""
    rows = output.rows_XD if isinstance(output, Ragged) else output
    offsets_N1 = output.offsets_N1 if isinstance(output, Ragged) else np.arange(len(output) + 1)
    found = encoded(rows, wanted.embed_dtype or "float32", wanted.endianness or "native")
    width = rows.shape[1]
    shapes = (
        [(count, width) for count in np.diff(offsets_N1).tolist()] if isinstance(output, Ragged) else [(width,)] * len(rows)
    )
    return found.reshape(-1).view(np.uint8).data, shapes, offsets_N1 * (width * found.itemsize)


def as_base64(output: Float32Array | Ragged, wanted: Wanted) -> list[str]:
    """The bytes of each text's numbers, as base64. Raises InvalidRequest."""
    content, _, starts = as_bytes(output, wanted)
    ends = starts.tolist()
    return [pybase64.b64encode_as_string(content[start:end]) for start, end in pairwise(ends)]
