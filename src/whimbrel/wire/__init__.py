"""Encoding of arrays as JSON, base64, raw bytes, npy and Arrow, in number types down to one bit.

It needs numpy, ml_dtypes, orjson, pybase64 and msgspec only. It makes no Python object per float and no copy before encoding.
"""

from __future__ import annotations

from whimbrel.wire.dtypes import FLOATS, ByteOrder, DType, EncodedArray, FloatType, from_bytes, to_bits, to_int8
from whimbrel.wire.json_base64 import (
    STREAM_ABOVE,
    Base64,
    LazyList,
    base64_list,
    base64_rows,
    from_base64,
    json_chunks,
    number_rows,
    to_base64,
    to_json,
)
from whimbrel.wire.raw import Block, join_blocks, npy_chunks, read_blocks

__all__ = [
    "FLOATS",
    "STREAM_ABOVE",
    "Base64",
    "Block",
    "ByteOrder",
    "DType",
    "EncodedArray",
    "FloatType",
    "LazyList",
    "base64_list",
    "base64_rows",
    "from_base64",
    "from_bytes",
    "join_blocks",
    "json_chunks",
    "npy_chunks",
    "number_rows",
    "read_blocks",
    "to_base64",
    "to_bits",
    "to_int8",
    "to_json",
]  # fmt: skip
