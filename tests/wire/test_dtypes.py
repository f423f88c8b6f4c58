"""Round trips of every number type, byte order and container, and the rounding of PyTorch."""

from __future__ import annotations

import base64
import io
import sys
from unittest.mock import patch

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vectors import TORCH_DTYPES
from whimbrel.errors import InvalidRequest
from whimbrel.wire import json_base64
from whimbrel.wire.dtypes import ByteOrder, DType, EncodedArray, from_bytes, to_int8
from whimbrel.wire.json_base64 import Base64, LazyList, base64_rows, json_chunks, to_base64, to_json
from whimbrel.wire.raw import Block, join_blocks, npy_chunks, read_blocks

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-400, max_value=400)
VECTORS = arrays(np.float32, st.tuples(st.integers(1, 5), st.sampled_from([8, 16, 24])), elements=FINITE)
EIGHTS = ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8", "binary", "ubinary"]
ORDERS = ["native", "little", "big"]


def sent(array: EncodedArray) -> bytes:
    return b"".join(array.chunks())


@given(VECTORS, st.sampled_from(EIGHTS), st.sampled_from(ORDERS))
def test_what_is_written_reads_back(vectors: np.ndarray, dtype: DType, order: ByteOrder) -> None:
    array = EncodedArray(vectors, dtype, order)
    data = sent(array)
    assert len(data) == array.nbytes
    back = from_bytes(data, dtype, array.shape, order)
    assert np.array_equal(back, array.numbers())
    if dtype == "float32":
        assert np.array_equal(back.astype("=f4").view(np.uint32), vectors.view(np.uint32))


@given(VECTORS, st.sampled_from(EIGHTS[:5]), st.sampled_from(ORDERS))
def test_base64_has_the_same_bytes(vectors: np.ndarray, dtype: DType, order: ByteOrder) -> None:
    array = EncodedArray(vectors, dtype, order)
    stand_ins = [Base64(array[row : row + 1]) for row in range(len(vectors))]
    assert orjson.loads(to_json(stand_ins)) == to_base64(array) == base64_rows(array)
    decoded = b"".join(base64.b64decode(each) for each in to_base64(array))
    assert np.array_equal(from_bytes(decoded, dtype, array.shape, order), array.numbers())


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
def test_rounding_is_that_of_pytorch(dtype: DType) -> None:
    """Random numbers of all sizes, all that lie half-way between two, and their neighbours."""
    torch.manual_seed(0)
    random = (torch.randn(100_000) * torch.exp2(torch.randint(-24, 9, (100_000,)))).clamp(-440, 440)
    codes = torch.arange(0x7E if dtype.startswith("fp8") else 0x5E00)
    exact = codes.to(torch.uint8 if dtype.startswith("fp8") else torch.int16).view(TORCH_DTYPES[dtype]).float()
    exact = exact[exact.isfinite() & (exact.abs() < 440)]
    middles = (exact[:-1].double() + exact[1:].double()).div(2).float()
    around = [torch.nextafter(middles, torch.tensor(limit)) for limit in (-1e9, 1e9)]
    numbers = torch.cat([random, exact, middles, -middles, *around])
    assert np.array_equal(EncodedArray(numbers.numpy(), dtype).numbers(), numbers.to(TORCH_DTYPES[dtype]).float().numpy())


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float16", 65519), ("bfloat16", 3.39e38), ("fp8_e4m3", 463), ("fp8_e5m2", 61439)]
)
def test_what_a_type_cannot_hold_is_refused(dtype: DType, largest: float) -> None:
    kept = EncodedArray(np.array([[1, -largest]], np.float32), dtype).numbers()
    assert np.isfinite(kept).all()
    with pytest.raises(InvalidRequest, match=f"dense has numbers up to .* {dtype} does not hold") as caught:
        EncodedArray(np.array([[1, -largest * 1.003]], np.float32), dtype, name="dense")
    assert caught.value.param == "embed_dtype"
    with pytest.raises(InvalidRequest, match="9 columns; packed bits take a multiple of 8"):
        EncodedArray(np.ones((2, 9), np.float32), "ubinary")


def test_quantised_types_are_shifted_ones_of_each_other() -> None:
    vectors = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    numbers = {dtype: EncodedArray(vectors, dtype).numbers().astype(int) for dtype in ("int8", "uint8", "binary", "ubinary")}
    assert np.array_equal(numbers["uint8"], numbers["int8"] + 128)
    assert np.array_equal(numbers["binary"], numbers["ubinary"] - 128)
    assert np.array_equal(numbers["int8"], to_int8(vectors))


