"""Raw bytes of several arrays in one body, and the npy file format.

Each array begins at a multiple of eight bytes, after zeros, so that readers can use it in place.
"""

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
    name: str
    dtype: DType
    endianness: ByteOrder
    shape: tuple[int, ...]
    start: int
    end: int


def join_blocks(arrays: Mapping[str, EncodedArray]) -> tuple[list[Block], int, Iterator[bytes | memoryview]]:
    """Return the places of the arrays, the size of the body in bytes, and its chunks."""
    blocks: list[Block] = []
    end = 0
    for name, array in arrays.items():
        start = -(-end // _ALIGN) * _ALIGN
        end = start + array.nbytes
        blocks.append(Block(name, array.dtype, "big" if array.is_big else "little", array.shape, start, end))
    return blocks, end, _block_chunks(blocks, list(arrays.values()))


def _block_chunks(blocks: Sequence[Block], arrays: Sequence[EncodedArray]) -> Iterator[bytes | memoryview]:
    end = 0
    for block, array in zip(blocks, arrays, strict=True):
        yield bytes(block.start - end)
        yield from array.chunks()
        end = block.end


def read_blocks(blocks: Sequence[Block], body: bytes | memoryview) -> dict[str, NDArray[Any]]:
    """Return the arrays of a body from `join_blocks`, as views of it where numpy has the type. Raises ValueError."""
    data = memoryview(body)
    for each in blocks:
        if not 0 <= each.start <= each.end <= len(data) or min(each.shape, default=0) < 0:
            raise ValueError(f"{each.name} is said to lie in bytes {each.start} to {each.end} of {len(data)}")
    return {each.name: from_bytes(data[each.start : each.end], each.dtype, each.shape, each.endianness) for each in blocks}


def npy_chunks(array: EncodedArray) -> tuple[int, Iterator[bytes | memoryview]]:
    """Return the size and the chunks of a file for `numpy.load`. bfloat16 and fp8 are void types, as ml_dtypes saves them."""
    header = io.BytesIO()
    is_void = array.dtype == "bfloat16" or array.dtype.startswith("fp8")
    descr = f"|V{array.storage_dtype.itemsize}" if is_void else array.storage_dtype.str
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": array.shape})
    return header.tell() + array.nbytes, chain([header.getvalue()], array.chunks())
