"""Vectors of any float32, and readers of the answers that hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from whimbrel.dialects import Response

EVERY_FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)
"""With those next to 0, -0.0 and the largest."""


def vectors(count: int, width: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float32, (count, width), elements=EVERY_FLOAT)


def body_of(answer: bytes | Response) -> bytes:
    return answer if isinstance(answer, bytes) else b"".join(answer.chunks)


def told(answer: bytes | Response) -> Any:
    """Return the content of an answer in JSON."""
    return orjson.loads(body_of(answer))


def same_bits(found: Any, expected: np.ndarray) -> bool:
    """True if the numbers read back are these, -0.0 told from 0."""
    array = np.array(found, np.float32).reshape(expected.shape)
    return np.array_equal(array.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def codes_of(kind: str, rows: np.ndarray) -> np.ndarray:
    """Return the codes of vectors in int8, uint8, binary or ubinary, computed one by one."""
    if kind in ("binary", "ubinary"):
        bits = (rows > 0).reshape(len(rows), -1, 8)
        return (bits * 2 ** np.arange(7, -1, -1)).sum(-1) - 128 * (kind == "binary")
    largest = np.maximum(np.abs(rows).max(1, keepdims=True), np.finfo(np.float32).tiny)
    return np.rint(rows / largest * np.float32(127)).astype(np.int64) + 128 * (kind == "uint8")


def is_read_back(kind: str, numbers: Any, rows: np.ndarray) -> bool:
    """True if these are the rows in a type as Cohere, Voyage and Jina name it: floats bit for bit."""
    return same_bits(numbers, rows) if kind in ("float", "base64") else np.array_equal(numbers, codes_of(kind, rows))


TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
