"""What a verb sends, in as many requests as it takes, and what becomes of the answers. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from whimbrel.errors import WhimbrelError

P = TypeVar("P")

JSON: Final = "application/json"
MESSAGE_PACK: Final = "application/msgpack"
_MAX_CHARACTERS: Final = 200_000
"""Of the texts of a request: some 50,000 tokens, which is seconds of work on a CPU."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A successful answer."""

    content: bytes
    headers: Any
    """A mapping whose names may be in any case."""


@dataclass(frozen=True, slots=True, eq=False)
class Task(Generic[P]):
    """A question over items, which may be asked in parts."""

    path: str
    items: Sequence[Any]
    write: Callable[[Sequence[Any]], bytes]
    """Some of the items -> a body. Raises InvalidRequest."""
    read: Callable[[Reply, int], P]
    """The answer to so many items -> their part of the whole. Raises ValueError if it cannot be read."""
    join: Callable[[list[P]], P]
    """Of one part or more."""
    size: Callable[[Any], int]
    """Characters of an item, about."""
    media_type: str = JSON
    name: Callable[..., str] | None = None
    """What the caller calls the inputs, for errors; None: as the server does."""
    whole: bool = False
    """It may not be asked in parts."""
    max_items: int | None = None
    """The most of a request, of a server that takes few."""

    def spans(self, max_items: int) -> Iterator[tuple[int, int]]:
        """Where the parts begin and end: of so many items at most, and not too many characters."""
        max_items = min(max_items, self.max_items or max_items)
        start, characters = 0, 0
        for index, item in enumerate(() if self.whole else self.items):
            size = self.size(item)
            if index > start and (index - start >= max_items or characters + size > _MAX_CHARACTERS):
                yield start, index
                start, characters = index, 0
            characters += size
        yield start, len(self.items)

    def read_part(self, reply: Reply, count: int) -> P:
        """As `read`. Raises WhimbrelError."""
        try:
            return self.read(reply, count)
        except (ValueError, TypeError, LookupError) as error:
            failure = WhimbrelError(f"the server's answer cannot be read: {error}")
            failure.status = 200
            raise failure from None

    def located(self, error: WhimbrelError, start: int) -> WhimbrelError:
        """An error over a part that begins at item `start`, as one over the whole."""
        found = _PLACE.fullmatch(error.param or "")
        if found is None or (self.name is None and start == 0):
            return error
        field, index, rest = found[1], found[2], found[3]
        place = None if index is None else int(index) + start
        if self.name is not None:
            return error.at(self.name(place, _PARTS.get(field, 1)))
        return error.at(field + ("" if place is None else f"[{place}]") + rest)


_PLACE: Final = re.compile(r"(input|inputs|query|queries|documents|texts)(?:\[(\d+)\])?(.*)")
_PARTS: Final = {"query": 0, "queries": 0}
