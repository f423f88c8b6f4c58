"""Arrow IPC streams of one record batch, with a row for each text and a column for each output.

Dense vectors are FixedSizeList, token vectors are List of FixedSizeList. Sparse vectors are a struct of the lists `ids` and
`weights`. bfloat16 is FixedSizeBinary(2) with Lance's extension name, and fp8 is uint8. The module writes the headers only, and
the buffers are the arrays. docs/adr/0021-arrow-stream-writer.md says why it does not use pyarrow.
Sources: arrow.apache.org/docs/format/Columnar.html, Schema.fbs and Message.fbs; flatbuffers.dev/internals.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np

from whimbrel.types.arrays import Int64Array
from whimbrel.wire.dtypes import EncodedArray

_VERSION_5: Final = 4
_SCHEMA, _RECORD_BATCH = 1, 3
_INT, _FLOAT, _LIST, _STRUCT, _FIXED_BINARY, _FIXED_LIST = 2, 3, 12, 13, 15, 16
_PRECISION: Final = {"float16": 0, "float32": 1}
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
_ALIGN: Final = 8


@dataclass(frozen=True, slots=True)
class _Number:
    kind: str
    value: int


_Item: TypeAlias = "str | tuple[int, ...] | _Table | list[_Table]"
"""A tuple is a vector of structs of two 64-bit integers."""


@dataclass(frozen=True, slots=True)
class _Table:
    slots: Sequence[_Number | _Item | None] = ()


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    length: int
    kind: int
    type: _Table
    buffers: Sequence[EncodedArray] = ()
    children: Sequence[Column] = ()
    extension: str = ""


def vector_column(name: str, array_ND: EncodedArray) -> Column:
    """Return a column with a vector in each row."""
    count, width = array_ND.shape
    return Column(name, count, _FIXED_LIST, _Table([_Number("i", width)]), children=[scalar_column("item", array_ND)])


def list_column(name: str, offsets_N1: Int64Array, items: Column) -> Column:
    """Return a column of lists. Row i has the items offsets_N1[i] to offsets_N1[i + 1]."""
    order = _buffers([items])[0].order
    offsets = EncodedArray(offsets_N1.astype(np.int32), "int32", order)
    return Column(name, len(offsets_N1) - 1, _LIST, _Table(), [offsets], [replace(items, name="item")])


def struct_column(name: str, *columns: Column) -> Column:
    return Column(name, columns[0].length, _STRUCT, _Table(), children=columns)


def scalar_column(name: str, array: EncodedArray) -> Column:
    bits = 8 * array.storage_dtype.itemsize
    length = int(np.prod(array.shape))
    if array.dtype in _PRECISION:
        return Column(name, length, _FLOAT, _Table([_Number("h", _PRECISION[array.dtype])]), [array])
    if array.dtype == "bfloat16":
        return Column(name, length, _FIXED_BINARY, _Table([_Number("i", 2)]), [array], extension="lance.bfloat16")
    signed = array.storage_dtype.kind == "i"
    return Column(name, length, _INT, _Table([_Number("i", bits), _Number("b", signed)]), [array])


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
    schema = [_Number("h", buffers[0].is_big), [_field(column) for column in columns], _key_values(metadata)]
    nodes = [number for column in _flat(columns) for number in (column.length, 0)]
    extents: list[int] = []
    end = 0
    for column in _flat(columns):
        for size in (0, *(buffer.nbytes for buffer in column.buffers)):  # 0 bytes are the mask of nulls: there are none
            extents += [end, size]
            end += size + -size % _ALIGN
    batch = _Table([_Number("q", columns[0].length), tuple(nodes), tuple(extents)])
    headers = _message(_SCHEMA, _Table(schema), 0) + _message(_RECORD_BATCH, batch, end)
    return len(headers) + end + len(_END), _stream(headers, buffers)


def _stream(headers: bytes, buffers: Sequence[EncodedArray]) -> Iterator[bytes | memoryview]:
    yield headers
    for buffer in buffers:
        yield from buffer.chunks()
        if padding := -buffer.nbytes % _ALIGN:
            yield bytes(padding)
    yield _END


def _message(kind: int, content: _Table, body_size: int) -> bytes:
    header = _flatbuffer(_Table([_Number("h", _VERSION_5), _Number("b", kind), content, _Number("q", body_size)]))
    header += bytes(-len(header) % _ALIGN)
    return b"\xff\xff\xff\xff" + len(header).to_bytes(4, "little") + header


def _field(column: Column) -> _Table:
    metadata = {"ARROW:extension:name": column.extension, "ARROW:extension:metadata": ""} if column.extension else {}
    children = [_field(each) for each in column.children]
    return _Table([column.name, _Number("b", 0), _Number("b", column.kind), column.type, None, children, _key_values(metadata)])


def _key_values(metadata: Mapping[str, str]) -> list[_Table] | None:
    return [_Table([name, value]) for name, value in metadata.items()] or None


# FlatBuffers, in which the headers are written: the part of the format that they need, front to back


def _flatbuffer(root: _Table) -> bytes:
    """Return the buffer whose root is `root`."""
    data = bytearray(4)
    _write_reference(data, 0, root)
    return bytes(data)


def _write_reference(data: bytearray, place: int, item: _Item) -> None:
    start = _write(data, item)
    struct.pack_into("<I", data, place, start - place)


def _write(data: bytearray, item: _Item) -> int:
    if isinstance(item, _Table):
        return _write_table(data, item)
    if isinstance(item, tuple):
        start = _align(data, 8, before=4)
        data += struct.pack(f"<I{len(item)}q", len(item) // 2, *item)
        return start
    start = _align(data, 4)
    if isinstance(item, str):
        text = item.encode()
        data += struct.pack("<I", len(text)) + text + b"\0"
        return start
    data += struct.pack("<I", len(item)) + bytes(4 * len(item))
    for number, each in enumerate(item):
        _write_reference(data, start + 4 + 4 * number, each)
    return start


def _write_table(data: bytearray, table: _Table) -> int:
    slot_offsets: list[int] = []
    end = 4
    for slot in table.slots:
        size = 4 if not isinstance(slot, _Number) else struct.calcsize(slot.kind)
        start = -(-end // size) * size
        slot_offsets.append(0 if slot is None else start)
        end = end if slot is None else start + size
    vtable = _align(data, 2)
    data += struct.pack(f"<{2 + len(slot_offsets)}H", 4 + 2 * len(slot_offsets), end, *slot_offsets)
    start = _align(data, 8)
    data += struct.pack("<i", start - vtable) + bytes(end - 4)
    for slot, offset in zip(table.slots, slot_offsets, strict=True):
        if isinstance(slot, _Number):
            struct.pack_into("<" + slot.kind, data, start + offset, slot.value)
        elif slot is not None:
            _write_reference(data, start + offset, slot)
    return start


def _align(data: bytearray, size: int, *, before: int = 0) -> int:
    """Append zeros so that the position `before` bytes after the end is a multiple of `size`. Return the end."""
    data += bytes(-(len(data) + before) % size)
    return len(data)
