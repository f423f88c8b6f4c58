"""A FlatBuffers writer for the headers of Arrow's messages.

It covers the part of the format that they need, and writes front to back. Source: flatbuffers.dev/internals.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Number:
    kind: str
    value: int


@dataclass(frozen=True, slots=True)
class Structs:
    """A vector of structs of two 64-bit integers, as one flat list."""

    numbers: Sequence[int]


Item: TypeAlias = "str | Structs | Table | list[Table]"


@dataclass(frozen=True, slots=True)
class Table:
    slots: Sequence[Number | Item | None] = ()


def write_flatbuffer(root: Table) -> bytes:
    """Return the buffer whose root is `root`."""
    data = bytearray(4)
    _write_reference(data, 0, root)
    return bytes(data)


def _write_reference(data: bytearray, place: int, item: Item) -> None:
    start = _write(data, item)
    struct.pack_into("<I", data, place, start - place)


def _write(data: bytearray, item: Item) -> int:
    if isinstance(item, Table):
        return _write_table(data, item)
    if isinstance(item, Structs):
        start = _align(data, 8, before=4)
        data += struct.pack(f"<I{len(item.numbers)}q", len(item.numbers) // 2, *item.numbers)
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


def _write_table(data: bytearray, table: Table) -> int:
    slot_offsets: list[int] = []
    end = 4
    for slot in table.slots:
        size = 4 if not isinstance(slot, Number) else struct.calcsize(slot.kind)
        start = -(-end // size) * size
        slot_offsets.append(0 if slot is None else start)
        end = end if slot is None else start + size
    vtable = _align(data, 2)
    data += struct.pack(f"<{2 + len(slot_offsets)}H", 4 + 2 * len(slot_offsets), end, *slot_offsets)
    start = _align(data, 8)
    data += struct.pack("<i", start - vtable) + bytes(end - 4)
    for slot, offset in zip(table.slots, slot_offsets, strict=True):
        if isinstance(slot, Number):
            struct.pack_into("<" + slot.kind, data, start + offset, slot.value)
        elif slot is not None:
            _write_reference(data, start + offset, slot)
    return start


def _align(data: bytearray, size: int, *, before: int = 0) -> int:
    """Append zeros so that the position `before` bytes after the end is a multiple of `size`. Return the end."""
    data += bytes(-(len(data) + before) % size)
    return len(data)
