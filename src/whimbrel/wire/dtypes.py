"""Conversion between float32 and the number types of responses.

Numbers round to the nearest value of the type, and ties to even. A number beyond the largest value of a type is refused before
anything is sent, so no finite number becomes an infinity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any, Final, Literal, TypeAlias, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array

FloatType: TypeAlias = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
"""Floating-point types by vLLM's names. fp8_e4m3 is the variant without infinities (`float8_e4m3fn`)."""
DType: TypeAlias = Literal[FloatType, "int8", "uint8", "binary", "ubinary", "int32", "int64"]
"""int8 holds 127ths of a vector's largest entry, uint8 the same plus 128. ubinary holds packed bits, binary the same minus 128.
int32 and int64 are for ids and offsets."""
ByteOrder: TypeAlias = Literal["native", "little", "big"]

FLOATS: Final[tuple[FloatType, ...]] = get_args(FloatType)
_CHUNK_ITEMS: Final = 2**16
_LARGEST: Final[Mapping[str, float]] = {
    # half a step above the largest number, where rounding would start to give infinity
    "float16": 65520.0,
    "bfloat16": float.fromhex("0x1.ffp+127"),
    "fp8_e4m3": 464.0,
    "fp8_e5m2": 61440.0,
}
_STORAGE: Final[Mapping[str, str]] = {
    "float32": "f4", "float16": "f2", "bfloat16": "u2", "fp8_e4m3": "u1", "fp8_e5m2": "u1", "int8": "i1", "uint8": "u1",
    "binary": "i1", "ubinary": "u1", "int32": "i4", "int64": "i8",
}  # fmt: skip
_ML_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True, slots=True, eq=False)
class EncodedArray:
    """An array and the type to send it in: it is converted while it is sent, some rows at a time. Raises InvalidRequest."""

    array: NDArray[Any]
    """Numbers: float32, or integers where `dtype` is int32 or int64."""
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
        """The numpy type of the sent bytes, with their byte order. bfloat16 is uint16 and fp8 is uint8."""
        return _storage_dtype(self.dtype, self.order)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sent shape. Eight columns of packed bits are one column."""
        *rows, columns = self.array.shape
        return (*rows, columns // 8) if self.dtype in ("binary", "ubinary") else self.array.shape

    @property
    def is_big(self) -> bool:
        return _byte_order_mark(self.order) == ">"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.storage_dtype.itemsize

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: slice) -> EncodedArray:
        part = object.__new__(EncodedArray)  # skips the checks, which have passed for all rows
        for name, value in zip(self.__slots__, (self.array[rows], self.dtype, self.order, self.name), strict=True):
            object.__setattr__(part, name, value)
        return part

    def encoded(self) -> NDArray[Any]:
        """Return the whole array in its sent type, contiguous."""
        codes = _ENCODE[self.dtype](self.array) if self.dtype in _ENCODE else self.array
        return np.ascontiguousarray(codes, self.storage_dtype)

    def numbers(self) -> NDArray[Any]:
        """Return the numbers that a reader decodes, in native byte order."""
        return self.array if self.dtype == "float32" else _decode(replace(self, order="native").encoded(), self.dtype)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes in row order. Without a conversion the only chunk is a view of the array."""
        if self.array.flags.c_contiguous and self.array.dtype == self.storage_dtype and self.dtype not in _ENCODE:
            yield _byte_view(self.array)
            return
        step = max(1, _CHUNK_ITEMS // max(1, prod(self.array.shape[1:])))
        for start in range(0, len(self.array), step):
            yield _byte_view(self[start : start + step].encoded())


def from_bytes(data: bytes | memoryview, dtype: DType, shape: tuple[int, ...], order: ByteOrder = "little") -> NDArray[Any]:
    """Decode the bytes of `EncodedArray.chunks`. bfloat16 and fp8 become float32; other types are views of `data`. Raises
    ValueError if the length of `data` does not fit `shape`.
    """
    return _decode(np.frombuffer(data, _storage_dtype(dtype, order)).reshape(shape), dtype)


def to_int8(vectors_ND: Float32Array) -> NDArray[np.int8]:
    """Quantise each vector to 127ths of its largest absolute entry. Cosines survive, lengths do not."""
    largest_N1 = np.abs(vectors_ND).max(axis=-1, keepdims=True, initial=np.finfo(np.float32).tiny)
    return np.rint(vectors_ND / largest_N1 * np.float32(127)).astype(np.int8)


def to_bits(vectors_ND: Float32Array) -> NDArray[np.uint8]:
    """Pack one bit per entry, 1 if it is positive. The first of eight columns is the highest bit; missing columns are 0."""
    return np.packbits(vectors_ND > 0, axis=-1)


def _to_ml_dtype(dtype: str, array: Float32Array) -> NDArray[Any]:
    return array.astype(_ML_DTYPES[dtype]).view(_STORAGE[dtype])


_ENCODE: Final[Mapping[str, Callable[[Float32Array], NDArray[Any]]]] = {
    **{dtype: partial(_to_ml_dtype, dtype) for dtype in _ML_DTYPES},
    "int8": to_int8,
    "uint8": lambda array: to_int8(array).view(np.uint8) ^ np.uint8(128),
    "binary": lambda array: (to_bits(array) ^ np.uint8(128)).view(np.int8),
    "ubinary": to_bits,
}


def _decode(codes: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":
        return codes.astype("u2", copy=False).view(_ML_DTYPES[dtype]).astype(np.float32)
    return _fp8_values(dtype)[codes] if dtype in _ML_DTYPES else codes


@cache
def _fp8_values(dtype: str) -> Float32Array:
    return np.arange(256, dtype=np.uint8).view(_ML_DTYPES[dtype]).astype(np.float32)


def _byte_view(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


@cache
def _storage_dtype(dtype: DType, order: ByteOrder) -> np.dtype[Any]:
    return np.dtype(_STORAGE[dtype]).newbyteorder(_byte_order_mark(order))


def _byte_order_mark(order: ByteOrder) -> Literal["<", ">"]:
    return ">" if (sys.byteorder if order == "native" else order) == "big" else "<"
