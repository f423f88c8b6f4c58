"""Memory of requests: the bytes that bodies and answers hold in this process, and the line of requests that wait for room.

For one event loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

SMALL_BODY: Final = 2**16
"""Bytes up to which a body waits for no other, so that queries pass an index that is being built."""
_SMALL_PART: Final = 8
"""Small bodies may take an eighth of the limit beyond it."""

_Line: TypeAlias = "deque[tuple[int, asyncio.Future[None]]]"


@dataclass(slots=True)
class RequestMemory:
    """Bytes that requests hold, up to `limit`. Requests that do not fit wait in line; the lines of tenants take turns.

    A request above the limit is let in alone, so nothing waits for ever.
    """

    limit: int
    used: int = 0
    _lines: OrderedDict[str, _Line] = field(default_factory=OrderedDict[str, _Line])

    async def take(self, size: int, tenant: str) -> None:
        """Hold `size` bytes, once they fit and nobody of the line is before them."""
        passes = size <= SMALL_BODY and self.used + size <= self.limit + self.limit // _SMALL_PART
        if passes or (not self._lines and self._fits(size)):
            self.used += size
        else:
            await self._wait(size, tenant)

    def give(self, size: int) -> None:
        """Give `size` bytes back, and let in the requests that now fit."""
        self.used -= size
        self._let_in()

    async def _wait(self, size: int, tenant: str) -> None:
        room = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append((size, room))
        try:
            await room
        except asyncio.CancelledError:
            if room.cancelled():
                self._let_in()  # the next of the line may be smaller
            else:  # it was let in at the same moment
                self.give(size)
            raise

    def _fits(self, size: int) -> bool:
        return self.used + size <= self.limit or not self.used

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
