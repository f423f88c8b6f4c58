"""Numbers in fewer bits: torch's, bit for bit, and read back by it."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whimbrel.dialects.embed_dtype import EmbedDtype, encoded
from whimbrel.errors import InvalidRequest

TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
LARGEST = {name: float(torch.finfo(dtype).max) for name, dtype in TORCH.items()}
BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def by_torch(array: Any, dtype: str) -> Any:
    """The bits as torch makes them, in this machine's order."""
    converted = torch.from_numpy(array).to(TORCH[dtype])
    return converted.view(BITS[converted.itemsize]).numpy()


@pytest.mark.parametrize("dtype", get_args(EmbedDtype))
def test_all_bits_are_those_of_torch(dtype: EmbedDtype) -> None:
    """Of numbers of all sizes, and of every number between two of the type: their middle, and what is next to it."""
    size = {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)
    every = torch.arange(256 if size == 1 else 2**16).to(BITS[min(size, 2)] if size < 4 else torch.int16)
    exact = (every.view(TORCH[dtype]) if size < 4 else every.view(torch.bfloat16)).to(torch.float32).numpy()
    exact = np.unique(exact[np.isfinite(exact)])
    middles = (exact[1:] * np.float32(0.5) + exact[:-1] * np.float32(0.5)).astype(np.float32)
    drawn = np.random.default_rng(1).standard_normal(10_000).astype(np.float32) * 3
    more = [exact, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf)), drawn, -drawn]
    numbers = np.concatenate([*more, np.array([0.0, -0.0, 1e-45, -1e-45], np.float32)])
    numbers = numbers[np.abs(numbers) <= LARGEST[dtype]]
    assert np.array_equal(encoded(numbers, dtype).view(by_torch(numbers, dtype).dtype), by_torch(numbers, dtype))


@given(
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=2), elements=st.floats(-448, 448, width=32)),
    st.sampled_from(get_args(EmbedDtype)),
)
def test_the_order_of_bytes(array: Any, dtype: EmbedDtype) -> None:
    little, big = encoded(array, dtype, "little"), encoded(array, dtype, "big")
    assert little.shape == big.shape == array.shape
    assert little.tobytes() == encoded(array, dtype).tobytes() == big.byteswap().tobytes()
    assert little.tolist() == big.tolist()
    back = torch.frombuffer(bytearray(little.tobytes()), dtype=TORCH[dtype]).to(torch.float32).numpy().reshape(array.shape)
    again = torch.from_numpy(array).to(TORCH[dtype]).to(torch.float32).numpy()
    assert np.array_equal(back.view(np.int32), again.view(np.int32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_no_infinities_are_made_of_numbers(dtype: EmbedDtype) -> None:
    largest = np.array([LARGEST[dtype], -LARGEST[dtype]], np.float32)
    assert np.array_equal(encoded(largest, dtype).view(by_torch(largest, dtype).dtype), by_torch(largest, dtype))
    with pytest.raises(InvalidRequest, match=dtype) as caught:
        encoded(np.nextafter(largest, largest * np.float32(np.inf)), dtype)
    assert caught.value.param == "embed_dtype"


def test_nothing_is_encoded_to_nothing() -> None:
    for dtype in get_args(EmbedDtype):
        assert encoded(np.empty((0, 3), np.float32), dtype).shape == (0, 3)