def test_nothing_is_copied_that_need_not_be() -> None:
    vectors = np.ones((300, 700), np.float32)
    (piece,) = EncodedArray(vectors).chunks()
    assert np.shares_memory(np.frombuffer(piece, np.uint8), vectors)
    back = from_bytes(piece, "float32", vectors.shape)
    assert np.shares_memory(back, vectors)
    assert max(map(len, EncodedArray(vectors, "float16").chunks())) <= 2 * 2**16  # converted some rows at a time
    assert sent(EncodedArray(vectors[:, ::2])) == vectors[:, ::2].tobytes()
    assert sent(EncodedArray(vectors[:0])) == b""


@given(VECTORS, st.integers(0, 3), st.sampled_from(["float32", "bfloat16", "int8", "ubinary"]), st.sampled_from(ORDERS))
def test_blocks_read_back(vectors: np.ndarray, number: int, dtype: DType, order: ByteOrder) -> None:
    arrays = {
        "a": EncodedArray(vectors[:, :8], dtype, order),
        "ids": EncodedArray(np.arange(number, dtype=np.int32), "int32", order),
        "offsets": EncodedArray(np.array([0, number]), "int64", order),
        "b": EncodedArray(vectors, dtype, order),
    }
    blocks, size, pieces = join_blocks(arrays)
    body = b"".join(pieces)
    assert len(body) == size
    assert all(block.start % 8 == 0 for block in blocks)
    assert blocks[0].endianness == (sys.byteorder if order == "native" else order)
    back = read_blocks([Block(*(getattr(each, name) for name in Block.__struct_fields__)) for each in blocks], body)
    assert list(back) == list(arrays)
    assert all(np.array_equal(back[name], array.numbers()) for name, array in arrays.items())


@given(VECTORS, st.sampled_from(EIGHTS), st.sampled_from(ORDERS))
def test_npy_is_what_numpy_loads(vectors: np.ndarray, dtype: DType, order: ByteOrder) -> None:
    array = EncodedArray(vectors, dtype, order)
    size, pieces = npy_chunks(array)
    data = b"".join(pieces)
    assert len(data) == size
    loaded = np.load(io.BytesIO(data))
    assert loaded.tobytes() == sent(array)
    assert loaded.shape == array.shape
    if not dtype.startswith(("bf", "fp8")):
        assert np.array_equal(loaded, array.numbers())


# JSON in pieces

VALUES = st.recursive(
    st.integers(-5, 5) | st.text(max_size=3) | st.integers(0, 70_000).map(lambda size: np.arange(size, dtype=np.float32)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=6,
)


MADE = (
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(
        lambda shape: EncodedArray(np.ones(shape, np.float32)[::-1], "bfloat16", "big")
    )
    | st.integers(0, 30).map(lambda width: Base64(EncodedArray(np.ones((2, width), np.float32))))
    | st.integers(0, 30).map(lambda size: np.arange(size, dtype=np.float32)[::2])
    | st.text(max_size=200)
    | st.none()
)
NESTED = st.recursive(
    MADE,
    lambda inner: st.lists(inner, max_size=6) | st.lists(inner, max_size=6).map(LazyList) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_pieces_are_the_same_json(value: object) -> None:
    assert b"".join(json_chunks(value)) == to_json(value)


@given(NESTED, st.sampled_from([0, 1, 6, 20]), st.sampled_from([1, 10, 100]))
def test_pieces_of_any_size_are_the_same_json(value: object, at_once: int, least: int) -> None:
    with patch.object(json_base64, "_CHUNK_ITEMS", at_once), patch.object(json_base64, "_MIN_CHUNK_BYTES", least):
        pieces = list(json_chunks(value))
    assert b"".join(pieces) == to_json(value)
    assert all(len(piece) >= least for piece in pieces[:-1])


@pytest.mark.parametrize(
    "value",
    [
        {
            "data": [
                {"index": i, "embedding": row} for i, row in enumerate(np.random.default_rng(0).random((300, 700), np.float32))
            ]
        },
        np.random.default_rng(0).random((4000, 100), np.float32),
        [np.random.default_rng(0).random((size, 64), np.float32) for size in (0, 4000, 1, 9)],
        {"a": EncodedArray(np.random.default_rng(0).random((2000, 128), np.float32), "int8")},
        [Base64(EncodedArray(np.random.default_rng(0).random((50, 1024), np.float32), "bfloat16")) for _ in range(30)],
    ],
    ids=["rows", "array", "ragged", "int8", "base64"],
)
def test_no_piece_is_large(value: object) -> None:
    pieces = list(json_chunks(value))
    assert b"".join(pieces) == to_json(value)
    assert len(pieces) > 2
    assert max(map(len, pieces)) < 2**20


def test_unknown_things_are_not_json() -> None:
    with pytest.raises(TypeError, match="not JSON serializable: set"):
        to_json({"a": {1}})
    assert to_json(np.arange(6, dtype=np.float32)[::2]) == b"[0.0,2.0,4.0]"
