"""Tasks: the requests of a verb, and the join of their responses. Pure: a client sends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, cast

from msgspec.structs import replace as replace_fields

from whimbrel.errors import Locate, Location, TooLarge, WhimbrelError

R = TypeVar("R")
S = TypeVar("S")

JSON: Final = "application/json"
MESSAGE_PACK: Final = "application/msgpack"
_MAX_CHARACTERS: Final = 200_000
"""Maximum characters in one request: some 50,000 tokens, which take a CPU seconds."""
_VECTOR_BYTES: Final = 80
"""Bytes of vectors that count as one character. It limits a request to 16 MB, half of what a server takes."""
_PARTS: Final = {"input": 1, "inputs": 1, "texts": 1, "documents": 1, "query": 0, "queries": 0}
"""Part of a pair by the field in which a server has it: 0 is the query."""


class Reply(NamedTuple):
    content: bytes
    headers: Mapping[str, str]
    """Header fields. Lookup must ignore the case of names."""


class Part(NamedTuple):
    """Part of a result."""

    value: Any
    num_truncated: int
    """Number of texts that the server says it cut; 0 if it does not say."""
    is_listwise: bool
    """True if the server says that scores depend on all documents of a list."""
    num_tokens: int = 0
    """Number of tokens that the server says it read; 0 if it does not say."""
    revision: str = ""
    """Revision of the model that answered; empty if the server does not say."""


class Answered(NamedTuple, Generic[R]):
    """Result of a verb, with what the servers said beside it."""

    value: R
    num_truncated: int
    num_tokens: int
    revisions: frozenset[str]
    """Revisions of the models that answered; none of servers that do not say."""


@dataclass(frozen=True, slots=True, eq=False)
class Task(Generic[R]):
    """Verb over a list of items that may be split over several requests."""

    path: str
    items: Sequence[Any]
    write: Callable[[Sequence[Any]], bytes]
    """Encode some of the items as a request body. Raises InvalidRequest."""
    read: Callable[[Reply, int], Any]
    """Decode the response to N items as their part of the result. Raises ValueError."""
    join: Callable[[list[Any]], R]
    """Join the parts to the result. Raises ValueError if they do not fit together."""
    media_type: str = JSON
    locate: Locate | None = None
    """Map a server's location to that of the caller's argument. None: the items are the texts of one argument."""
    whole: bool = False
    """All items must be in one request."""
    is_list: bool = False
    """The items are documents of one query. A listwise model needs them in one request; its first reply says so."""
    may_be_empty: bool = False
    """An empty list needs no request: its result is the join of no parts."""
    max_items: int | None = None
    """The server's limit of items in one request."""
    times: int = 1
    """Number of times that the model reads each item."""
    method: Literal["GET", "POST"] = "POST"

    def then(self, finish: Callable[[R], S]) -> Task[S]:
        """Return a task whose result is `finish` of this one's."""

        def join(parts: list[Any]) -> S:
            return finish(self.join(parts))

        return cast("Task[S]", replace(cast(Any, self), join=join))

    def spans(self, max_items: int) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each request: at least one item, at most `max_items` and 200,000 characters."""
        max_items = min(max_items, self.max_items or max_items)
        start, characters = 0, 0
        for index, item in enumerate(() if self.whole else self.items):
            size = _size_of(item) * self.times
            if index > start and (index - start >= max_items or characters + size > _MAX_CHARACTERS):
                yield start, index
                start, characters = index, 0
            characters += size
        if self.items or not self.may_be_empty:
            yield start, len(self.items)

    def split(self, error: WhimbrelError, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the halves of a part that was too large for the server. Raise any other error, located in the whole list."""
        if not isinstance(error, TooLarge) or stop - start < 2 or self.whole:
            raise self._relocate(error, start, stop) from error.__cause__
        middle = (start + stop) // 2
        return [(start, middle), (middle, stop)]

    def part(self, reply: Reply, count: int) -> Part:
        """Decode a response like `read`. Raises WhimbrelError."""
        headers = reply.headers
        try:
            return Part(
                self.read(reply, count),
                _count_of(headers.get("x-whimbrel-truncated", "")),
                headers.get("x-whimbrel-listwise") == "true",
                _count_of(headers.get("x-whimbrel-tokens", "")),
                headers.get("x-whimbrel-revision", ""),
            )
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise _invalid_response(f"the server's answer cannot be read: {error} ({_describe(reply)}).") from None

    def needs_whole(self, parts: list[Part]) -> bool:
        """Return whether the parts belong to a list that must be in one request."""
        return self.is_list and len(parts) > 1 and any(part.is_listwise for part in parts)

    def combine(self, parts: list[Part]) -> tuple[R, int]:
        """Join parts like `join`. Returns the number of texts that the servers cut too. Raises WhimbrelError."""
        try:
            return self.join([part.value for part in parts]), sum(part.num_truncated for part in parts)
        except ValueError as error:
            message = f"the answers to parts of the list do not fit together: {error}. Do all servers serve the same model?"
            raise _invalid_response(message) from None

    def _relocate(self, error: WhimbrelError, start: int, stop: int) -> WhimbrelError:
        """Return an error over the items from `start` to `stop` with its location in the whole list."""
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
        moved = replace_fields(location, field="input", item=item)
        return error if moved == error.location else error.at(moved)


def get_task(path: str, read: Callable[[bytes], R]) -> Task[R]:
    return Task(path, (), lambda _: b"", lambda reply, _: read(reply.content), lambda parts: parts[0], method="GET")


def _count_of(header: str) -> int:
    return int(header) if header.isdecimal() and header.isascii() else 0


def _size_of(item: Any) -> int:
    """Return the size of an item in characters, or in units of about the same cost."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, bytes):
        return len(item) // _VECTOR_BYTES
    if isinstance(item, dict):
        return sum(map(_size_of, cast(dict[str, Any], item).values()))
    return sum(map(_size_of, cast(Sequence[Any], item))) if isinstance(item, tuple | list) else 4


def _invalid_response(message: str) -> WhimbrelError:
    error = WhimbrelError(message)
    error.status = 200
    return error


def _describe(reply: Reply) -> str:
    media_type, start = reply.headers.get("content-type", "no content-type"), reply.content[:60]
    excerpt = f" that begin with {start.decode()!r}" if start and start.isascii() and b"\0" not in start else ""
    return f"{media_type}, {len(reply.content):,} bytes{excerpt}"
