"""Retry policy: calls that fail for a while are repeated, with pauses that double, for a bounded time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from whimbrel.errors import SetupError, Unavailable

T = TypeVar("T")
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0


@dataclass(frozen=True, slots=True)
class Retry:
    """A policy, with its clock."""

    wait_seconds: float
    """Time from the first failure to the last try."""
    tell: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, function: Callable[[], T]) -> T:
        """Return what a function returns. One that raises Unavailable is called again. Raises SetupError after the time."""
        begin, pause = None, _FIRST_PAUSE
        while True:
            try:
                return function()
            except Unavailable as error:
                now = self.clock()
                if begin is None:
                    begin = now
                    self.tell(f"the store is not available: {error}; trying for up to {self.wait_seconds:,.0f} s")
                left = begin + self.wait_seconds - now
                if left <= 0:
                    message = f"the store was not available for {self.wait_seconds:,.0f} s: {error}"
                    raise SetupError(message, hint="rows that are written stay; the same command goes on") from None
                self.sleep(min(max(pause, error.retry_after), _LONGEST_PAUSE, left))
                pause *= 2
