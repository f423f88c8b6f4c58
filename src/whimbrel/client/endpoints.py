"""Load balancing, failover and retries across base URLs.

The least busy server that did not fail recently is next. There are no health checks. Nothing here sleeps.
"""

import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Final

from whimbrel.client.error_mapping import LOST, TIMEOUT, UNREACHED
from whimbrel.errors import Overloaded, Unavailable, WhimbrelError

_COOLDOWN_SECONDS: Final = 5.0
"""Seconds after a failure in which a server is used only if all have failed."""
_FIRST_DELAY: Final = 0.5
_MAX_DELAY: Final = 8.0
_MAX_RETRIES_UNREACHED: Final = 2
"""Retries after a timeout, and of a server that never answered: it may not exist."""
_MAX_RETRY_AFTER: Final = 60.0
"""Seconds. A longer Retry-After is not waited for: the error is raised at once."""


@dataclass(slots=True)
class _Server:
    in_flight: int = 0
    cooldown_until: float = 0.0
    has_answered: bool = False


class Endpoints:
    """Base URLs of a client, with their load and failures. Threads may share it."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = monotonic) -> None:
        self._servers = {url.rstrip("/"): _Server() for url in urls}
        self._clock = clock
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._servers)

    @contextmanager
    def acquire(self) -> Generator[str]:
        """Yield the URL of the server with the shortest cooldown, then the fewest requests in flight, then the lowest index."""
        with self._lock:
            now = self._clock()
            url, server = min(
                self._servers.items(), key=lambda item: (max(item[1].cooldown_until - now, 0.0), item[1].in_flight)
            )
            server.in_flight += 1
        try:
            yield url
        finally:
            with self._lock:
                server.in_flight -= 1

    def mark_failed(self, url: str, seconds: float) -> bool:
        """Start a cooldown of `seconds`, at least 5. Returns whether another server is up."""
        with self._lock:
            now = self._clock()
            self._servers[url].cooldown_until = now + max(seconds, _COOLDOWN_SECONDS)
            return any(server.cooldown_until <= now for server in self._servers.values())

    def mark_up(self, url: str) -> None:
        with self._lock:
            self._servers[url].cooldown_until, self._servers[url].has_answered = 0.0, True

    def has_answered(self, url: str) -> bool:
        return self._servers[url].has_answered


class RetryPolicy:
    def __init__(self, endpoints: Endpoints, max_retries: int) -> None:
        self._endpoints = endpoints
        self._max_retries = max_retries
        self._failovers_left = len(endpoints) - 1
        self._num_retries = 0

    def headers(self, timeout: float) -> dict[str, str]:
        """Return the headers by which a server knows a retry, as OpenAI's clients send them. `timeout` is that of a try."""
        if not self._num_retries:
            return {}
        return {"x-stainless-retry-count": f"{self._num_retries}", "x-stainless-read-timeout": f"{timeout:g}"}

    def next_delay(self, url: str, error: WhimbrelError) -> float:
        """Return the seconds until the next try, after the server at `url` failed. Raises the error if no try is left."""
        if not _is_transient(error):
            raise error
        retry_after = error.retry_after if isinstance(error, Overloaded | Unavailable) else 0.0
        is_other_up = self._endpoints.mark_failed(url, retry_after)
        if is_other_up and self._failovers_left:  # does not count as a retry, once for each other server
            self._failovers_left -= 1
            return 0.0
        self._num_retries += 1
        is_unreached = error.code == TIMEOUT or (error.code == UNREACHED and not self._endpoints.has_answered(url))
        if self._num_retries > (min(self._max_retries, _MAX_RETRIES_UNREACHED) if is_unreached else self._max_retries):
            raise error
        if is_other_up or (self._num_retries == 1 and error.code == LOST):
            return 0.0
        if retry_after > _MAX_RETRY_AFTER:
            raise error
        backoff = min(_FIRST_DELAY * 2 ** (self._num_retries - 1), _MAX_DELAY) * random.uniform(0.75, 1.0)  # noqa: S311
        return max(retry_after, backoff)


def _is_transient(error: WhimbrelError) -> bool:
    if error.retry is not None:
        return error.retry
    return error.status in (408, 429) or (error.status >= 500 and error.status not in (501, 507))
