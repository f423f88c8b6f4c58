"""Memory that waiting requests may take: a share of the machine's, divided among its processes."""

from dataclasses import dataclass
from typing import Final

_ASSUMED: Final = 2**33
"""Bytes of memory of a machine that does not say."""
_PART: Final = 4
"""Waiting requests take at most a quarter of the memory: half of that in the workers, half in the engines."""
_COPIES: Final = 4
"""Bytes that a worker and an engine hold for each byte of a body: the body, its texts, and their tokens twice."""
_BYTES_PER_TOKEN: Final = 8
"""Memory of the id of a token that waits, at most: shared memory comes in powers of two."""
_LEAST: Final = 2**25
"""Bytes of a share on small machines, as of the largest body."""


@dataclass(frozen=True, slots=True)
class WaitingMemory:
    total: int
    """Bytes of all processes together."""
    bodies: int
    """Bytes of bodies in each worker. Clients whose bodies do not fit wait before they are read."""
    results: int
    """Bytes of token ids and results in each engine. Requests that do not fit are refused."""

    @property
    def tokens(self) -> int:
        """Tokens that may wait in each engine."""
        return self.results // _BYTES_PER_TOKEN


def share_waiting_memory(memory: int, *, num_workers: int = 1, num_engines: int = 1) -> WaitingMemory:
    """Return the shares on a machine, or in a container, of `memory` bytes; 0: unknown."""
    total = (memory or _ASSUMED) // _PART
    bodies, results = total // 2 // _COPIES // num_workers, total // 2 // num_engines
    return WaitingMemory(total, max(bodies, _LEAST), max(results, _LEAST))
