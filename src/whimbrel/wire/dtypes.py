"""The types in which numbers travel, and the way there and back. Rounding is to the nearest, of two equally near the even one.

What a type cannot hold is refused before anything is sent: no infinity is made of a number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array

FloatType: TypeAlias = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
"""Floats, in the words of vLLM; fp8_e4m3 is the kind without infinities (`float8_e4m3fn`)."""
DType: TypeAlias = Literal[
    "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8", "binary", "ubinary", "int32", "int64"
]
"""And 127ths of a vector's largest entry (uint8: that + 128), packed bits (binary: those - 128), ids and offsets."""
ByteOrder: TypeAlias = Literal["native", "little", "big"]

FLOATS: Final[tuple[FloatType, ...]] = get_args(FloatType)
_CHUNK_ITEMS: Final = 2**16
"""Numbers that are converted at a time."""
_LARGEST: Final[Mapping[str, float]] = {
    # half a step above the largest number: from there on rounding would lead to infinity
    "float16": 65520.0,
    "bfloat16": float.fromhex("0x1.ffp+127"),
    "fp8_e4m3": 464.0,
    "fp8_e5m2": 61440.0,
}
_STORED: Final[Mapping[str, str]] = {
    "float32": "f4", "float16": "f2", "bfloat16": "u2", "fp8_e4m3": "u1", "fp8_e5m2": "u1", "int8": "i1", "uint8": "u1",
    "binary": "i1", "ubinary": "u1", "int32": "i4", "int64": "i8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class EncodedArray:
    """An array and the type in which it travels; it is converted on the way, some rows at a time.

    Raises InvalidRequest where the type cannot hold it; `name` says in the message what it is.
    """

    array: NDArray[Any]
    """float32, or of `int32` and `int64` that."""
    dtype: DType = "float32"
    order: ByteOrder = "little"
    name: str = "this"

    def __post_init__(self) -> None:
        if self.dtype in _LARGEST and self.array.size:
            largest = max(float(self.array.max()), -float(self.array.min()))
            if largest >= _LARGEST[self.dtype]:
                raise InvalidRequest(
                    f"{self.name} has numbers up to {largest:,.6g}, which {self.dtype} does not hold; ask for float32.",
                    param="embed_dtype",
                )
        if self.dtype in ("binary", "ubinary") and self.array.shape[-1] % 8:
            raise InvalidRequest(
                f"{self.name} has {self.array.shape[-1]} columns; packed bits take a multiple of 8.", param="embed_dtype"
            )

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """numpy's type of the same bytes, byte order included; bfloat16 are uint16, fp8 uint8."""
        return _stored(self.dtype, self.order)

    @property
    def shape(self) -> tuple[int, ...]:
        """As it travels: eight columns of bits are one."""
        *rows, columns = self.array.shape
        return (*rows, columns // 8) if self.dtype in ("binary", "ubinary") else self.array.shape

    @property
    def is_big(self) -> bool:
        """Whether the highest byte comes first."""
        return _mark(self.order) == ">"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.storage_dtype.itemsize

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: slice) -> EncodedArray:
        part = object.__new__(EncodedArray)  # what holds for all rows need not be checked again
        for name, value in zip(self.__slots__, (self.array[rows], self.dtype, self.order, self.name), strict=True):
            object.__setattr__(part, name, value)
        return part

    def encoded(self) -> NDArray[Any]:
        """All of it as it travels, contiguous."""
        codes = _ENCODE[self.dtype](self.array) if self.dtype in _ENCODE else self.array
        return np.ascontiguousarray(codes, self.storage_dtype)

    def numbers(self) -> NDArray[Any]:
        """What it reads back as, in this machine's byte order."""
        return self.array if self.dtype == "float32" else _decoded(replace(self, order="native").encoded(), self.dtype)

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes, row by row; a view of the array where nothing is to be converted."""
        if self._is_ready():
            yield _bytes_of(self.array)
            return
        step = max(1, _CHUNK_ITEMS // max(1, prod(self.array.shape[1:])))
        for start in range(0, len(self.array), step):
            yield _bytes_of(self[start : start + step].encoded())

    def _is_ready(self) -> bool:
        return self.array.flags.c_contiguous and self.array.dtype == self.storage_dtype and self.dtype not in _ENCODE


def from_bytes(data: bytes | memoryview, dtype: DType, shape: tuple[int, ...], order: ByteOrder = "little") -> NDArray[Any]:
    """What `Typed.pieces` wrote: float32, float16, int8, uint8 or integers as views of `data`, the rest as float32.

    Raises ValueError if it is not as long as the shape says.
    """
    return _decoded(np.frombuffer(data, _stored(dtype, order)).reshape(shape), dtype)


def to_int8(vectors_ND: Float32Array) -> NDArray[np.int8]:
    """Each vector divided by its largest entry, in 127ths: which keeps its direction and loses its length: for cosines."""
    largest_N1 = np.abs(vectors_ND).max(axis=-1, keepdims=True, initial=np.finfo(np.float32).tiny)
    return np.rint(vectors_ND / largest_N1 * np.float32(127)).astype(np.int8)


def to_bits(vectors_ND: Float32Array) -> NDArray[np.uint8]:
    """One bit for each entry: 1 if it is greater than 0. Eight columns to a byte, the first the highest; zeros at the end."""
    return np.packbits(vectors_ND > 0, axis=-1)


def to_bfloat16(array: Float32Array) -> NDArray[np.uint16]:
    """The upper halves of float32, rounded."""
    codes = np.ascontiguousarray(array).view(np.uint32)
    return ((codes + (np.uint32(0x7FFF) + ((codes >> 16) & 1))) >> 16).astype(np.uint16)


def _to_fp8(array: Float32Array, kind: str) -> NDArray[np.uint8]:
    codes = np.searchsorted(_fp8(kind)[1], np.abs(array)).astype(np.uint8)
    return codes | np.packbits(np.signbit(array)[..., None], axis=-1)[..., 0]


@cache
def _fp8(kind: str) -> tuple[Float32Array, Float32Array]:
    """The numbers of all codes, and for each positive one the greatest float32 that is rounded to it."""
    mantissa = {"fp8_e4m3": 3, "fp8_e5m2": 2}[kind]
    bias, last = {"fp8_e4m3": (7, 0x7E), "fp8_e5m2": (15, 0x7B)}[kind]
    codes: NDArray[np.int32] = np.arange(128, dtype=np.int32)
    exponents, fractions = codes >> mantissa, (codes & (2**mantissa - 1)) / 2**mantissa
    wholes = np.minimum(exponents, 1)  # of the numbers next to 0 none
    numbers: Float32Array = ((wholes + fractions) * 2.0 ** (exponents + 1 - wholes - bias)).astype(np.float32)
    middles: Float32Array = (numbers[:last] + numbers[1 : last + 1]) / np.float32(2)
    middles[1::2] = np.nextafter(middles[1::2], np.float32(0))  # from an odd code up to an even one
    numbers[last + 1 :] = np.nan
    if kind == "fp8_e5m2":
        numbers[last + 1] = np.inf
    return np.concatenate([numbers, -numbers]), middles


_ENCODE: Final[Mapping[str, Callable[[Float32Array], NDArray[Any]]]] = {
    "bfloat16": to_bfloat16,
    "fp8_e4m3": lambda array: _to_fp8(array, "fp8_e4m3"),
    "fp8_e5m2": lambda array: _to_fp8(array, "fp8_e5m2"),
    "int8": to_int8,
    "uint8": lambda array: to_int8(array).view(np.uint8) ^ np.uint8(128),
    "binary": lambda array: (to_bits(array) ^ np.uint8(128)).view(np.int8),
    "ubinary": to_bits,
}


def _decoded(stored: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return _fp8(dtype)[0][stored] if dtype.startswith("fp8") else stored


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


@cache
def _stored(dtype: DType, order: ByteOrder) -> np.dtype[Any]:
    return np.dtype(_STORED[dtype]).newbyteorder(_mark(order))


def _mark(order: ByteOrder) -> Literal["<", ">"]:
    return ">" if (sys.byteorder if order == "native" else order) == "big" else "<"
