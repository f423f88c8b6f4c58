"""Tables as flatbuffers: the little of the format that the heads of Arrow's messages need, written front to back.

Source: flatbuffers.dev/internals. A table is a list of slots; one that is None takes the default.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a table, as `struct` writes it: b, h, i or q."""

    kind: str
    value: int


@dataclass(frozen=True, slots=True)
class Structs:
    """A vector of pairs of 64-bit integers, one after another."""

    numbers: Sequence[int]


Item: TypeAlias = "str | Structs | Table | list[Table]"


@dataclass(frozen=True, slots=True)
class Table:
    """Slots in the order of the schema."""

    slots: Sequence[Number | Item | None] = ()


def write_flat(root: Table) -> bytes:
    """The buffer whose root is this table."""
    data = bytearray(4)
    _refer(data, 0, root)
    return bytes(data)


def _refer(data: bytearray, place: int, item: Item) -> None:
    """Write `item` at the end, and at `place` how far it is from there."""
    start = _write(data, item)
    struct.pack_into("<I", data, place, start - place)


def _write(data: bytearray, item: Item) -> int:
    """Where the item begins, now that it is written."""
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
        _refer(data, start + 4 + 4 * number, each)
    return start


def _write_table(data: bytearray, table: Table) -> int:
    places: list[int] = []
    end = 4
    for slot in table.slots:
        size = 4 if not isinstance(slot, Number) else struct.calcsize(slot.kind)
        start = -(-end // size) * size
        places.append(0 if slot is None else start)
        end = end if slot is None else start + size
    sizes = _align(data, 2)
    data += struct.pack(f"<{2 + len(places)}H", 4 + 2 * len(places), end, *places)
    start = _align(data, 8)
    data += struct.pack("<i", start - sizes) + bytes(end - 4)
    for slot, place in zip(table.slots, places, strict=True):
        if isinstance(slot, Number):
            struct.pack_into("<" + slot.kind, data, start + place, slot.value)
        elif slot is not None:
            _refer(data, start + place, slot)
    return start


def _align(data: bytearray, size: int, *, before: int = 0) -> int:
    """Add zeros until what follows begins, `before` bytes later, at a multiple of `size`."""
    data += bytes(-(len(data) + before) % size)
    return len(data)
