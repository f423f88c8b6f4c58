"""Stored vectors: vectors that a caller sends in place of texts. numpy only.

The vectors of a text are a dense vector (D,), token vectors (T, D), or the entries and the weights of a sparse vector. float32
and float16 are used as they are; float64 becomes float32. int8 counts 127ths. uint8 holds bits, 8 columns to a byte, the
highest bit first; each stands for 1 or -1, divided by the root of the width. Both represent vectors of norm 1.

Shapes: N texts, X their rows, D columns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest, Location
from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.request import OutputName
from whimbrel.types.result import Ragged, Sparse


@dataclass(frozen=True, slots=True, eq=False)
class StoredVectors:
    """Stored vectors of several texts, of one dtype: text i has rows offsets_N1[i] to offsets_N1[i + 1]."""

    rows_XD: NDArray[Any]
    """Rows of float32, float16, int8 or uint8 (bits); for sparse vectors the weights (X, 1)."""
    offsets_N1: Int64Array
    ids_X: Int32Array | None = None
    """Entries of sparse vectors, ascending within a text; None: not sparse."""

    def __len__(self) -> int:
        return self.offsets_N1.size - 1

    @property
    def arrays(self) -> list[NDArray[Any]]:
        return [self.offsets_N1, self.rows_XD, *([] if self.ids_X is None else [self.ids_X])]


_TYPES: Final = ("float32", "float16", "int8", "uint8")
_STEPS: Final = 127
_ROWS: Final[dict[OutputName, int]] = {"dense": 1, "multi_vector": 2}
"""Number of dimensions of one text's array."""
_OBJECTS: Final = "OUT"
"""Dtype kinds of arrays of Python objects or strings."""


def as_vector_list(value: object, output: OutputName) -> list[Any] | None:
    """Return the vectors of each text from an array or a verb's result; None for other values."""
    if isinstance(value, Ragged | Sparse):
        return [value[index] for index in range(len(value))]
    if isinstance(value, np.ndarray):
        array = cast(NDArray[Any], value)
        if array.ndim == 1 and array.dtype.kind in _OBJECTS:
            return array.tolist()  # an array of texts or of arrays
        return [array] if array.ndim <= _ROWS.get(output, 1) else list(array)
    return [value] if output == "sparse" and _is_sparse(value) else None


def store_vectors(
    vectors: Sequence[object], locations: Sequence[Location], output: OutputName, width: int
) -> tuple[tuple[StoredVectors, ...], Int32Array]:
    """Concatenate the vectors of texts by dtype. Return them, and the position of each text among them. `width` is the number
    of columns, or the size of the vocabulary. Raises InvalidRequest.
    """
    texts = list[tuple[NDArray[Any], Int32Array | None]]()
    for each, location in zip(vectors, locations, strict=True):
        try:
            texts.append(_read(each, output, width))
        except InvalidRequest as error:
            raise error.at(location) from None
    by_dtype: dict[str, list[int]] = {}
    for index, (rows, _) in enumerate(texts):
        by_dtype.setdefault(rows.dtype.name, []).append(index)
    blocks: list[StoredVectors] = []
    positions_N = np.empty(len(texts), np.int32)
    before = 0
    for indices in by_dtype.values():
        rows, ids = zip(*(texts[index] for index in indices), strict=True)
        lone = len(rows) == 1 and rows[0].flags.writeable  # torch takes no others
        rows_XD = rows[0] if lone else np.concatenate(rows)
        offsets_N1 = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        _check_finite(rows_XD, offsets_N1, [locations[index] for index in indices])
        blocks.append(StoredVectors(rows_XD, offsets_N1, np.concatenate(ids) if output == "sparse" else None))
        positions_N[indices] = np.arange(before, before + len(indices), dtype=np.int32)
        before += len(indices)
    return tuple(blocks), positions_N


