"""Routes: the table rows by which the server knows a dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, get_args, get_type_hints

from whimbrel.dialects.common.errors import PYTHON_TERMS, ErrorTerms
from whimbrel.errors import WhimbrelError
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest

if TYPE_CHECKING:
    from whimbrel.types.card import Card
    from whimbrel.types.plan import Plan

JSON: Final = "application/json"
MESSAGE_PACK: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
ANY: Final = ()
"""Whatever a body is declared as."""


class ServedModel(Protocol):
    """The facts about a served model that a dialect may use."""

    @property
    def card(self) -> Card: ...
    @property
    def plan(self) -> Plan: ...


EngineCall: TypeAlias = Request | TokenizeRequest | DetokenizeRequest
ParseRequest: TypeAlias = "Callable[[bytes], tuple[Any, EngineCall | Callable[[ServedModel], EngineCall] | None]]"
"""Parser of bytes to (body, request), or to a function that makes the request once the model is known; both raise
InvalidRequest. None: the model has nothing to do, and the result is None too.
"""


def _none() -> dict[str, str]:
    return {}  # dict[str, str]() would take ten times as long


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """The response to a request."""

    chunks: Iterable[bytes | memoryview]
    """Sent one after another. Making one may take a millisecond; others have their turn before the next is made."""
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=_none)
    size: int | None = None
    """Bytes of all pieces, if that is known before they are made."""
    memory_bytes: int = 0
    """About how many bytes are in memory until the last piece is made, where `size` is not known."""


@dataclass(frozen=True, slots=True)
class Route:
    """A POST route. Its body is a struct of the dialect's own, which `parse_request` returns and `render_response` gets back.

    Several may have one path: then the body decides, by the fields that it has.
    """

    path: str
    summary: str
    parse_request: ParseRequest
    render_response: Callable[[Any, Any, ServedModel], bytes | Response]
    """(body, result, model) -> response. The result is a Result, or what a TokenizeRequest or DetokenizeRequest gets."""
    render_error: Callable[[WhimbrelError], bytes]
    request_type: type
    response_type: Any
    example: str
    media_types: tuple[str, ...]
    """The media types that a body may be declared as."""
    discriminators: frozenset[str]
    """Fields that select this route among those of one path: the first route wins of whose fields the body has one; that
    without any is the last, and takes what is left.
    """
    accepts: Mapping[str, ParseRequest]
    """Media types that a client may accept in place of JSON, and how a body that does not say another format is read then."""
    status: Callable[[WhimbrelError], int]
    """The status of an error."""


@dataclass(frozen=True, slots=True)
class GetRoute:
    """A GET route that describes the served models."""

    path: str
    summary: str
    render_response: Callable[[Sequence[ServedModel]], bytes]
    render_error: Callable[[WhimbrelError], bytes]
    response_type: Any


def _status(error: WhimbrelError) -> int:
    return error.status


@dataclass(frozen=True, slots=True)
class Dialect:
    """The common parts of the routes of one API."""

    render_error: Callable[[WhimbrelError, ErrorTerms], bytes]
    terms: ErrorTerms = PYTHON_TERMS
    status: Callable[[WhimbrelError], int] = _status
    media_types: tuple[str, ...] = (JSON,)

    def route(
        self,
        path: str,
        summary: str,
        parse_request: ParseRequest,
        render_response: Callable[[Any, Any, ServedModel], bytes | Response],
        *,
        response_type: Any,
        example: str,
        terms: ErrorTerms | None = None,
        request_type: type | None = None,
        discriminators: frozenset[str] = frozenset(),
        accepts: Mapping[str, ParseRequest] | None = None,
    ) -> Route:
        """Return a route. Its `request_type` is by default what `parse_request` is annotated to return first."""
        terms = terms or self.terms
        return Route(
            path,
            summary,
            parse_request,
            render_response,
            lambda error: self.render_error(error, terms),
            request_type or get_args(get_type_hints(parse_request)["return"])[0],
            response_type,
            example,
            self.media_types,
            discriminators,
            accepts or {},
            self.status,
        )
