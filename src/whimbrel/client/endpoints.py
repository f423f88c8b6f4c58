"""Several servers that serve the same: who is asked next."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Final

_COOLDOWN_SECONDS: Final = 5.0
"""Seconds for which a server that failed is asked only if all do."""


@dataclass(slots=True)
class _Server:
    url: str
    in_flight: int = 0
    rests_until: float = 0.0
    has_answered: bool = False


class Endpoints:
    """The base URLs of a client. Safe to use from many threads."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = monotonic) -> None:
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._clock = clock
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._servers)

    @contextmanager
    def acquire(self) -> Generator[str]:
        """The one that has the fewest requests of ours, of those that did not fail of late; of equals the first."""
        with self._lock:
            now = self._clock()
            server = min(self._servers, key=lambda each: (max(each.rests_until - now, 0.0), each.in_flight))
            server.in_flight += 1
        try:
            yield server.url
        finally:
            with self._lock:
                server.in_flight -= 1

    def failed(self, url: str, seconds: float) -> bool:
        """It is left alone for `seconds`, or a while. Says whether another is up, so that there is no need to wait."""
        with self._lock:
            now = self._clock()
            self._of(url).rests_until = now + max(seconds, _COOLDOWN_SECONDS)
            return any(server.rests_until <= now for server in self._servers)

    def answered(self, url: str) -> None:
        """It is up."""
        with self._lock:
            server = self._of(url)
            server.rests_until, server.has_answered = 0.0, True

    def has_answered(self, url: str) -> bool:
        """Whether it ever did."""
        with self._lock:
            return self._of(url).has_answered

    def _of(self, url: str) -> _Server:
        return next(server for server in self._servers if server.url == url)
