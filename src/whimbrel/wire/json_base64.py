"""Arrays <-> JSON and base64. Floats in JSON are the shortest texts that read back equal as float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from whimbrel.types.arrays import Float32Array
from whimbrel.wire.dtypes import EncodedArray

_WIRE_FLOAT: Final = np.dtype("<f4")
_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS
STREAM_ABOVE: Final = 100 * 2**10
"""Numbers, or five times as many of base64: an answer of more is printed in pieces, so that others have their turn."""
_CHUNK_ITEMS: Final = 20 * 2**10
"""Numbers that are printed without a pause: about half a millisecond, and less than 256 KiB."""
_AT_ONCE: Final = 2**20
"""Bytes whose base64 is made at once: about a quarter of a millisecond."""
_FEW: Final = 16
"""Rows that are done faster one by one."""
_TABLE: Final = 1000
_LEAST: Final = 2**16
"""Bytes of a piece, but for the last."""


@dataclass(frozen=True, slots=True, eq=False)
class Base64:
    """Stands in JSON for the base64 of an array's bytes, which is made when it is printed."""

    array: EncodedArray


@dataclass(frozen=True, slots=True, eq=False)
class LazyList:
    """Stands in JSON for the list of these items, which are made when they are printed."""

    items: Iterable[object]


def to_json(value: object) -> bytes:
    """JSON of `value`; arrays in it are printed from their memory.

    The caller has made sure that arrays are finite: JSON knows no NaN, and orjson would write null.
    """
    return orjson.dumps(value, default=_default, option=_OPTIONS)


def json_chunks(value: object) -> Iterator[bytes | memoryview]:
    """The same bytes as those of `to_json`, in pieces that are printed as they are asked for."""
    parts: list[bytes | memoryview] = []
    size = 0
    for part in _print(value):
        parts.append(part)
        size += len(part)
        if size >= _LEAST:
            yield parts[0] if len(parts) == 1 else b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)


def to_base64(vectors_ND: Float32Array | EncodedArray) -> list[str]:
    """Each row's bytes as base64; of an array those of little-endian float32."""
    rows = (vectors_ND if isinstance(vectors_ND, EncodedArray) else EncodedArray(vectors_ND)).encoded()
    size = rows.shape[1] * rows.itemsize
    if size % 3 or not size:
        return [pybase64.b64encode_as_string(row) for row in rows]
    text, width = pybase64.b64encode_as_string(rows.data), size // 3 * 4  # rows end where groups of four letters do
    return [text[start : start + width] for start in range(0, len(text), width)]


