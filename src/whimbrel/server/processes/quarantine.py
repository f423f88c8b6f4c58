"""Quarantine of texts that crash engines, by a digest of their token ids. Pure: it is told the time.

Blame outlives the request: a client that gave up and comes back with the same text begins where it left off.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from math import inf
from typing import Final

import numpy as np

from whimbrel.types.seq import Seq

MAX_BLAME: Final = 2.0
"""An engine's own crash, with nothing else on the device, is 1."""
QUARANTINE_SECONDS: Final = 600.0
_MAX_REMEMBERED: Final = 1024


class QuarantineList:
    """The texts that a worker holds something against."""

    def __init__(self) -> None:
        self._blame: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # (how much, until when)
        self._guilty: OrderedDict[bytes, float] = OrderedDict()  # until when

    def record_crash(self, seq: Seq, much: float, now: float) -> bytes | None:
        """An engine died while this was alone on it. Returns its digest if that was once too often."""
        digest = _digest(seq)
        before, until = self._blame.pop(digest, (0.0, inf))
        total = much + (before if until > now else 0.0)
        if total >= MAX_BLAME:
            self.add(digest, now)
            return digest
        self._blame[digest] = total, now + QUARANTINE_SECONDS
        _bound(self._blame)
        return None

    def clear(self, seq: Seq) -> None:
        """It has run, and the engine lives."""
        self._blame.pop(_digest(seq), None)

    def add(self, digest: bytes, now: float) -> None:
        """Refuse a text for a while."""
        self._guilty[digest] = now + QUARANTINE_SECONDS
        self._guilty.move_to_end(digest)
        _bound(self._guilty)

    def check(self, seqs: Sequence[Seq], now: float) -> tuple[int | None, list[int]]:
        """The index of a text that is refused, if there is one, and the indices of those that must run alone."""
        while self._guilty and next(iter(self._guilty.values())) <= now:
            self._guilty.popitem(last=False)
        while self._blame and next(iter(self._blame.values()))[1] <= now:
            self._blame.popitem(last=False)
        if not self._guilty and not self._blame:
            return None, []
        alone: list[int] = []
        for seq in seqs:
            digest = _digest(seq)
            if self._guilty.get(digest, -inf) > now:
                return seq.index, []
            if digest in self._blame:
                alone.append(seq.index)
        return None, alone


def _digest(seq: Seq) -> bytes:
    return blake2b(np.ascontiguousarray(seq.ids).data, digest_size=16).digest()


def _bound(remembered: OrderedDict[bytes, float] | OrderedDict[bytes, tuple[float, float]]) -> None:
    if len(remembered) > _MAX_REMEMBERED:
        remembered.popitem(last=False)
