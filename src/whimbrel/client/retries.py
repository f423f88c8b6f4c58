"""Retry policy. Pure but for its random jitter: computes delays, never sleeps."""

from __future__ import annotations

import random
from typing import Final

from whimbrel.client.endpoints import Endpoints
from whimbrel.client.error_mapping import LOST, TIMEOUT, UNREACHED
from whimbrel.errors import Overloaded, Unavailable, WhimbrelError

_FIRST_DELAY: Final = 0.5
_MAX_DELAY: Final = 8.0
_MAX_RETRIES_UNREACHED: Final = 2
"""Retries after a timeout, and of a server that never answered: it may not exist."""
_MAX_RETRY_AFTER: Final = 60.0
"""Seconds. A longer Retry-After is not waited for: the error is raised at once."""


class RetryPolicy:
    """Retries of one request."""

    def __init__(self, endpoints: Endpoints, max_retries: int) -> None:
        self._endpoints = endpoints
        self._max_retries = max_retries
        self._failovers_left = len(endpoints) - 1
        self._num_retries = 0

    def next_delay(self, url: str, error: WhimbrelError) -> float:
        """Return the seconds until the next try, after the server at `url` failed. Raises the error if no try is left.

        Failover to a server that is up does not count as a retry, once for each other server.
        """
        if not _is_transient(error):
            raise error
        retry_after = error.retry_after if isinstance(error, Overloaded | Unavailable) else 0.0
        is_other_up = self._endpoints.mark_failed(url, retry_after)
        if is_other_up and self._failovers_left:
            self._failovers_left -= 1
            return 0.0
        self._num_retries += 1
        if self._num_retries > self._limit(url, error):
            raise error
        if is_other_up or (self._num_retries == 1 and error.code == LOST):
            return 0.0
        if retry_after > _MAX_RETRY_AFTER:
            raise error
        backoff = min(_FIRST_DELAY * 2 ** (self._num_retries - 1), _MAX_DELAY) * random.uniform(0.75, 1.0)  # noqa: S311
        return max(retry_after, backoff)

    def _limit(self, url: str, error: WhimbrelError) -> int:
        is_unreached = error.code == UNREACHED and not self._endpoints.has_answered(url)
        return min(self._max_retries, _MAX_RETRIES_UNREACHED) if is_unreached or error.code == TIMEOUT else self._max_retries


def _is_transient(error: WhimbrelError) -> bool:
    if error.retry is not None:
        return error.retry
    return error.status in (408, 429) or (error.status >= 500 and error.status not in (501, 507))
