"""Memory of requests: the bytes that bodies and answers hold in this process, and the line of requests that wait for room.

For one event loop; not thread-safe.
"""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from whimbrel.errors import WhimbrelError

SMALL_BODY: Final = 2**16
"""Bytes up to which a body waits for no other, so that queries pass an index that is being built."""
_SMALL_PART: Final = 8
"""Small bodies that pass may take an eighth of the limit beyond it."""

_Line: TypeAlias = "deque[tuple[int, asyncio.Future[None]]]"


@dataclass(slots=True)
class RequestMemory:
    """Bytes that requests hold, up to `limit`. Requests that do not fit wait in line; the lines of tenants take turns.

    Small ones pass, into a share of their own. So they hold up no request, and a request above the limit is let in beside
    them alone: nothing waits for ever.
    """

    limit: int
    used: int = 0
    passed: int = 0
    """Bytes of `used` that requests hold which have passed the line."""
    _lines: OrderedDict[str, _Line] = field(default_factory=OrderedDict[str, _Line])

    async def take(self, size: int, tenant: str) -> bool:
        """Hold `size` bytes, once they fit and no request of the line comes before. Return whether they passed the line."""
        if not self._lines and self._fits(size):
            self.used += size
            return False
        if size <= SMALL_BODY and self.passed + size <= self.limit // _SMALL_PART:
            self.used += size
            self.passed += size
            return True
        await self._wait(size, tenant)
        return False

    def give(self, size: int, *, passed: bool = False) -> None:
        """Give `size` bytes back, of a request that may have `passed` the line, and let in the requests that now fit."""
        self.used -= size
        self.passed -= size if passed else 0
        self._let_in()

    def refuse_line(self, error: WhimbrelError) -> None:
        """Raise `error` in all requests that wait in line."""
        for line in self._lines.values():
            for _, room in line:
                if not room.done():
                    room.set_exception(error)
        self._lines.clear()

    async def _wait(self, size: int, tenant: str) -> None:
        room = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append((size, room))
        try:
            await room
        except asyncio.CancelledError:
            if room.cancelled():
                self._let_in()  # the next of the line may be smaller
            elif room.exception() is None:  # it was let in at the same moment
                self.give(size)
            raise

    def _fits(self, size: int) -> bool:
        used = self.used - self.passed
        return used + size <= self.limit or not used

    def _let_in(self) -> None:
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            size, room = line[0]
            if not room.cancelled():
                if not self._fits(size):
                    return
                self.used += size
                room.set_result(None)
            line.popleft()
            if line:
                self._lines.move_to_end(tenant)
            else:
                del self._lines[tenant]
