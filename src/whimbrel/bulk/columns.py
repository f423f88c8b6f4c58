"""Columns of vectors: the outputs of texts, in any order and number type, as arrays of Arrow.

A dense vector is a list of a fixed size, token vectors are a list of those, a sparse vector is a struct of ids and weights.

Shapes: N rows of the table, U distinct texts, X rows of all texts, D columns.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.bulk.arrow import Array, DataType, Field, pa
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.batch import offsets_of
from whimbrel.types.result import Outputs, Ragged, Sparse
from whimbrel.wire.dtypes import EncodedArray

NumberType: TypeAlias = Literal["float32", "float16", "int8"]
COLUMNS: Final = ("dense", "sparse", "multi_vector", "muvera", "scores")
"""Outputs that a run can write, in the order of their columns."""
_TYPES: Final[Mapping[str, DataType]] = {"float32": pa.float32(), "float16": pa.float16(), "int8": pa.int8()}
_LARGEST_FLOAT16: Final = 65520.0
"""Half a step above the largest number of float16, where rounding would give infinity."""
_FLOAT_BYTES: Final = 4
_TOKENS_OF_TEXT: Final = 256
_ENTRIES_OF_TEXT: Final = 256


def widths_of(outputs: Outputs) -> dict[str, int]:
    """Return the outputs that there are, with their columns; 0 for sparse vectors."""
    found: dict[str, int] = {}
    for name in COLUMNS:
        value = getattr(outputs, name)
        if isinstance(value, Sparse):
            found[name] = 0
        elif value is not None:
            found[name] = (value.rows_XD if isinstance(value, Ragged) else value).shape[1]
    return found


def bytes_per_row(widths: Mapping[str, int]) -> int:
    """Return about how many bytes the outputs of a row take, without those that depend on its length."""
    dense = sum(width for name, width in widths.items() if name not in ("sparse", "multi_vector"))
    return _FLOAT_BYTES * dense + (2 * _FLOAT_BYTES * _ENTRIES_OF_TEXT if "sparse" in widths else 0)


def output_fields(widths: Mapping[str, int], dtype: NumberType) -> list[Field]:
    """Return the columns of the outputs. Scores are float32, and weights of sparse vectors are never int8."""
    kind, fields = _TYPES[dtype], list[Field]()
    for name, width in widths.items():
        if name == "sparse":
            weight = pa.float32() if dtype == "int8" else kind
            column = pa.struct([pa.field("ids", pa.list_(pa.int32())), pa.field("weights", pa.list_(weight))])
        elif name == "scores":
            column = pa.list_(pa.float32(), width)
        else:
            column = pa.list_(kind, width)
            column = pa.list_(column) if name == "multi_vector" else column
        fields.append(pa.field(name, column))
    return fields


def gather(parts: Sequence[tuple[Sequence[int], Outputs]], text_N: Int64Array, fields: Sequence[Field]) -> list[Array]:
    """Return the columns of a table whose row i has the outputs of text `text_N[i]`.

    `parts` has the indices of the texts of each answer, and its outputs.
    """
    place_U = np.empty(sum(len(indices) for indices, _ in parts), np.int64)
    index_U = np.concatenate([np.empty(0, np.int64), *(np.asarray(indices, np.int64) for indices, _ in parts)])
    known_U = np.unique(index_U)
    place_U[np.searchsorted(known_U, index_U)] = np.arange(index_U.size)
    order_N = place_U[np.searchsorted(known_U, text_N)] if text_N.size else np.empty(0, np.int64)
    return [_gather_column(field, [getattr(outputs, field.name) for _, outputs in parts], order_N) for field in fields]


def _gather_column(field: Field, values: Sequence[Any], order_N: Int64Array) -> Array:
    if not order_N.size:
        return pa.array([], field.type)
    if isinstance(values[0], Sparse):
        counts = np.concatenate([np.diff(each.offsets_N1) for each in values])
        index_X, offsets = _rows_of(offsets_of(counts), order_N)
        ids = np.concatenate([each.ids_X for each in values])[index_X]
        weights = np.concatenate([each.weights_X for each in values])[index_X]
        weights = _encode(weights[:, None], field.type.field("weights").type.value_type)
        lists = [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), column) for column in (pa.array(ids), weights)]
        return pa.StructArray.from_arrays(lists, fields=list(field.type))
    if isinstance(values[0], Ragged):
        counts = np.concatenate([np.diff(each.offsets_N1) for each in values])
        index_X, offsets = _rows_of(offsets_of(counts), order_N)
        rows_XD = np.concatenate([each.rows_XD for each in values])[index_X]
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), _vectors(rows_XD, field.type.value_type))
    return _vectors(np.concatenate(values)[order_N], field.type)


def _rows_of(offsets_U1: Int64Array, order_N: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the rows of texts in an order, one text after another, and the offsets at which each text begins."""
    counts_N = np.diff(offsets_U1)[order_N]
    offsets_N1 = offsets_of(counts_N)
    starts_X = np.repeat(offsets_U1[order_N] - offsets_N1[:-1], counts_N)
    index_X: Int64Array = starts_X + np.arange(int(offsets_N1[-1]), dtype=np.int64)
    return index_X, offsets_N1


def _vectors(rows_XD: Float32Array, kind: DataType) -> Array:
    return pa.FixedSizeListArray.from_arrays(_encode(rows_XD, kind.value_type), type=kind)


def _encode(rows_XD: Float32Array, kind: DataType) -> Array:
    """Return the numbers of all rows in a type, one after another."""
    name = next(name for name, each in _TYPES.items() if each == kind)
    return pa.array(EncodedArray(rows_XD, cast(Any, name)).encoded().reshape(-1), kind)


def too_large(outputs: Outputs, dtype: NumberType) -> NDArray[np.bool_] | None:
    """Return for each text whether it has numbers that the type does not hold; None if no text can have them."""
    if dtype != "float16":
        return None
    marks: list[NDArray[np.bool_]] = []
    for name in ("dense", "sparse", "multi_vector", "muvera"):
        value = getattr(outputs, name)
        if value is None:
            continue
        rows = value.weights_X[:, None] if isinstance(value, Sparse) else value.rows_XD if isinstance(value, Ragged) else value
        over_X = np.asarray(np.abs(rows).max(axis=1, initial=0) >= _LARGEST_FLOAT16, np.bool_)
        if isinstance(value, Sparse | Ragged):
            total = offsets_of(over_X)
            over_X = total[value.offsets_N1[1:]] > total[value.offsets_N1[:-1]]
        marks.append(over_X)
    return np.logical_or.reduce(marks) if marks else None
