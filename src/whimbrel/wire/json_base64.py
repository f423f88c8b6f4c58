"""JSON and base64 of arrays, at once or in chunks. JSON has the shortest decimals that read back as the same float32."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from math import inf
from typing import Any, Final, cast

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from whimbrel.types.arrays import Float32Array
from whimbrel.wire.dtypes import EncodedArray

_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS
STREAM_ABOVE: Final = 100 * 2**10
"""Most numbers of a response that is printed at once, in base64 five times as many. Other requests run between the chunks of a
larger one."""
_CHUNK_ITEMS: Final = 20 * 2**10
"""Numbers printed without a pause: about half a millisecond, and less than 256 KiB."""
_CHUNK_BYTES: Final = 2**20
"""Bytes encoded as base64 without a pause: about a quarter of a millisecond."""
_FEW_ROWS: Final = 16
_TABLE_ROWS: Final = 1000
_MIN_CHUNK_BYTES: Final = 2**16
"""Least size of a chunk, except the last."""


@dataclass(frozen=True, slots=True, eq=False)
class Base64:
    """A JSON string with the base64 of an array's bytes, encoded when it is printed."""

    array: EncodedArray


@dataclass(frozen=True, slots=True, eq=False)
class LazyList:
    """A JSON list whose items are made when they are printed."""

    items: Iterable[object]


def to_json(value: object) -> bytes:
    """Return the JSON of `value`. Its arrays must be finite: JSON has no NaN, and orjson would write null."""
    return orjson.dumps(value, default=_default, option=_OPTIONS)


def json_chunks(value: object) -> Iterator[bytes | memoryview]:
    """Yield the bytes of `to_json(value)` in chunks, each printed when the caller takes it."""
    parts: list[bytes | memoryview] = []
    size = 0
    for part in _json_parts(value):
        parts.append(part)
        size += len(part)
        if size >= _MIN_CHUNK_BYTES:
            yield parts[0] if len(parts) == 1 else b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)


def to_base64(vectors_ND: Float32Array | EncodedArray) -> list[str]:
    """Return the base64 of each row's bytes. A plain array is encoded as little-endian float32."""
    rows = (vectors_ND if isinstance(vectors_ND, EncodedArray) else EncodedArray(vectors_ND)).encoded()
    size = rows.shape[1] * rows.itemsize
    if size % 3 or not size:
        return [pybase64.b64encode_as_string(row) for row in rows]
    text, width = pybase64.b64encode_as_string(rows.data), size // 3 * 4  # a row ends at the end of a group of four letters
    return [text[start : start + width] for start in range(0, len(text), width)]


