"""What a dialect is to the server: a row for each of its routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from whimbrel.errors import WhimbrelError
from whimbrel.types import Decode, Request, Tokenize

if TYPE_CHECKING:
    from whimbrel.card import Card
    from whimbrel.plan import Plan

JSON: Final = "application/json"
MESSAGE_PACK: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
ANY: Final = ()
"""Whatever a body is declared as."""


class ServedModel(Protocol):
    """What a dialect may know of the model that is asked."""

    @property
    def card(self) -> Card: ...
    @property
    def plan(self) -> Plan: ...


Asked: TypeAlias = Request | Tokenize | Decode


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What goes back."""

    pieces: Sequence[bytes | memoryview]
    """Sent one after another, none of them copied."""
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Route:
    """One way to ask for something. `Sent` below is the dialect's own struct, which `write_result` gets back.

    Several may have one path: then the body decides, by the fields that it has.
    """

    path: str
    summary: str
    read_request: Callable[[bytes], tuple[Any, Asked | Callable[[ServedModel], Asked] | None]]
    """body -> (sent, request), or what makes a request of it once the model is known; both raise InvalidRequest. None: the
    model has nothing to do, and the result is None too."""
    write_result: Callable[[Any, Any, ServedModel], bytes | Answer]
    """(sent, result, model) -> body. The result is a Result, or of Tokenize and Decode what they say."""
    write_error: Callable[[WhimbrelError], bytes]
    request_type: type
    response_type: Any
    example: str
    media_types: tuple[str, ...] = (JSON,)
    """What a body may be declared as."""
    marks: frozenset[str] = frozenset()
    """Of several routes of one path the first is taken of whose fields the body has one; that without any is the last, and
    takes what is left."""
    status: Callable[[WhimbrelError], int] = lambda error: error.status
    """The status of an error."""


@dataclass(frozen=True, slots=True)
class Page:
    """What is told of the models that are served, at a GET."""

    path: str
    summary: str
    write: Callable[[Sequence[ServedModel]], bytes]
    write_error: Callable[[WhimbrelError], bytes]
    response_type: Any
