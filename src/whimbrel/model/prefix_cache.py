"""Cache of the prefixes of causal models: keys, values and hidden states of leading tokens that many texts share.

Lanes compute outside of it, and two may compute the same prefix at the same time, of which one is kept. A prefix that a batch
uses stays alive for that batch, whether it is still here or not.

Shapes: L tokens, D model width.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from whimbrel.model.byte_cache import ByteCache
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
    def nbytes(self) -> int:
        return self.hidden_LD.nbytes + sum(part.nbytes for pair in self.kept.values() for part in pair)


class PrefixCache(ByteCache[PrefixKey, CachedPrefix]):
    """Cache that counts hits and misses, and shows its size as a gauge."""

    def __init__(self, max_bytes: int, *, model: str = "") -> None:
        super().__init__(max_bytes)
        self._model = model

    @property
    def is_on(self) -> bool:
        return self.max_bytes > 0

    def get(self, key: PrefixKey) -> CachedPrefix | None:
        """Return a prefix and make it the most recent one. Counts a hit or a miss."""
        if not self.is_on:
            return None
        (found,) = self.find([key])
        count("prefix_cache_hits" if found else "prefix_cache_misses", model=self._model)
        return found

    def put(self, key: PrefixKey, prefix: CachedPrefix) -> None:
        """Keep a prefix, unless it is larger than the cache or another lane has put it."""
        self.add(key, prefix)
        gauge("prefix_cache_bytes", self.num_bytes, model=self._model)
