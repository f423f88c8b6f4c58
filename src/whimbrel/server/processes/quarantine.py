"""Quarantine of texts that crash engines, by a digest of their token ids. Pure: time is an argument.

Blame outlives the request. If a client gives up and sends the same text again, its blame still counts.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

from whimbrel.types.seq import Seq

MAX_BLAME: Final = 2.0
"""Blame from which a text is refused. A crash of an engine that ran only this text counts 1."""
QUARANTINE_SECONDS: Final = 600.0
_MAX_ENTRIES: Final = 2048


class QuarantineList:
    """The texts that crashed engines, as one worker knows them."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """The blame of each digest, and the time at which it is forgotten: the next to be forgotten is first."""

    def record_crash(self, seq: Seq, blame: float, now: float) -> bytes | None:
        """Blame a seq that was alone on an engine when that died. Return its digest if it is refused from now on."""
        digest = _digest(seq)
        before, until = self.entries.get(digest, (0.0, 0.0))
        total = blame + (before if until > now else 0.0)
        self.add(digest, now, total)
        return digest if total >= MAX_BLAME else None

    def clear(self, seq: Seq) -> None:
        """Forget the blame of a seq that ran without a crash. A text that is refused already stays refused."""
        digest = _digest(seq)
        if self.entries.get(digest, (MAX_BLAME, 0.0))[0] < MAX_BLAME:
            del self.entries[digest]

    def add(self, digest: bytes, now: float, blame: float = MAX_BLAME) -> None:
        """Set the blame of a text for `QUARANTINE_SECONDS`."""
        self.entries[digest] = blame, now + QUARANTINE_SECONDS
        self.entries.move_to_end(digest)
        if len(self.entries) > _MAX_ENTRIES:
            self.entries.popitem(last=False)

    def refused(self, now: float) -> list[bytes]:
        """Return the digests of the texts that are refused."""
        return [digest for digest, (blame, until) in self.entries.items() if blame >= MAX_BLAME and until > now]

    def check(self, seqs: Sequence[Seq], now: float) -> tuple[int | None, list[int]]:
        """Return the index of a seq that is refused, or None, and the indices of the seqs that must run alone."""
        while self.entries and next(iter(self.entries.values()))[1] <= now:
            self.entries.popitem(last=False)
        alone: list[int] = []
        for seq in seqs:
            if (entry := self.entries.get(_digest(seq))) is not None:
                if entry[0] >= MAX_BLAME:
                    return seq.index, []
                alone.append(seq.index)
        return None, alone


def _digest(seq: Seq) -> bytes:
    return blake2b(np.ascontiguousarray(seq.ids).data, digest_size=16).digest()
