"""Arrays -> an Arrow IPC stream of one record batch: a row for each text, a column for each output.

Vectors are FixedSizeList, token vectors List of FixedSizeList, sparse ones a struct of the lists `ids` and `weights`. bfloat16
is FixedSizeBinary(2) with the extension name that Lance gives it, fp8 is uint8. Only the heads are written here; the buffers
are the arrays. Source: arrow.apache.org/docs/format/Columnar.html and its Schema.fbs and Message.fbs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from whimbrel.types.arrays import Int64Array
from whimbrel.wire.dtypes import EncodedArray
from whimbrel.wire.flatbuffers import Number, Structs, Table, write_flat

_VERSION_5: Final = 4
_SCHEMA, _RECORD_BATCH = 1, 3
_INT, _FLOAT, _LIST, _STRUCT, _FIXED_BINARY, _FIXED_LIST = 2, 3, 12, 13, 15, 16
_PRECISION: Final = {"float16": 0, "float32": 1}
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
_ALIGN: Final = 8


@dataclass(frozen=True, slots=True)
class Column:
    """A column, or what is within one: its type, and its buffers without those that say what is null, for nothing is."""

    name: str
    length: int
    kind: int
    type: Table
    buffers: Sequence[EncodedArray] = ()
    children: Sequence[Column] = ()
    extension: str = ""


def vectors(name: str, array_ND: EncodedArray) -> Column:
    """A vector for each row."""
    count, width = array_ND.shape
    return Column(name, count, _FIXED_LIST, Table([Number("i", width)]), children=[scalars("item", array_ND)])


def lists(name: str, offsets_N1: Int64Array, items: Column) -> Column:
    """A list for each row: item offsets_N1[i] to offsets_N1[i + 1]."""
    order = _first_buffer(items).order
    offsets = EncodedArray(offsets_N1.astype(np.int32), "int32", order)
    return Column(name, len(offsets_N1) - 1, _LIST, Table(), [offsets], [replace(items, name="item")])


def struct_of(name: str, *columns: Column) -> Column:
    """The columns as one."""
    return Column(name, columns[0].length, _STRUCT, Table(), children=columns)


def scalars(name: str, array: EncodedArray) -> Column:
    bits = 8 * array.storage_dtype.itemsize
    length = int(np.prod(array.shape))
    if array.dtype in _PRECISION:
        return Column(name, length, _FLOAT, Table([Number("h", _PRECISION[array.dtype])]), [array])
    if array.dtype == "bfloat16":
        return Column(name, length, _FIXED_BINARY, Table([Number("i", 2)]), [array], extension="lance.bfloat16")
    signed = array.storage_dtype.kind == "i"
    return Column(name, length, _INT, Table([Number("i", bits), Number("b", signed)]), [array])


def _first_buffer(column: Column) -> EncodedArray:
    return column.buffers[0] if column.buffers else _first_buffer(column.children[0])


def arrow_chunks(columns: Sequence[Column], about: Mapping[str, str]) -> tuple[int, Iterator[bytes | memoryview]]:
    """The number of bytes of the stream, and these. `about` becomes the schema's metadata."""
    buffers = [buffer for column in columns for buffer in _flat_buffers(column)]
    sizes = [0 if buffer is None else buffer.nbytes for buffer in buffers]
    schema = [Number("h", _first_buffer(columns[0]).is_big), [_field(column) for column in columns], _pairs(about)]
    nodes = [number for column in columns for length in _lengths(column) for number in (length, 0)]
    places: list[int] = []
    end = 0
    for size in sizes:
        places += [end, size]
        end += size + -size % _ALIGN
    batch = Table([Number("q", columns[0].length), Structs(nodes), Structs(places)])
    heads = _message(_SCHEMA, Table(schema), 0) + _message(_RECORD_BATCH, batch, end)
    return len(heads) + end + len(_END), _stream(heads, buffers)


def _stream(heads: bytes, buffers: Sequence[EncodedArray | None]) -> Iterator[bytes | memoryview]:
    yield heads
    for buffer in buffers:
        if buffer is not None:
            yield from buffer.chunks()
            if rest := -buffer.nbytes % _ALIGN:
                yield bytes(rest)
    yield _END


def _message(kind: int, content: Table, body_size: int) -> bytes:
    head = write_flat(Table([Number("h", _VERSION_5), Number("b", kind), content, Number("q", body_size)]))
    head += bytes(-len(head) % _ALIGN)
    return b"\xff\xff\xff\xff" + len(head).to_bytes(4, "little") + head


def _field(column: Column) -> Table:
    about = {"ARROW:extension:name": column.extension, "ARROW:extension:metadata": ""} if column.extension else {}
    children = [_field(each) for each in column.children]
    return Table([column.name, Number("b", 0), Number("b", column.kind), column.type, None, children, _pairs(about)])


def _pairs(about: Mapping[str, str]) -> list[Table] | None:
    return [Table([name, value]) for name, value in about.items()] or None


def _flat_buffers(column: Column) -> Iterator[EncodedArray | None]:
    """As Arrow orders them; None is what would say which are null."""
    yield None
    yield from column.buffers
    for each in column.children:
        yield from _flat_buffers(each)


def _lengths(column: Column) -> Iterator[int]:
    yield column.length
    for each in column.children:
        yield from _lengths(each)
