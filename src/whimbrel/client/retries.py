"""When a request is tried again, and when it is given up. Nothing waits here."""

from __future__ import annotations

import random
from typing import Final

from whimbrel.client.endpoints import Endpoints
from whimbrel.client.error_mapping import LOST, TIMEOUT, UNREACHED
from whimbrel.errors import Overloaded, Unavailable, WhimbrelError

_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 8.0
_MAX_RETRIES_UNREACHED: Final = 2
"""Tries after a timeout, and to reach a server that has never answered us: it may not be there."""
_MAX_RETRY_AFTER: Final = 60.0
"""Who asks for more than so many seconds is told so at once."""


class RetryPolicy:
    """Of one request."""

    def __init__(self, servers: Endpoints, max_retries: int) -> None:
        self._servers = servers
        self._max_retries = max_retries
        self._moves_left = len(servers) - 1
        self._tries = 0

    def next_delay(self, url: str, error: WhimbrelError) -> float:
        """Seconds until the next try, after the server at `url` failed. Raises the error if that was the last.

        To go on to a server that is up is not to try again, once for each.
        """
        if not _may_pass(error):
            raise error
        asked = error.retry_after if isinstance(error, Overloaded | Unavailable) else 0.0
        is_other_up = self._servers.failed(url, asked)
        if is_other_up and self._moves_left:
            self._moves_left -= 1
            return 0.0
        self._tries += 1
        if self._tries > self._limit(url, error):
            raise error
        if is_other_up or (self._tries == 1 and error.code == LOST):
            return 0.0
        if asked > _MAX_RETRY_AFTER:
            raise error
        backoff = min(_FIRST_WAIT * 2 ** (self._tries - 1), _LONGEST_WAIT) * random.uniform(0.75, 1.0)  # noqa: S311
        return max(asked, backoff)

    def _limit(self, url: str, error: WhimbrelError) -> int:
        is_new = error.code == UNREACHED and not self._servers.has_answered(url)
        return min(self._max_retries, _MAX_RETRIES_UNREACHED) if is_new or error.code == TIMEOUT else self._max_retries


def _may_pass(error: WhimbrelError) -> bool:
    if error.retry is not None:
        return error.retry
    return error.status in (408, 429) or (error.status >= 500 and error.status not in (501, 507))
