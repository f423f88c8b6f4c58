"""Token vectors of documents that were compared before, so that they need not be computed again.

A document is known by what is computed: its token ids and all else that goes into its vectors, hashed; never by a name or an id
of a client's. What was used least lately goes first when the bytes that were granted are full. Safe to use from many threads.
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
"""Of an entry beside its vectors, about."""


class HasNbytes(Protocol):
    """An array or a tensor."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=HasNbytes)


class DocumentCache(Generic[T]):
    """Vectors (T, D) by key, on whatever device; `max_bytes` bounds them all."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._rows: OrderedDict[bytes, T] = OrderedDict()
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def find(self, keys: Sequence[bytes]) -> list[T | None]:
        """For each key the vectors, or None. They are shared: nobody writes into them."""
        with self._lock:
            found = [self._rows.get(key) for key in keys]
            for key, rows in zip(keys, found, strict=True):
                if rows is not None:
                    self._rows.move_to_end(key)
        return found

    def add(self, key: bytes, rows_TD: T) -> None:
        """Keep vectors, which are not copied, unless they alone are too large."""
        size = rows_TD.nbytes + _ENTRY_BYTES
        with self._lock:
            if size > self._max_bytes or key in self._rows:
                return
            self._rows[key] = rows_TD
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, oldest = self._rows.popitem(last=False)
                self._num_bytes -= oldest.nbytes + _ENTRY_BYTES


def cache_key(seq: Seq, ask: OutputSpec, pooling: TokenPooling | None = None) -> bytes:
    """What a document's vectors depend on, model and device apart."""
    kind = (
        seq.prompt_tokens,
        seq.type_id,
        seq.second_text_start,
        seq.num_attended,
        seq.is_query,
        seq.adapter,
        seq.tower,
        ask.width,
        ask.activated,
    )
    digest = blake2b(np.array(kind, np.int64).tobytes(), digest_size=32)
    digest.update(repr(pooling).encode())
    digest.update(seq.ids.tobytes())
    return digest.digest()
