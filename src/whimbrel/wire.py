"""Arrays <-> what travels: JSON floats, base64. numpy only; no Python object per float, no copy before encoding.

On the wire floats are float32, little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from whimbrel.types import Float32Array

_WIRE_FLOAT = np.dtype("<f4")


def to_json(value: object) -> bytes:
    """JSON of `value`; arrays in it are printed from their memory, each float as the shortest text that reads back equal.

    The caller has made sure that arrays are finite: JSON knows no NaN, and orjson would write null.
    """
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def to_base64(vectors_ND: Float32Array) -> list[str]:
    """Each row's bytes as base64."""
    rows = np.ascontiguousarray(vectors_ND, _WIRE_FLOAT)
    return [pybase64.b64encode_as_string(row.data) for row in rows]


def to_int8(vectors_ND: Float32Array) -> NDArray[np.int8]:
    """Each vector divided by its largest entry, in 127ths: which keeps its direction and loses its length: for cosines."""
    largest_N1 = np.abs(vectors_ND).max(axis=1, keepdims=True, initial=np.finfo(np.float32).tiny)
    return np.rint(vectors_ND / largest_N1 * np.float32(127)).astype(np.int8)


def to_bits(vectors_ND: Float32Array) -> NDArray[np.uint8]:
    """One bit for each entry: 1 if it is greater than 0. Eight columns to a byte, the first the highest; zeros at the end."""
    return np.packbits(vectors_ND > 0, axis=1)


def from_base64(rows: Sequence[str | bytes]) -> Float32Array:
    """The inverse of `to_base64`: rows of equal width -> (N, D). Raises ValueError for anything else."""
    if not rows:
        return np.empty((0, 0), np.float32)
    decoded = [pybase64.b64decode(row, validate=True) for row in rows]
    if len({len(row) for row in decoded}) != 1 or not decoded[0]:
        raise ValueError("rows of unequal width, or empty")
    return np.frombuffer(b"".join(decoded), _WIRE_FLOAT).reshape(len(rows), -1).astype(np.float32, copy=False)
