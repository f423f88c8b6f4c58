"""Arrays <-> bytes that lie one after another, and npy.

Of several arrays each begins at a multiple of eight bytes, with zeros before it, so that they may be read in place.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from whimbrel.wire.dtypes import ByteOrder, DType, EncodedArray, from_bytes

_ALIGN: Final = 8


class Block(msgspec.Struct, frozen=True):
    """Where an array lies, and what it is."""

    name: str
    dtype: DType
    endianness: ByteOrder
    shape: tuple[int, ...]
    start: int
    end: int
    """One after its last byte."""


def join_blocks(arrays: Mapping[str, EncodedArray]) -> tuple[list[Block], int, Iterator[bytes | memoryview]]:
    """What is where, the number of bytes, and these."""
    blocks: list[Block] = []
    end = 0
    for name, array in arrays.items():
        start = -(-end // _ALIGN) * _ALIGN
        end = start + array.nbytes
        blocks.append(Block(name, array.dtype, "big" if array.is_big else "little", array.shape, start, end))
    return blocks, end, _joined(blocks, list(arrays.values()))


def _joined(blocks: Sequence[Block], arrays: Sequence[EncodedArray]) -> Iterator[bytes | memoryview]:
    end = 0
    for block, array in zip(blocks, arrays, strict=True):
        yield bytes(block.start - end)
        yield from array.chunks()
        end = block.end


def read_blocks(blocks: Sequence[Block], body: bytes | memoryview) -> dict[str, NDArray[Any]]:
    """What `join_blocks` joined, as views of `body` where numpy knows the type. Raises ValueError."""
    data = memoryview(body)
    for each in blocks:
        if not 0 <= each.start <= each.end <= len(data) or min(each.shape, default=0) < 0:
            raise ValueError(f"{each.name} is said to lie in bytes {each.start} to {each.end} of {len(data)}")
    return {each.name: from_bytes(data[each.start : each.end], each.dtype, each.shape, each.endianness) for each in blocks}


def npy_chunks(array: EncodedArray) -> tuple[int, Iterator[bytes | memoryview]]:
    """The number of bytes of a file that `numpy.load` reads, and these. bfloat16 and fp8 are void, as ml_dtypes saves them."""
    head = io.BytesIO()
    void = array.dtype == "bfloat16" or array.dtype.startswith("fp8")
    np.lib.format.write_array_header_1_0(
        head,
        {
            "descr": f"|V{array.storage_dtype.itemsize}" if void else array.storage_dtype.str,
            "fortran_order": False,
            "shape": array.shape,
        },
    )
    return head.tell() + array.nbytes, chain([head.getvalue()], array.chunks())


def read_npy(data: bytes | memoryview) -> NDArray[Any]:
    """The array of a file of the first version of the format, as a view. Raises ValueError."""
    file = io.BytesIO(data[: 2**16])
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("no npy of version 1.0")
    shape, fortran, kind = np.lib.format.read_array_header_1_0(file)
    return np.frombuffer(data, kind, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
