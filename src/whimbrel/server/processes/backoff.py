"""Backoff: the delay before a process that died is started again. Pure.

A text that kills engines is found by a number of deaths in quick succession, each after the engine was ready; these cost no
delay. A process that dies before it is ready, or goes on dying, is waited for longer each time.
"""

from __future__ import annotations

from typing import Final

_STABLE_SECONDS: Final = 30.0
"""After a life of this length earlier deaths are forgotten."""
_FREE_DEATHS: Final = 10
_FREE_LOADS: Final = 1
_FIRST_SECONDS: Final = 0.5
_MAX_SECONDS: Final = 30.0
_FAILING_DEATHS: Final = 14
_FAILING_LOADS: Final = 3


class Backoff:
    """The past of one process."""

    def __init__(self) -> None:
        self._deaths = 0
        self._failed_loads = 0

    @property
    def failing(self) -> bool:
        """True if it has died so often that nobody should wait for it."""
        return self._deaths >= _FAILING_DEATHS or self._failed_loads >= _FAILING_LOADS

    def ready(self) -> None:
        """It has come to life."""
        self._failed_loads = 0

    def explained(self) -> None:
        """The deaths were a text's fault, and it is known now."""
        self._deaths = 0

    def died(self, *, lived: float | None) -> float:
        """It died, `lived` seconds after it was ready or, with None, before. Returns the seconds until the next try."""
        if lived is None:
            self._failed_loads += 1
            beyond = self._failed_loads - _FREE_LOADS
        else:
            self._deaths = 1 if lived > _STABLE_SECONDS else self._deaths + 1
            beyond = self._deaths - _FREE_DEATHS
        return min(_MAX_SECONDS, _FIRST_SECONDS * 2 ** min(beyond - 1, 16)) if beyond > 0 else 0.0
