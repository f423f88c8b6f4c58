"""Shared memory: segments for the arrays of requests, and the status board of an engine.

The memory has no name; a process gets it as a descriptor. The kernel frees it with the last process that holds it, however that
ends.
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
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

SHARED_BYTES: Final = 2**15
"""Arrays of more bytes than this travel in shared memory."""
_ALIGN: Final = 64
_MIN_SEGMENT_BYTES: Final = 2**16
_MAX_FREE_BYTES: Final = 2**26
"""Bytes of segments that are kept for reuse."""
_MAX_FREE_ALIKE: Final = 16
"""Segments of one size that are kept for reuse: each takes a descriptor in both processes."""


def allocate(size: int) -> tuple[int, mmap.mmap]:
    """Return the descriptor of `size` bytes of memory without a name, and the memory. Raises OSError and ValueError."""
    if sys.platform == "linux":
        fd = os.memfd_create("whimbrel", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:  # it has no name any more
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
        return fd, mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise


def map_memory(fd: int, size: int = 0) -> mmap.mmap:
    """Map the memory of a descriptor, by default all of it, and close the descriptor."""
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def share(data: bytes) -> int:
    """Return the descriptor of memory that holds `data`. Raises OSError."""
    fd, memory = allocate(len(data))
    with memory:
        memory[:] = data
    return fd


def align(size: int) -> int:
    """Round an offset up to a cache line, so that an array of any dtype may begin there."""
    return -(-size // _ALIGN) * _ALIGN


@dataclass(slots=True, eq=False)
class Segment:
    number: int
    memory: mmap.mmap
    size: int
    fd: int | None
    """The descriptor, until it is sent to the other process."""

    def take_fd(self) -> int | None:
        """Return the descriptor at the first call, and None later."""
        fd, self.fd = self.fd, None
        return fd


class SegmentPool:
    """The segments of a channel, which its worker makes and reuses. Thread-safe, as garbage is collected in any thread."""

    def __init__(self, max_segments: int) -> None:
        self._max_segments = max_segments
        self._num_segments = 0
        self._lock = threading.RLock()  # a garbage collection while a thread holds it may call `give_back`
        self._free: dict[int, deque[Segment]] = {}
        self._free_bytes = 0
        self._numbers = count(1)
        self._dropped: deque[int] = deque()

    def take(self, size: int) -> Segment | None:
        """Return a segment of at least `size` bytes, or None if the limit is reached or memory is short."""
        size = max(_MIN_SEGMENT_BYTES, 1 << (size - 1).bit_length())
        with self._lock:
            if free := self._free.get(size):
                self._free_bytes -= size
                return free.popleft()
            if self._num_segments >= self._max_segments:
                return None
            self._num_segments += 1
        try:
            fd, memory = allocate(size)
        except (OSError, ValueError):
            with self._lock:
                self._num_segments -= 1
            return None
        return Segment(next(self._numbers), memory, size, fd)

    def give_back(self, segment: Segment) -> None:
        """Keep a segment that no array and no process uses any more."""
        with self._lock:
            free = self._free.setdefault(segment.size, deque())
            if self._free_bytes + segment.size <= _MAX_FREE_BYTES and len(free) < _MAX_FREE_ALIKE:
                self._free_bytes += segment.size
                free.append(segment)
                return
        self.drop(segment)

    def drop(self, segment: Segment) -> None:
        """Forget a segment that the other process may still use."""
        with self._lock:
            self._num_segments -= 1
        if (fd := segment.take_fd()) is not None:
            os.close(fd)
        else:
            self._dropped.append(segment.number)

    def dropped(self) -> list[int]:
        """Return the numbers of the segments that were dropped since the last call, for the other process."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]

    def borrow(self, segment: Segment, offset: int, size: int) -> NDArray[np.uint8]:
        """Return bytes of a segment, which comes back to the pool when the last view of them is gone."""
        part = np.frombuffer(segment.memory, np.uint8, size, offset)
        weakref.finalize(part, self.give_back, segment).atexit = False
        return part


_HEADER: Final = np.dtype([("beat", "f8"), ("queued", "i8"), ("small", "i8"), ("rate", "f8")])
_BATCH: Final = np.dtype([("started", "f8"), ("count", "i8"), ("tokens", "i8")])
_ENTRY: Final = np.dtype([("worker", "i4"), ("index", "i4"), ("uid", "i8")])


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """A batch on the device, or one that was there when the engine died."""

    started: float
    num_tokens: int
    entries: NDArray[np.void]
    """(worker, index, uid) of each seq."""


class StatusBoard:
    """Status board of an engine: its queue, its throughput, and the seqs on the device.

    The engine writes it; the supervisor and the workers read it, also after its death. Times are those of perf_counter, which
    all processes share.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        num_batches, capacity = np.frombuffer(memory, "i8", 2).tolist()
        start = align(16)
        self._header = np.frombuffer(memory, _HEADER, 1, start)
        start += align(_HEADER.itemsize)
        self._batches = np.frombuffer(memory, _BATCH, num_batches, start)
        start += align(_BATCH.itemsize * num_batches)
        self._entries = np.frombuffer(memory, _ENTRY, num_batches * capacity, start).reshape(num_batches, capacity)

    @staticmethod
    def create(num_batches: int, capacity: int) -> tuple[StatusBoard, int]:
        """Return a board for `num_batches` batches of up to `capacity` seqs, and its descriptor."""
        size = align(16) + align(_HEADER.itemsize) + align(_BATCH.itemsize * num_batches)
        size += _ENTRY.itemsize * num_batches * capacity
        fd, memory = allocate(size)
        np.frombuffer(memory, "i8", 2)[:] = num_batches, capacity
        return StatusBoard(memory), fd

    def beat(self, now: float, *, queued: int, small: int, rate: float) -> None:
        """Write the time and the state of the queue, as a sign of life."""
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
        return float(self._header["rate"][0])

    def start(self, slot: int, now: float, entries: list[tuple[int, int, int]], num_tokens: int) -> None:
        """Write (worker, index, uid) of each seq of a batch. Its time is written last, so that no reader sees half a batch."""
        self._entries[slot, : len(entries)] = entries
        self._batches[slot] = 0.0, len(entries), num_tokens
        self._batches["started"][slot] = now

    def restart(self, slot: int, now: float) -> None:
        self._batches["started"][slot] = now

    def end(self, slot: int) -> None:
        self._batches["started"][slot] = 0.0

    def in_flight(self) -> list[InFlightBatch]:
        """Return the batches on the device, or those that were there when the engine died."""
        batches: list[InFlightBatch] = []
        for slot in np.flatnonzero(self._batches["started"]).tolist():
            started, count, tokens = self._batches[slot].tolist()
            if started:  # the batch has not just ended
                batches.append(InFlightBatch(started, tokens, self._entries[slot, :count].copy()))
        return batches
