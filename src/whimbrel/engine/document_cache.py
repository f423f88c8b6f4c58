"""Document cache: token vectors of documents that were scored before, so that they need not be computed again.

The key of a document is a hash of everything that its vectors depend on: its token ids and the fields of its seq. A name or an
id that a client chose is no part of it. The least recently used vectors are dropped when the cache is full. Safe to use from
many threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from threading import Lock
from typing import Final, Generic, Protocol, TypeVar

import numpy as np

from whimbrel.outputs.requested import OutputSpec
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.seq import Seq

_ENTRY_BYTES: Final = 400
"""Estimated bytes of an entry besides its vectors."""


class HasNbytes(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=HasNbytes)


class DocumentCache(Generic[T]):
    """Vectors (T, D) by key, on any device; `max_bytes` bounds all of them together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._rows: OrderedDict[bytes, T] = OrderedDict()
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def find(self, keys: Sequence[bytes]) -> list[T | None]:
        """Return for each key the vectors, or None. They are shared and must not be written to."""
        with self._lock:
            cached = [self._rows.get(key) for key in keys]
            for key, rows in zip(keys, cached, strict=True):
                if rows is not None:
                    self._rows.move_to_end(key)
        return cached

    def add(self, key: bytes, rows_TD: T) -> None:
        """Keep vectors, without copying them, unless they alone exceed the limit."""
        size = rows_TD.nbytes + _ENTRY_BYTES
        with self._lock:
            if size > self._max_bytes or key in self._rows:
                return
            self._rows[key] = rows_TD
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, oldest = self._rows.popitem(last=False)
                self._num_bytes -= oldest.nbytes + _ENTRY_BYTES


def cache_key(seq: Seq, spec: OutputSpec, poolings: Sequence[TokenPooling] = ()) -> bytes:
    """Return the hash of everything that a document's vectors depend on, besides model and device."""
    kind = (
        seq.prompt_tokens,
        seq.prefix_tokens,
        seq.type_id,
        seq.second_text_start,
        seq.num_attended,
        seq.is_query,
        seq.adapter,
        seq.tower,
        spec.width,
        spec.activated,
    )
    digest = blake2b(np.array(kind, np.int64).tobytes(), digest_size=32)
    digest.update(repr(tuple(poolings)).encode())
    digest.update(seq.ids.tobytes())
    return digest.digest()