def _read(vectors: object, output: OutputName, width: int) -> tuple[NDArray[Any], Int32Array | None]:
    """Return the rows of a text's vectors, and the entries of sparse ones."""
    if _is_masked(vectors):
        raise InvalidRequest("is a masked array; send what is not masked as a plain one.")
    if output == "sparse":
        ids, weights = _entries(vectors, width)
        return weights[:, None], ids
    if not isinstance(vectors, np.ndarray):
        kind = "ids and weights" if isinstance(vectors, tuple) else type(vectors).__name__
        raise InvalidRequest(f"must be a string or an array of {output}, is {kind}.")
    rows = np.asarray(cast(NDArray[Any], vectors))
    kind = "float32" if rows.dtype == np.float64 else rows.dtype.name
    if kind not in _TYPES:
        raise InvalidRequest(f"the array is of {rows.dtype.name}; it takes {', '.join(_TYPES)}.")
    ndim = _ROWS[output]
    if rows.ndim != ndim:
        shape = "(width,)" if ndim == 1 else "(tokens, width)"
        raise InvalidRequest(f"the array has the shape {rows.shape}; a text's {output} is {shape}.")
    if kind == "uint8" and width % 8:
        raise InvalidRequest(f"bits come in eights; this model's vectors have {width:,} columns.")
    if (columns := rows.shape[-1] * (8 if kind == "uint8" else 1)) != width:
        raise InvalidRequest(f"the vectors have {columns:,} columns; those they are compared with have {width:,}.")
    with np.errstate(over="ignore"):  # infinity is found later
        return rows.reshape(-1, rows.shape[-1]).astype(kind, order="C", copy=False), None


def to_float32(vectors: StoredVectors) -> Float32Array:
    rows_XD = vectors.rows_XD
    if rows_XD.dtype == np.uint8:
        rows_XD = np.unpackbits(rows_XD, axis=1).astype(np.float32) * np.float32(2) - np.float32(1)
    rows_XD = rows_XD.astype(np.float32, copy=False)
    return rows_XD if (factor := quantization_scale(vectors)) == 1 else rows_XD * factor


def quantization_scale(vectors: StoredVectors) -> np.float32:
    if vectors.rows_XD.dtype == np.int8:
        return np.float32(1 / _STEPS)
    num_bits = 8 * int(vectors.rows_XD.shape[1])
    return np.float32(1 / sqrt(num_bits) if vectors.rows_XD.dtype == np.uint8 else 1)


def entry_bounds(blocks: Iterable[StoredVectors], first: int) -> Int64Array:
    """Return the index of each block's first text, starting from `first`, and the index after the last text."""
    return np.cumsum([first, *map(len, blocks)])


def _entries(vectors: object, vocab_size: int) -> tuple[Int32Array, Float32Array]:
    """Return (ids, weights) of a sparse vector, by ascending id."""
    if not _is_sparse(vectors):
        raise InvalidRequest("must be a string, or a pair of arrays: the entries and their weights.")
    ids, weights = cast("tuple[NDArray[Any], NDArray[Any]]", vectors)
    if ids.ndim != 1 or weights.ndim != 1:
        raise InvalidRequest(f"arrays of entries and weights have one dimension, not {ids.ndim} and {weights.ndim}.")
    if ids.dtype.kind not in "iu" or weights.dtype.kind != "f":
        raise InvalidRequest(f"entries are integers and weights floats, not {ids.dtype} and {weights.dtype}.")
    if ids.size != weights.size:
        raise InvalidRequest(f"{ids.size:,} entries have {weights.size:,} weights.")
    order = np.argsort(ids, kind="stable")
    ids = cast(Int64Array, ids[order])
    if ids.size and not 0 <= ids[0] <= ids[-1] < vocab_size:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise InvalidRequest(f"entry {wrong:,} is outside the vocabulary of {vocab_size:,}.")
    if (ids[1:] == ids[:-1]).any():
        raise InvalidRequest(f"entry {ids[:-1][ids[1:] == ids[:-1]][0]:,} is there twice.")
    with np.errstate(over="ignore"):
        return ids.astype(np.int32), weights[order].astype(np.float32)


def _is_masked(value: object) -> bool:
    arrays = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    return any(isinstance(array, np.ma.MaskedArray) for array in arrays)


def _is_sparse(value: object) -> bool:
    arrays = cast(Sequence[object], value) if isinstance(value, tuple) else ()
    return len(arrays) == 2 and all(isinstance(array, np.ndarray) for array in arrays)


def _check_finite(rows_XD: NDArray[Any], offsets_N1: Int64Array, locations: Sequence[Location]) -> None:
    if rows_XD.dtype.kind == "f" and not np.isfinite(rows_XD).all():
        row, column = (int(indices[0]) for indices in np.nonzero(~np.isfinite(rows_XD)))
        text = int(np.searchsorted(offsets_N1, row, "right")) - 1
        at = f"row {row - offsets_N1[text]}, column {column}"
        raise InvalidRequest(f"holds {rows_XD[row, column]} (at {at}); vectors are finite.", location=locations[text])
