"""Cache of the prefixes of causal models: keys, values and hidden states of leading tokens that many texts share.

The least recently used prefixes go first. Thread-safe; lanes compute outside of it, and two may compute the same prefix at the
same time, of which one is kept. A prefix that a batch uses stays alive for that batch, whether it is still here or not.

Shapes: L tokens, D model width.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from whimbrel.model.ops.kept_keys import KeptKeys
from whimbrel.telemetry.trace import count, gauge


class PrefixKey(NamedTuple):
    """Everything that the numbers of a prefix depend on, in an engine of one model and one dtype."""

    tower: int
    adapter: int
    type_id: int
    ids: bytes


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    kept: KeptKeys
    hidden_LD: Tensor
    """Hidden states of the last layer."""

    @property
    def num_bytes(self) -> int:
        return self.kept.num_bytes + self.hidden_LD.nbytes


class PrefixCache:
    def __init__(self, max_bytes: int, *, model: str = "") -> None:
        self._max_bytes = max_bytes
        self._model = model
        self._prefixes: OrderedDict[PrefixKey, CachedPrefix] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def get(self, key: PrefixKey) -> CachedPrefix | None:
        """Return a prefix and make it the most recent one. Counts a hit or a miss."""
        if not self.is_on:
            return None
        with self._lock:
            if (found := self._prefixes.get(key)) is not None:
                self._prefixes.move_to_end(key)
        count("prefix_cache_hits" if found else "prefix_cache_misses", model=self._model)
        return found

    def put(self, key: PrefixKey, prefix: CachedPrefix) -> None:
        """Keep a prefix, unless it is larger than the cache or another lane has put it."""
        size = prefix.num_bytes
        if size > self._max_bytes:
            return
        with self._lock:
            if key in self._prefixes:
                return
            self._prefixes[key] = prefix
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, oldest = self._prefixes.popitem(last=False)
                self._num_bytes -= oldest.num_bytes
            num_bytes = self._num_bytes
        gauge("prefix_cache_bytes", num_bytes, model=self._model)
