"""The connections of a server, and the places that they take.

While a few places are left, connections that do nothing are closed for new ones, the longest idle first, and connections that
work end with their answer. If nothing helps for a while, new connections get one of the places that are kept for probes.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from whimbrel.server.http.limits import HttpLimits
from whimbrel.telemetry.trace import count

_log = logging.getLogger("whimbrel")

_SPARE: Final = 1.0
"""Seconds that a connection is idle before it is closed for another, since its client may just be sending a request.
Also the time without a free place after which new connections get a kept one."""
_KEPT: Final = 32
_KEPT_SHARE: Final = 16
"""One place of this number is kept for probes, and at most _KEPT."""
_LOG_SECONDS: Final = 60.0


class Closable(Protocol):
    def close(self) -> None: ...


class Timeouts:
    """Connections that are closed after the same number of seconds in one state. One timer serves all of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: dict[Closable, float] = {}
        """The start of the time, the earliest first."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: Closable) -> None:
        self._since.pop(connection, None)
        self._since[connection] = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._expire)

    def discard(self, connection: Closable) -> None:
        self._since.pop(connection, None)

    def oldest(self, min_age: float) -> Closable | None:
        """Return the connection that has waited longest, if it has waited for `min_age` seconds."""
        connection = next(iter(self._since), None)
        return connection if connection is not None and self._loop.time() - self._since[connection] >= min_age else None

    def _expire(self) -> None:
        self._timer = None
        while (connection := self.oldest(self._seconds)) is not None:
            del self._since[connection]
            connection.close()
        for since in self._since.values():
            self._timer = self._loop.call_at(since + self._seconds, self._expire)
            return


class Places:
    def __init__(self, limits: HttpLimits, num_places: int, on_release: Callable[[], None] = lambda: None) -> None:
        self._on_release = on_release
        self._loop = asyncio.get_running_loop()
        self._num_places = num_places
        self._num_free_to_all = num_places - min(_KEPT, num_places // _KEPT_SHARE)
        self._last_change = self._loop.time()
        """Time at which the last place was taken, or one of the last became free."""
        self._logged_at = float("-inf")
        self.taken: set[Closable] = set()
        self.idle = Timeouts(limits.header_timeout)
        """Connections without a request, and those whose head has not come to its end."""
        self.lingering = Timeouts(limits.lingering_timeout)
        """Connections whose last answer is written."""

    @property
    def is_full(self) -> bool:
        return len(self.taken) >= self._num_free_to_all

    @property
    def share(self) -> float:
        return len(self.taken) / self._num_free_to_all

    def find_room(self) -> bool:
        """Return whether another connection can be taken, if need be after closing one that is idle."""
        if not self.is_full:
            return True
        if self._loop.time() > self._logged_at + _LOG_SECONDS:
            self._logged_at = self._loop.time()
            count("connection_limit")
            _log.warning(
                "all %d places for connections are taken; idle ones are closed for new ones. max_connections sets the limit.",
                self._num_free_to_all,
            )
        for waiting in (self.lingering, self.idle):
            if (connection := waiting.oldest(_SPARE)) is not None:
                count("idle_connections_closed")
                self.release(connection)
                connection.close()
                return True
        return len(self.taken) < self._num_places and self._loop.time() > self._last_change + _SPARE

    def take(self, connection: Closable) -> bool:
        """Give a connection a place. Return whether it is one of those kept for probes."""
        is_kept = self.is_full
        self.taken.add(connection)
        if self.is_full and not is_kept:
            self._last_change = self._loop.time()
        self.idle.add(connection)
        return is_kept

    def release(self, connection: Closable) -> None:
        """Free the place of a connection that is closed, or is about to be."""
        self.idle.discard(connection)
        self.lingering.discard(connection)
        if connection in self.taken:
            self.taken.discard(connection)
            if len(self.taken) < self._num_free_to_all:
                self._last_change = self._loop.time()
            self._on_release()