def base64_list(
    prefix: bytes, vectors_ND: EncodedArray, suffix: bytes, *, before: bytes, after: bytes
) -> tuple[int, Iterator[memoryview | bytes]]:
    """Return the size and the chunks of a JSON list between `prefix` and `suffix`, with a base64 string for each row.

    A row becomes `before % index`, the base64 of its bytes, and `after`. Chunks are made when the caller takes them. This takes
    a fifth of the time of printing objects, because the parts around the base64 are copied from a table for all rows at once.
    """
    count = len(vectors_ND)
    if count <= _FEW_ROWS:
        rows = enumerate(vectors_ND.encoded())
        items = b",".join([b"%b%b%b" % (before % index, pybase64.b64encode(row_D), after) for index, row_D in rows])
        body = b"%b[%b]%b" % (prefix, items, suffix)
        return len(body), iter([body])
    width = vectors_ND.nbytes // count
    size = sum(len(table) * (table.shape[1] + 4 * -(-width // 3) + len(after) + 1) for table in _tables(before, 0, count))
    chunks = _base64_chunks(prefix + b"[", vectors_ND, b"]" + suffix, before, np.frombuffer(after + b",", np.uint8))
    return len(prefix) + 1 + size + len(suffix), chunks


def _base64_chunks(
    prefix: bytes, vectors_ND: EncodedArray, suffix: bytes, before: bytes, after: NDArray[np.uint8]
) -> Iterator[memoryview]:
    step = max(1, _CHUNK_BYTES * len(vectors_ND) // max(1, vectors_ND.nbytes))
    for first in range(0, len(vectors_ND), step):
        letters_NL, padding = _base64_letters(vectors_ND[first : first + step].encoded())
        tables = list(_tables(before, first, first + len(letters_NL)))
        width, end = letters_NL.shape[1], len(after)
        start = b"" if first else prefix
        size = sum(len(table) * (table.shape[1] + width + end) for table in tables)
        is_last = first + step >= len(vectors_ND)
        chunk = np.empty(len(start) + size + (len(suffix) - 1 if is_last else 0), np.uint8)
        chunk.data[: len(start)] = start
        offset, row = len(start), 0
        for table in tables:
            rows, lead = table.shape
            items = chunk[offset : offset + rows * (lead + width + end)].reshape(rows, -1)
            items[:, :lead] = table
            items[:, lead:-end] = letters_NL[row : row + rows]
            items[:, items.shape[1] - end - padding : -end] = ord("=")
            items[:, -end:] = after
            offset, row = offset + items.size, row + rows
        if is_last:
            chunk.data[offset - 1 :] = suffix  # no comma after the last item
        yield chunk.data


def _base64_letters(rows_ND: NDArray[Any]) -> tuple[NDArray[np.uint8], int]:
    """Return the base64 of each row, and the number of final letters that must become padding."""
    bytes_NB = rows_ND.view(np.uint8)
    padding = -bytes_NB.shape[1] % 3
    if padding:  # a row must end at the end of a group of four letters
        bytes_NB = np.pad(bytes_NB, ((0, 0), (0, padding)))
    return np.frombuffer(pybase64.b64encode(bytes_NB.data), np.uint8).reshape(len(rows_ND), -1), padding


def _tables(text: bytes, start: int, end: int) -> Iterator[NDArray[np.uint8]]:
    while start < end:
        first = max(start // _TABLE_ROWS * _TABLE_ROWS, 10 ** (len(str(start)) - 1) if start else 0)
        table = _table(text, first)
        rows = table[start - first : end - first]
        yield rows
        start += len(rows)


@lru_cache(maxsize=64)
def _table(text: bytes, first: int) -> NDArray[np.uint8]:
    last = min(first // _TABLE_ROWS * _TABLE_ROWS + _TABLE_ROWS, 10 ** len(str(first)))
    return np.frombuffer(b"".join([text % index for index in range(first, last)]), np.uint8).reshape(last - first, -1)


def base64_rows(vectors_ND: EncodedArray) -> list[str] | list[Base64]:
    """Return the base64 of each row, or `Base64` placeholders for large arrays."""
    if vectors_ND.array.size <= _CHUNK_ITEMS << 4:
        return to_base64(vectors_ND)
    return [Base64(vectors_ND[row : row + 1]) for row in range(len(vectors_ND))]


def number_rows(vectors_ND: EncodedArray) -> NDArray[Any] | list[EncodedArray]:
    """Return the decoded numbers for JSON, or an `EncodedArray` for each row of a large array."""
    if vectors_ND.dtype == "float32" or vectors_ND.array.size <= _CHUNK_ITEMS:
        return vectors_ND.numbers()
    return [EncodedArray(row_D, vectors_ND.dtype, vectors_ND.order, vectors_ND.name) for row_D in vectors_ND.array]


def from_base64(rows: Sequence[str | bytes]) -> Float32Array:
    """Decode rows of `to_base64` to (N, D). Raises ValueError if their widths differ or are 0."""
    if not rows:
        return np.empty((0, 0), np.float32)
    decoded = [pybase64.b64decode(row, validate=True) for row in rows]
    if len({len(row) for row in decoded}) != 1 or not decoded[0]:
        raise ValueError("rows of unequal width, or empty")
    return np.frombuffer(b"".join(decoded), "<f4").reshape(len(rows), -1).astype(np.float32, copy=False)


def _default(value: object) -> object:
    if isinstance(value, Base64):
        return pybase64.b64encode_as_string(value.array.encoded().data)
    if isinstance(value, LazyList):
        return list(value.items)
    if isinstance(value, EncodedArray):
        return value.numbers()
    if isinstance(value, np.ndarray):  # not contiguous, or of another byte order
        array = cast("NDArray[Any]", value)
        return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    raise TypeError(f"{type(value).__name__} is not JSON")


def _json_parts(value: object) -> Iterator[bytes | memoryview]:
    if isinstance(value, dict) and _cost(value, _CHUNK_ITEMS) > _CHUNK_ITEMS:
        for number, (name, each) in enumerate(cast("dict[str, object]", value).items()):
            yield (b",%b:" if number else b"{%b:") % to_json(name)
            yield from _json_parts(each)
        yield b"}"
    elif isinstance(value, list | np.ndarray | EncodedArray | LazyList) and _cost(value, _CHUNK_ITEMS) > _CHUNK_ITEMS:
        yield b"["
        for number, group in enumerate(_groups(cast(Any, value))):
            if number:
                yield b","
            if isinstance(group, list) and len(group) == 1:
                yield from _json_parts(group[0])
            else:
                yield memoryview(to_json(group))[1:-1]
        yield b"]"
    else:
        yield to_json(cast(object, value))


def _groups(
    value: list[object] | NDArray[Any] | EncodedArray | LazyList,
) -> Iterator[list[object] | NDArray[Any] | EncodedArray]:
    """Yield runs of items that cost about `_CHUNK_ITEMS` numbers. A single item may cost more."""
    if isinstance(value, LazyList):
        yield from ([item] for item in value.items)
        return
    if not isinstance(value, list):
        step = max(1, _CHUNK_ITEMS * len(value) // _cost(value))
        yield from (value[start : start + step] for start in range(0, len(value), step))
        return
    start = weight = 0
    for index, item in enumerate(value):
        item_weight = _cost(item)
        if weight + item_weight > _CHUNK_ITEMS and index > start:
            yield value[start:index]
            start, weight = index, 0
        weight += item_weight
    yield value[start:]


def _cost(value: Any, limit: float = inf) -> int:
    """Return about how many numbers take as long to print as `value`. Counting stops above `limit`."""
    kind = cast(object, type(value))
    if kind is np.ndarray:
        return value.size
    if kind is str:
        return 1 + (len(value) >> 6)
    if kind is dict or kind is list:
        cost = 0
        for each in value.values() if kind is dict else value:
            cost += _cost(each, limit)
            if cost > limit:
                break
        return cost
    if kind is EncodedArray:
        return value.array.size
    if kind is Base64:
        return 20 + (value.array.array.size >> 3)
    return _CHUNK_ITEMS + 1 if kind is LazyList else 1
