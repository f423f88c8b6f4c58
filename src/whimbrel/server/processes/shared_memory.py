"""Memory that two processes see: segments for the arrays of a request, and an engine's board.

Everything is anonymous: a descriptor that is handed over, no name. So it is gone with the last process that holds it, however
these end.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SHARED_BYTES: Final = 2**15
"""Arrays of more bytes than this travel in shared memory."""
_ALIGN: Final = 64
_LEAST: Final = 2**16
_MAX_FREE: Final = 2**26
"""Bytes of segments that are kept for reuse."""
_MAX_FREE_ALIKE: Final = 16
"""Segments of one size that are kept: each takes a descriptor in both processes."""


def anonymous(size: int) -> int:
    """The descriptor of `size` bytes of memory without a name."""
    if sys.platform == "linux":
        fd = os.memfd_create("whimbrel", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:  # unlinked already
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def map_memory(fd: int, size: int) -> mmap.mmap:
    """Map a descriptor, and close it."""
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def share(data: bytes) -> int:
    """The descriptor of memory that holds `data`, for a process that maps it. Raises OSError."""
    fd = anonymous(len(data))
    try:
        with mmap.mmap(fd, len(data)) as memory:
            memory[:] = data
    except BaseException:
        os.close(fd)
        raise
    return fd


def align(size: int) -> int:
    """`size` rounded up so that an array may begin there."""
    return -(-size // _ALIGN) * _ALIGN


def bytes_at(memory: mmap.mmap, offset: int, size: int) -> NDArray[np.uint8]:
    """A part of a segment."""
    return np.frombuffer(memory, np.uint8, size, offset)


@dataclass(slots=True, eq=False)
class Segment:
    """A piece of shared memory, and whether the other process has it already."""

    number: int
    memory: mmap.mmap
    size: int
    fd: int | None
    """The descriptor, until it is handed over."""

    def take_fd(self) -> int | None:
        """The descriptor, the first time."""
        fd, self.fd = self.fd, None
        return fd


class SegmentPool:
    """The segments of one line between a worker and an engine; the worker makes them, lends them and keeps a few.

    Thread-safe: arrays may die in any thread.
    """

    def __init__(self, max_segments: int) -> None:
        self._max_segments = max_segments
        self._num_segments = 0
        self._lock = threading.RLock()  # a garbage collection while it is held may give a segment back
        self._free: dict[int, deque[Segment]] = {}
        self._free_bytes = 0
        self._next = 1
        self._dropped: deque[int] = deque()

    def take(self, size: int) -> Segment | None:
        """A segment of at least `size` bytes; None if no more can be made."""
        size = max(_LEAST, 1 << (size - 1).bit_length())
        with self._lock:
            if free := self._free.get(size):
                self._free_bytes -= size
                return free.popleft()
            if self._num_segments >= self._max_segments:
                return None
            self._num_segments += 1
            number = self._next
            self._next += 1
        fd = -1
        try:
            fd = anonymous(size)
            return Segment(number, mmap.mmap(fd, size), size, fd)
        except (OSError, ValueError):
            if fd >= 0:
                os.close(fd)
            with self._lock:
                self._num_segments -= 1
            return None

    def give_back(self, segment: Segment) -> None:
        """Keep a segment that nobody writes to or reads from any more."""
        with self._lock:
            free = self._free.setdefault(segment.size, deque())
            if self._free_bytes + segment.size <= _MAX_FREE and len(free) < _MAX_FREE_ALIKE:
                self._free_bytes += segment.size
                free.append(segment)
                return
        self.drop(segment)

    def drop(self, segment: Segment) -> None:
        """Forget a segment, which the other process may still use."""
        with self._lock:
            self._num_segments -= 1
        if (fd := segment.take_fd()) is not None:
            os.close(fd)
        else:
            self._dropped.append(segment.number)

    def dropped(self) -> list[int]:
        """The numbers of the segments that were dropped since the last call: the other process is to be told."""
        numbers: list[int] = []
        while self._dropped:
            numbers.append(self._dropped.popleft())
        return numbers

    def borrow(self, segment: Segment, offset: int, size: int) -> NDArray[np.uint8]:
        """A part of a segment, which comes back to the pool when the last view of it is gone."""
        part = bytes_at(segment.memory, offset, size)
        weakref.finalize(part, self.give_back, segment).atexit = False
        return part


_HEADER: Final = np.dtype([("beat", "f8"), ("queued", "i8"), ("small", "i8"), ("rate", "f8")])
_FLIGHT: Final = np.dtype([("started", "f8"), ("count", "i8"), ("tokens", "i8")])
_ENTRY: Final = np.dtype([("worker", "i4"), ("index", "i4"), ("uid", "i8")])


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """A batch that was on the device."""

    started: float
    num_tokens: int
    entries: NDArray[np.void]
    """(worker, index, uid) of each seq."""


class StatusBoard:
    """Status board of an engine: the queue, the throughput, and the seqs on the device right now.

    It writes; the supervisor and the workers read, also after its death. Times are those of time.perf_counter,
    which all processes share.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        sizes = np.frombuffer(memory, "i8", 2)
        flights, capacity = int(sizes[0]), int(sizes[1])
        at = align(16)
        self._header = np.frombuffer(memory, _HEADER, 1, at)
        at += align(_HEADER.itemsize)
        self._flights = np.frombuffer(memory, _FLIGHT, flights, at)
        at += align(_FLIGHT.itemsize * flights)
        self._entries = np.frombuffer(memory, _ENTRY, flights * capacity, at).reshape(flights, capacity)

    @staticmethod
    def create(num_flights: int, capacity: int) -> tuple[StatusBoard, int, int]:
        """A new board for so many batches of so many seqs: (board, descriptor, bytes)."""
        size = align(16) + align(_HEADER.itemsize) + align(_FLIGHT.itemsize * num_flights)
        size += _ENTRY.itemsize * num_flights * capacity
        fd = anonymous(size)
        memory = mmap.mmap(fd, size)
        np.frombuffer(memory, "i8", 2)[:] = num_flights, capacity
        return StatusBoard(memory), fd, size

    def beat(self, now: float, *, queued: int, small: int, rate: float) -> None:
        """The engine lives, and so it stands."""
        self._header[0] = now, queued, small, rate

    @property
    def last_beat(self) -> float:
        return float(self._header["beat"][0])

    @property
    def queued_tokens(self) -> int:
        return int(self._header["queued"][0])

    @property
    def small_tokens(self) -> int:
        return int(self._header["small"][0])

    @property
    def rate(self) -> float:
        """Tokens per second; 0 if not known yet."""
        return float(self._header["rate"][0])

    def start(self, slot: int, now: float, entries: list[tuple[int, int, int]], num_tokens: int) -> None:
        """A batch goes to the device: (worker, index, uid) of each seq. Its time is written last: no flight is half written."""
        self._entries[slot, : len(entries)] = entries
        self._flights[slot] = 0.0, len(entries), num_tokens
        self._flights["started"][slot] = now

    def restart(self, slot: int, now: float) -> None:
        """A batch that was interrupted goes on."""
        self._flights["started"][slot] = now

    def end(self, slot: int) -> None:
        """A batch is done."""
        self._flights["started"][slot] = 0.0

    def flights(self) -> list[InFlightBatch]:
        """Return the batches on the device, or those that were there when the engine died."""
        found: list[InFlightBatch] = []
        for slot in np.flatnonzero(self._flights["started"]).tolist():
            started, count, tokens = self._flights[slot].tolist()
            if started:  # it has not just ended
                found.append(InFlightBatch(started, tokens, self._entries[slot, :count].copy()))
        return found
