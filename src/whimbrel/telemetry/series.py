"""Series of numbers that a process counts, in memory or in a file that the server's other processes read.

Theory of operation. A file is a row of segments. A segment is a row of float64: the number of those in use, then series. A
series is the number of its values, the bytes of its key, the key itself and its values. It is written before the segment counts
it as used, and it never moves. So readers need no lock, and the next process of the same identity goes on with these series.
"""

import json
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import RLock
from typing import Final, TypeAlias

Key: TypeAlias = tuple[str, ...]
"""Name of a metric, and the values of its labels."""
Values: TypeAlias = "memoryview[float]"

_SEGMENT_BYTES: Final = 256 * 1024  # a multiple of every size of pages
_WORD: Final = 8
_LOCK: Final = RLock()  # a finalizer may count while its own thread does


class Series:
    """Values of one key: the number of a counter or gauge, or a histogram's counts of buckets and sum of observations."""

    __slots__ = ("_bounds", "_values")

    def __init__(self, values: Values, bounds: tuple[float, ...] = ()) -> None:
        self._values, self._bounds = values, bounds

    def add(self, amount: float = 1.0) -> None:
        with _LOCK:
            self._values[0] += amount

    def set(self, value: float) -> None:
        self._values[0] = value

    def observe(self, value: float) -> None:
        with _LOCK:
            self._values[bisect_left(self._bounds, value)] += 1
            self._values[-1] += value


class SeriesFile:
    """The series of one process, in a file or, if `path` is None, in memory.

    Room on the disk is reserved: on a full disk, a write into a mapped file would kill the process. Raises OSError.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._values: dict[Key, Values] = {}
        self._segment, self._num_segments = memoryview(b""), 0
        if path is not None:
            size = path.stat().st_size if path.exists() else 0
            for _ in range(max(1, size // _SEGMENT_BYTES)):
                self._map_next(path)
                self._values.update(_read_segment(self._segment))

    def values(self, key: Key, count: int) -> Values:
        """Return the values of a key, zeros if it is new. On a full disk, those of a new key may be on no page."""
        with _LOCK:
            if key not in self._values:
                self._values[key] = self._allocate(key, count)
            return self._values[key]

    def all(self) -> dict[Key, Values]:
        with _LOCK:
            return dict(self._values)

    def _map_next(self, path: Path) -> None:
        with path.open("a+b") as file:
            start = self._num_segments * _SEGMENT_BYTES
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), start, _SEGMENT_BYTES)
            else:
                file.truncate(start + _SEGMENT_BYTES)
            self._segment = memoryview(mmap.mmap(file.fileno(), _SEGMENT_BYTES, offset=start))
            self._num_segments += 1

    def _allocate(self, key: Key, count: int) -> Values:
        in_memory = memoryview(bytearray(count * _WORD)).cast("d")
        if self._path is None:
            return in_memory
        name = json.dumps(key).encode()
        at, size = _num_used(self._segment), 2 + -(-len(name) // _WORD) + count
        if (at + size) * _WORD > _SEGMENT_BYTES:
            try:
                self._map_next(self._path)
            except OSError:
                return in_memory
            at = _num_used(self._segment)
        words = self._segment.cast("d")
        words[at], words[at + 1] = count, len(name)
        self._segment[(at + 2) * _WORD :][: len(name)] = name
        words[0] = at + size
        return words[at + size - count : at + size]


def add_up(files: Iterable[Path]) -> dict[Key, list[float]]:
    """Return the sums over the series of these files. A file that is gone has none."""
    sums: dict[Key, list[float]] = {}
    for file in files:
        try:
            data = memoryview(file.read_bytes())
        except FileNotFoundError:  # the process has just died
            continue
        for start in range(0, len(data) - _SEGMENT_BYTES + 1, _SEGMENT_BYTES):
            for key, values in _read_segment(data[start : start + _SEGMENT_BYTES]):
                before = sums.get(key)
                sums[key] = list(values) if before is None else [a + b for a, b in zip(before, values, strict=True)]
    return sums


def _num_used(segment: memoryview) -> int:
    return max(1, int(segment.cast("d")[0]))


def _read_segment(segment: memoryview) -> Iterator[tuple[Key, Values]]:
    words, at = segment.cast("d"), 1
    while at < _num_used(segment):
        count, length = int(words[at]), int(words[at + 1])
        start = at + 2 + -(-length // _WORD)
        yield tuple(json.loads(bytes(segment[(at + 2) * _WORD :][:length]))), words[start : start + count]
        at = start + count
