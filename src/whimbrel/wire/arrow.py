"""Arrow IPC streams of one record batch, with a row for each text and a column for each output.

Dense vectors are FixedSizeList, token vectors are List of FixedSizeList. Sparse vectors are a struct of the lists `ids` and
`weights`. bfloat16 is FixedSizeBinary(2) with Lance's extension name, and fp8 is uint8. The module writes the headers only, and
the buffers are the arrays. docs/adr/0021-arrow-stream-writer.md says why it does not use pyarrow.
Source: arrow.apache.org/docs/format/Columnar.html, Schema.fbs and Message.fbs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from whimbrel.types.arrays import Int64Array
from whimbrel.wire.dtypes import EncodedArray
from whimbrel.wire.flatbuffers import Number, Structs, Table, write_flatbuffer

_VERSION_5: Final = 4
_SCHEMA, _RECORD_BATCH = 1, 3
_INT, _FLOAT, _LIST, _STRUCT, _FIXED_BINARY, _FIXED_LIST = 2, 3, 12, 13, 15, 16
_PRECISION: Final = {"float16": 0, "float32": 1}
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
_ALIGN: Final = 8


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    length: int
    kind: int
    type: Table
    buffers: Sequence[EncodedArray] = ()
    children: Sequence[Column] = ()
    extension: str = ""


def vector_column(name: str, array_ND: EncodedArray) -> Column:
    """Return a column with a vector in each row."""
    count, width = array_ND.shape
    return Column(name, count, _FIXED_LIST, Table([Number("i", width)]), children=[scalar_column("item", array_ND)])


def list_column(name: str, offsets_N1: Int64Array, items: Column) -> Column:
    """Return a column of lists. Row i has the items offsets_N1[i] to offsets_N1[i + 1]."""
    order = _buffers([items])[0].order
    offsets = EncodedArray(offsets_N1.astype(np.int32), "int32", order)
    return Column(name, len(offsets_N1) - 1, _LIST, Table(), [offsets], [replace(items, name="item")])


def struct_column(name: str, *columns: Column) -> Column:
    return Column(name, columns[0].length, _STRUCT, Table(), children=columns)


def scalar_column(name: str, array: EncodedArray) -> Column:
    bits = 8 * array.storage_dtype.itemsize
    length = int(np.prod(array.shape))
    if array.dtype in _PRECISION:
        return Column(name, length, _FLOAT, Table([Number("h", _PRECISION[array.dtype])]), [array])
    if array.dtype == "bfloat16":
        return Column(name, length, _FIXED_BINARY, Table([Number("i", 2)]), [array], extension="lance.bfloat16")
    signed = array.storage_dtype.kind == "i"
    return Column(name, length, _INT, Table([Number("i", bits), Number("b", signed)]), [array])


def _flat(columns: Sequence[Column]) -> Iterator[Column]:
    """Yield columns, each before its children: the order of all parts of a message."""
    for column in columns:
        yield column
        yield from _flat(column.children)


def _buffers(columns: Sequence[Column]) -> list[EncodedArray]:
    return [buffer for column in _flat(columns) for buffer in column.buffers]


def arrow_chunks(columns: Sequence[Column], metadata: Mapping[str, str]) -> tuple[int, Iterator[bytes | memoryview]]:
    """Return the size of the stream in bytes and its chunks. `metadata` is that of the schema."""
    buffers = _buffers(columns)
    schema = [Number("h", buffers[0].is_big), [_field(column) for column in columns], _key_values(metadata)]
    nodes = [number for column in _flat(columns) for number in (column.length, 0)]
    extents: list[int] = []
    end = 0
    for column in _flat(columns):
        for size in (
            0,
            *(buffer.nbytes for buffer in column.buffers),
        ):  # the first is the mask of nulls, of which there is none
            extents += [end, size]
            end += size + -size % _ALIGN
    batch = Table([Number("q", columns[0].length), Structs(nodes), Structs(extents)])
    headers = _message(_SCHEMA, Table(schema), 0) + _message(_RECORD_BATCH, batch, end)
    return len(headers) + end + len(_END), _stream(headers, buffers)


def _stream(headers: bytes, buffers: Sequence[EncodedArray]) -> Iterator[bytes | memoryview]:
    yield headers
    for buffer in buffers:
        yield from buffer.chunks()
        if padding := -buffer.nbytes % _ALIGN:
            yield bytes(padding)
    yield _END


def _message(kind: int, content: Table, body_size: int) -> bytes:
    header = write_flatbuffer(Table([Number("h", _VERSION_5), Number("b", kind), content, Number("q", body_size)]))
    header += bytes(-len(header) % _ALIGN)
    return b"\xff\xff\xff\xff" + len(header).to_bytes(4, "little") + header


def _field(column: Column) -> Table:
    metadata = {"ARROW:extension:name": column.extension, "ARROW:extension:metadata": ""} if column.extension else {}
    children = [_field(each) for each in column.children]
    return Table([column.name, Number("b", 0), Number("b", column.kind), column.type, None, children, _key_values(metadata)])


def _key_values(metadata: Mapping[str, str]) -> list[Table] | None:
    return [Table([name, value]) for name, value in metadata.items()] or None
