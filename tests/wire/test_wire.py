from __future__ import annotations

import base64
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from whimbrel.wire import json_base64
from whimbrel.wire.dtypes import FLOATS, ByteOrder, DType, EncodedArray, to_bits, to_int8
from whimbrel.wire.json_base64 import base64_list, from_base64, to_base64, to_json

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=FINITE)


@given(VECTORS)
def test_base64_comes_back_bit_for_bit(vectors: np.ndarray) -> None:
    assert np.array_equal(from_base64(to_base64(vectors)).view(np.uint32), vectors.view(np.uint32))


@given(VECTORS)
def test_json_floats_come_back_bit_for_bit(vectors: np.ndarray) -> None:
    assert np.array_equal(np.array(orjson.loads(to_json(vectors)), np.float32), vectors)


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (16, 3), (17, 5), (101, 384), (1001, 2), (2500, 1), (130, 4100)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "fp8_e4m3"])
def test_a_list_of_base64_is_what_json_would_be(shape: tuple[int, int], dtype: DType) -> None:
    vectors = EncodedArray(np.random.default_rng(0).standard_normal(shape, np.float32), dtype, "big")
    size, made = base64_list(b'{"head":1,"list":', vectors, b',"tail":2}', before=b'{"index":%d,"row":"', after=b'"}')
    pieces = list(made)
    expected = [{"index": i, "row": base64.b64encode(row).decode()} for i, row in enumerate(vectors.encoded())]
    assert b"".join(pieces) == to_json({"head": 1, "list": expected, "tail": 2})
    assert sum(map(len, pieces)) == size
    assert len(pieces) == 1 or max(map(len, pieces)) < 2**21


@given(
    st.integers(0, 40),
    st.integers(1, 9),
    st.sampled_from(
        [np.asfortranarray, lambda a: a[::-1, ::-1], lambda a: a[::3], lambda a: a.astype(">f4"), np.ascontiguousarray]
    ),
    st.sampled_from(FLOATS),
    st.sampled_from(["big", "little"]),
    st.sampled_from([1, 50, 2**20]),
)
def test_a_list_of_base64_is_the_same_however_an_array_lies_and_is_cut_up(
    rows: int, width: int, lay: Any, dtype: DType, order: ByteOrder, at_once: int
) -> None:
    vectors = EncodedArray(lay(np.random.default_rng(0).standard_normal((rows, width), np.float32)), dtype, order)
    expected = b",".join(b"<%d:%b>" % (index, base64.b64encode(row)) for index, row in enumerate(vectors.encoded()))
    with patch.object(json_base64, "_CHUNK_BYTES", at_once):
        size, pieces = base64_list(b"", vectors, b"", before=b"<%d:", after=b">")
        assert b"".join(pieces) == b"[%b]" % expected
    assert size == len(expected) + 2


def test_base64_is_of_little_endian_float32() -> None:
    vectors = np.array([[1.0, -2.5]], np.float32)
    assert base64.b64decode(to_base64(vectors)[0]) == b"\x00\x00\x80?\x00\x00 \xc0"
    assert to_base64(vectors[:, ::-1]) == to_base64(np.ascontiguousarray(vectors[:, ::-1]))


def test_nothing_is_decoded_as_nothing() -> None:
    assert from_base64([]).shape == (0, 0)


@pytest.mark.parametrize(
    "rows", [["AACAPwAAAEA=", "AABAQAAAgEAAAKBAAADAQA=="], ["", ""], ["AAAA"], ["not base64!"], ["AACAPw==", "AACAP"]]
)
def test_broken_base64_is_an_error(rows: list[str]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (of binascii or numpy)
        from_base64(rows)


def test_quantised_vectors_keep_their_direction() -> None:
    vectors = np.random.default_rng(0).standard_normal((50, 384)).astype(np.float32)
    int8 = to_int8(vectors)
    assert (np.abs(int8).max(axis=1) == 127).all()
    cosines = (int8 * vectors).sum(axis=1) / np.linalg.norm(int8.astype(float), axis=1) / np.linalg.norm(vectors, axis=1)
    assert cosines.min() > 0.9999
    assert not to_int8(np.zeros((2, 8), np.float32)).any()
    assert to_int8(np.zeros((0, 8), np.float32)).shape == (0, 8)


def test_bits_say_what_is_greater_than_zero() -> None:
    assert to_bits(np.array([[1, -1, 0, 2, 0, 0, 0, 1e-30, 5]], np.float32)).tolist() == [[0b10010001, 0b10000000]]
