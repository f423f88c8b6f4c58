"""Values of columns as stores' clients take them: arrays of numpy for vectors, Python's values for other columns.

Shapes: N rows of the table, X vectors or entries of all rows, D columns of a vector.
"""

import base64
import math
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, cast

import numpy as np

from whimbrel.bulk.arrow import Array, Table, pa, pc
from whimbrel.stores.form import VectorColumn, is_text
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.batch import offsets_of


def dense(column: Array) -> Float32Array:
    """Return the (N, D) vectors of a column of lists of a fixed size."""
    array = _whole(column)
    return np.asarray(array.flatten().to_numpy(zero_copy_only=False), np.float32).reshape(len(array), array.type.list_size)


def tokens(column: Array) -> tuple[Int64Array, Float32Array]:
    """Return the offsets (N + 1) of rows, and the (X, D) vectors of all tokens."""
    array = _whole(column)
    return _offsets(array), dense(array.flatten())


def sparse(column: Array) -> tuple[Int64Array, Any, Float32Array]:
    """Return the offsets (N + 1) of rows, and the ids and weights of all entries."""
    ids, weights = _whole(column).flatten()
    values = np.asarray(weights.flatten().to_numpy(zero_copy_only=False), np.float32)
    return _offsets(ids), ids.flatten().to_numpy(zero_copy_only=False), values


def _whole(column: Array) -> Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _offsets(lists: Array) -> Int64Array:
    return offsets_of(np.asarray(pc.list_value_length(lists).to_numpy(zero_copy_only=False), np.int64))


def is_finite(table: Table, vector: VectorColumn) -> Any:
    """Return for each row whether all numbers of its vector are finite."""
    column = table.column(vector.name)
    if vector.kind == "dense":
        return np.isfinite(dense(column)).all(axis=1)
    if vector.kind == "sparse":
        offsets_N1, _, weights_X = sparse(column)
        bad_X: Any = ~np.isfinite(weights_X)
    else:
        offsets_N1, rows_XD = tokens(column)
        bad_X = np.any(~np.isfinite(rows_XD), axis=1)
    counts = offsets_of(bad_X)
    return counts[offsets_N1[1:]] == counts[offsets_N1[:-1]]


def has_unit_length(table: Table, name: str) -> bool:
    """Return whether all vectors of a column, dense ones or of tokens, have the length 1, to the precision of float16."""
    column = table.column(name)
    rows_XD = dense(column) if pa.types.is_fixed_size_list(column.type) else tokens(column)[1]
    return bool(np.all(np.abs(np.linalg.norm(rows_XD, axis=1) - 1) < 5e-3))


def lists(column: Array) -> list[Any]:
    """Return the values of a column that JSON can hold: no NaN, times in ISO 8601, bytes in base64, decimals as text."""
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or is_text(kind):
        return column.to_pylist()
    return [to_plain(value) for value in python_values(column)]


def python_values(column: Array) -> list[Any]:
    """Return the values of a column. Times are cut to microseconds, the finest that Python has."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    elif pa.types.is_time64(column.type):
        column = column.cast(pa.time64("us"), safe=False)
    elif pa.types.is_duration(column.type):
        column = column.cast(pa.duration("us"), safe=False)
    return column.to_pylist()


def to_plain(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): to_plain(each) for name, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in cast("list[Any]", value)]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value) if isinstance(value, Decimal | timedelta) else value


def payloads(table: Table, names: list[str]) -> list[dict[str, Any]]:
    """Return an object for each row, of these columns."""
    columns = [lists(table.column(name)) for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