def base64_list(
    head: bytes, vectors_ND: EncodedArray, tail: bytes, *, before: bytes, after: bytes
) -> tuple[int, Iterator[memoryview | bytes]]:
    """JSON with a list in it, and the bytes that come ahead of it and behind it: the list has for each row
    `before % index`, the row's bytes as base64, and `after`.

    Returns how many bytes that is, and these in pieces that are made as they are asked for. A fifth of the time of objects
    that hold strings: what a row has beside its letters is copied from a table, for all rows at once.
    """
    count = len(vectors_ND)
    if count <= _FEW:
        rows = enumerate(vectors_ND.encoded())
        items = b",".join([b"%b%b%b" % (before % index, pybase64.b64encode(row_D), after) for index, row_D in rows])
        answer = b"%b[%b]%b" % (head, items, tail)
        return len(answer), iter([answer])
    width = vectors_ND.nbytes // count
    size = sum(len(table) * (table.shape[1] + 4 * -(-width // 3) + len(after) + 1) for table in _tables(before, 0, count))
    pieces = _base64_pieces(head + b"[", vectors_ND, b"]" + tail, before, np.frombuffer(after + b",", np.uint8))
    return len(head) + 1 + size + len(tail), pieces


def _base64_pieces(
    head: bytes, vectors_ND: EncodedArray, tail: bytes, before: bytes, after: NDArray[np.uint8]
) -> Iterator[memoryview]:
    step = max(1, _AT_ONCE * len(vectors_ND) // max(1, vectors_ND.nbytes))
    for first in range(0, len(vectors_ND), step):
        letters_NL, padding = _letters(vectors_ND[first : first + step].encoded())
        tables = list(_tables(before, first, first + len(letters_NL)))
        width, end = letters_NL.shape[1], len(after)
        start = b"" if first else head
        size = sum(len(table) * (table.shape[1] + width + end) for table in tables)
        is_last = first + step >= len(vectors_ND)
        piece = np.empty(len(start) + size + (len(tail) - 1 if is_last else 0), np.uint8)
        piece.data[: len(start)] = start
        place, row = len(start), 0
        for table in tables:
            rows, lead = table.shape
            items = piece[place : place + rows * (lead + width + end)].reshape(rows, -1)
            items[:, :lead] = table
            items[:, lead:-end] = letters_NL[row : row + rows]
            items[:, items.shape[1] - end - padding : -end] = ord("=")
            items[:, -end:] = after
            place, row = place + items.size, row + rows
        if is_last:
            piece.data[place - 1 :] = tail  # no comma after the last item
        yield piece.data


def _letters(rows_ND: NDArray[Any]) -> tuple[NDArray[np.uint8], int]:
    """Each row's base64, and how many letters at the end of each should be padding."""
    bytes_NB = rows_ND.view(np.uint8)
    padding = -bytes_NB.shape[1] % 3
    if padding:  # rows are to end where groups of four letters do
        bytes_NB = np.pad(bytes_NB, ((0, 0), (0, padding)))
    return np.frombuffer(pybase64.b64encode(bytes_NB.data), np.uint8).reshape(len(rows_ND), -1), padding


def _tables(text: bytes, start: int, end: int) -> Iterator[NDArray[np.uint8]]:
    """`text % index` for each index from `start` to `end`, those of one length together."""
    while start < end:
        first = max(start // _TABLE * _TABLE, 10 ** (len(str(start)) - 1) if start else 0)
        table = _table(text, first)
        found = table[start - first : end - first]
        yield found
        start += len(found)


@lru_cache(maxsize=64)
def _table(text: bytes, first: int) -> NDArray[np.uint8]:
    """As many as have one length, or a thousand."""
    last = min(first // _TABLE * _TABLE + _TABLE, 10 ** len(str(first)))
    return np.frombuffer(b"".join([text % index for index in range(first, last)]), np.uint8).reshape(last - first, -1)


def base64_rows(vectors_ND: EncodedArray) -> list[str] | list[Base64]:
    """Each row's bytes as base64, or what stands for it in JSON if that would take long."""
    if vectors_ND.array.size <= _CHUNK_ITEMS << 4:
        return to_base64(vectors_ND)
    return [Base64(vectors_ND[row : row + 1]) for row in range(len(vectors_ND))]


def number_rows(vectors_ND: EncodedArray) -> NDArray[Any] | list[EncodedArray]:
    """The numbers of each row as JSON prints them, or what stands for them if making them would take long."""
    if vectors_ND.dtype == "float32" or vectors_ND.array.size <= _CHUNK_ITEMS:
        return vectors_ND.numbers()
    return [EncodedArray(row_D, vectors_ND.dtype, vectors_ND.order, vectors_ND.name) for row_D in vectors_ND.array]


def from_base64(rows: Sequence[str | bytes]) -> Float32Array:
    """The inverse of `to_base64`: rows of equal width -> (N, D). Raises ValueError for anything else."""
    if not rows:
        return np.empty((0, 0), np.float32)
    decoded = [pybase64.b64decode(row, validate=True) for row in rows]
    if len({len(row) for row in decoded}) != 1 or not decoded[0]:
        raise ValueError("rows of unequal width, or empty")
    return np.frombuffer(b"".join(decoded), _WIRE_FLOAT).reshape(len(rows), -1).astype(np.float32, copy=False)


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


def _print(value: object) -> Iterator[bytes | memoryview]:
    if isinstance(value, dict) and _cost(value, _CHUNK_ITEMS) > _CHUNK_ITEMS:
        for number, (name, each) in enumerate(cast("dict[str, object]", value).items()):
            yield (b",%b:" if number else b"{%b:") % to_json(name)
            yield from _print(each)
        yield b"}"
    elif isinstance(value, list | np.ndarray | EncodedArray) and _cost(value, _CHUNK_ITEMS) > _CHUNK_ITEMS:
        for number, group in enumerate(_groups(cast(Any, value))):
            if isinstance(group, list) and len(group) == 1:
                yield b"," if number else b"["
                yield from _print(group[0])
            elif isinstance(group, list) and number:
                yield memoryview(to_json([0, *group]))[2:-1]  # with the comma before it, so that it needs not be copied
            else:
                yield b"," if number else b"["
                yield memoryview(to_json(group))[1:-1]
        yield b"]"
    elif isinstance(value, LazyList):
        yield b"["
        for number, each in enumerate(value.items):
            if number:
                yield b","
            yield from _print(each)
        yield b"]"
    else:
        yield to_json(cast(object, value))


def _groups(value: list[object] | NDArray[Any] | EncodedArray) -> Iterator[list[object] | NDArray[Any] | EncodedArray]:
    """Consecutive items of about `_PIECE` numbers together; a single one may have more."""
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


def _cost(value: Any, most: int | None = None) -> int:
    """How many numbers take as long to be printed as `value`, about; counting ends above `most`."""
    kind = cast(object, type(value))
    if kind is np.ndarray:
        return value.size
    if kind is str:
        return 1 + (len(value) >> 6)
    if kind is dict or kind is list:
        return _total_cost(value.values() if kind is dict else value, most)
    if kind is EncodedArray:
        return value.array.size
    if kind is Base64:
        return 20 + (value.array.array.size >> 3)
    return _CHUNK_ITEMS + 1 if kind is LazyList else 1


def _total_cost(values: Iterable[object], most: int | None) -> int:
    if most is None:
        return sum(map(_cost, values))
    weight = 0
    for value in values:
        weight += _cost(value, most)
        if weight > most:
            break
    return weight
