"""Client-side load balancing across base URLs.

The least busy server that did not fail recently is next. There are no health checks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Final

_COOLDOWN_SECONDS: Final = 5.0
"""Seconds after a failure in which a server is used only if all have failed."""


@dataclass(slots=True)
class _Server:
    url: str
    in_flight: int = 0
    cooldown_until: float = 0.0
    has_answered: bool = False


class Endpoints:
    """Base URLs of a client, with their load and failures. Threads may share it."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = monotonic) -> None:
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._clock = clock
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._servers)

    @contextmanager
    def acquire(self) -> Generator[str]:
        """Yield the URL of the server with the shortest cooldown, then the fewest requests in flight, then the lowest index."""
        with self._lock:
            now = self._clock()
            server = min(self._servers, key=lambda each: (max(each.cooldown_until - now, 0.0), each.in_flight))
            server.in_flight += 1
        try:
            yield server.url
        finally:
            with self._lock:
                server.in_flight -= 1

    def mark_failed(self, url: str, seconds: float) -> bool:
        """Start a cooldown of `seconds`, at least 5. Returns whether another server is up."""
        with self._lock:
            now = self._clock()
            self._find(url).cooldown_until = now + max(seconds, _COOLDOWN_SECONDS)
            return any(server.cooldown_until <= now for server in self._servers)

    def mark_up(self, url: str) -> None:
        """End the cooldown of a server that answered."""
        with self._lock:
            server = self._find(url)
            server.cooldown_until, server.has_answered = 0.0, True

    def has_answered(self, url: str) -> bool:
        """Return whether the server ever answered."""
        with self._lock:
            return self._find(url).has_answered

    def _find(self, url: str) -> _Server:
        return next(server for server in self._servers if server.url == url)
