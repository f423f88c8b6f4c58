"""Balance of connections between the processes that accept from one listening socket.

Theory of operation. The process that wakes first takes a burst of connections before others are awake, and keeps them while
clients keep them open. So each writes the number of its connections into shared memory. One with clearly more than another
leaves new ones to the others for a moment, and then takes one more: so none waits for a process that is slow or dead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEAVE_SECONDS: Final = 0.001
"""Time for which a process that has more connections than another accepts none."""
_SLACK: Final = 2
_FACTOR: Final = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Balance:
    """Numbers of connections of all processes, of which one is this process."""

    counts: memoryview[int] | list[int]
    index: int

    def note(self, count: int) -> None:
        """Tell the others the number of connections that this process has."""
        self.counts[self.index] = count

    @property
    def is_ahead(self) -> bool:
        """True if this process should leave new connections to others."""
        return self.counts[self.index] > _SLACK + _FACTOR * min(self.counts)
