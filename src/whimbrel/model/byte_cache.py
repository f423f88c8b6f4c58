"""Cache of values by key, within a number of bytes. The least recently used go first. Knows no torch."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from threading import Lock
from typing import Generic, Protocol, TypeVar


class HasNbytes(Protocol):
    @property
    def nbytes(self) -> int: ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=HasNbytes)


class ByteCache(Generic[K, V]):
    """Values on any device. Safe to use from many threads."""

    def __init__(self, max_bytes: int, *, entry_bytes: int = 0) -> None:
        """`max_bytes` bounds all values together, each with `entry_bytes` more."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entry_bytes = entry_bytes
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = Lock()

    def find(self, keys: Sequence[K]) -> list[V | None]:
        """Return for each key the value, or None. Values are shared and must not be written to."""
        with self._lock:
            found = [self._values.get(key) for key in keys]
            for key, value in zip(keys, found, strict=True):
                if value is not None:
                    self._values.move_to_end(key)
        return found

    def add(self, key: K, value: V) -> None:
        """Keep a value, without a copy, unless it alone exceeds the limit or the key is there."""
        size = value.nbytes + self._entry_bytes
        with self._lock:
            if size > self.max_bytes or key in self._values:
                return
            self._values[key] = value
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                _, oldest = self._values.popitem(last=False)
                self.num_bytes -= oldest.nbytes + self._entry_bytes
