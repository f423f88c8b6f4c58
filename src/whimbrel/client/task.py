"""What a verb sends, in as many requests as it takes, and what becomes of the answers. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar, cast

from msgspec.structs import replace as replace_fields

from whimbrel.errors import Locate, Location, TooLarge, WhimbrelError

R = TypeVar("R")
S = TypeVar("S")

JSON: Final = "application/json"
MESSAGE_PACK: Final = "application/msgpack"
_MAX_CHARACTERS: Final = 200_000
"""Of the texts of a request: some 50,000 tokens, which is seconds of work on a CPU."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A successful answer."""

    content: bytes
    headers: Mapping[str, str]
    """Their names may be in any case."""


@dataclass(frozen=True, slots=True, eq=False)
class Task(Generic[R]):
    """A question over items, which may be asked in parts."""

    path: str
    items: Sequence[Any]
    write: Callable[[Sequence[Any]], bytes]
    """Some of the items -> a body. Raises InvalidRequest."""
    read: Callable[[Reply, int], Any]
    """The answer to so many items -> their part of the whole. Raises ValueError if it cannot be read."""
    join: Callable[[list[Any]], R]
    """Of the parts. Raises ValueError if they do not fit together."""
    size: Callable[[Any], int]
    """Characters of an item, about."""
    media_type: str = JSON
    locate: Locate | None = None
    """What the caller calls the inputs, for errors; None: as the server does."""
    whole: bool = False
    """It may not be asked in parts."""
    may_be_empty: bool = False
    """The answer over no items is known: that of no parts."""
    max_items: int | None = None
    """The most of a request, of a server that takes few."""

    def then(self, finish: Callable[[R], S]) -> Task[S]:
        """The same question, of whose answer something is made."""

        def join(parts: list[Any]) -> S:
            return finish(self.join(parts))

        return cast("Task[S]", replace(cast(Any, self), join=join))

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
        if self.items or not self.may_be_empty:
            yield start, len(self.items)

    def split(self, error: WhimbrelError, start: int, stop: int) -> list[tuple[int, int]]:
        """Of a part that the server does not take, if it may be halved; else raises the error, of a place in the whole."""
        if not isinstance(error, TooLarge) or stop - start < 2 or self.whole:
            raise self._placed(error, start, stop) from error.__cause__
        middle = (start + stop) // 2
        return [(start, middle), (middle, stop)]

    def part(self, reply: Reply, count: int) -> Any:
        """As `read`. Raises WhimbrelError."""
        try:
            return self.read(reply, count)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise _unreadable(f"the server's answer cannot be read: {error} ({_begin(reply)}).") from None

    def combine(self, parts: list[Any]) -> R:
        """As `join`. Raises WhimbrelError."""
        try:
            return self.join(parts)
        except ValueError as error:
            message = f"the answers to parts of the list do not fit together: {error}. Do all servers serve the same model?"
            raise _unreadable(message) from None

    def _placed(self, error: WhimbrelError, start: int, stop: int) -> WhimbrelError:
        """An error over the part from item `start` to `stop`, as one over the whole."""
        if error.location is None and 1 < stop - start < len(self.items):
            error.add_note(f"The request was over items {start:,} to {stop - 1:,} of the list.")
        location = error.location
        if location is None and isinstance(error, TooLarge) and stop - start == 1:
            location = Location("input", 0)
        if location is None or location.field not in _PARTS:
            return error
        item = None if location.item is None else location.item + start
        if self.locate is not None:
            return error.at(self.locate(Location("input", item, _PARTS[location.field])))
        return error if start == 0 and location is error.location else error.at(replace_fields(location, item=item))


_PARTS: Final = {"input": 1, "inputs": 1, "texts": 1, "documents": 1, "query": 0, "queries": 0}
"""The fields in which servers have the inputs, and which part of a pair each holds."""


def _unreadable(message: str) -> WhimbrelError:
    error = WhimbrelError(message)
    error.status = 200
    return error


def _begin(reply: Reply) -> str:
    kind, begin = reply.headers.get("content-type", "no content-type"), reply.content[:60]
    shown = f" that begin with {begin.decode()!r}" if begin and begin.isascii() and b"\0" not in begin else ""
    return f"{kind}, {len(reply.content):,} bytes{shown}"
