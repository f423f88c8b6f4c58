"""Routes: the interface between dialects and the server."""

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
"""Media types of a route that does not check how a body is declared."""


class ServedModel(Protocol):
    """The attributes of a model that dialects use."""

    @property
    def card(self) -> Card: ...
    @property
    def plan(self) -> Plan: ...


EngineCall: TypeAlias = Request | TokenizeRequest | DetokenizeRequest
ParseRequest: TypeAlias = "Callable[[bytes], tuple[Any, EngineCall | Callable[[ServedModel], EngineCall] | None]]"
"""Parser of bytes to (body, request). In place of the request there may be a function from the model to it.

Both raise InvalidRequest. With None the model has nothing to do, and the result is None."""


def _none() -> dict[str, str]:
    return {}  # dict[str, str]() would take ten times as long


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """The answer to a request."""

    chunks: Iterable[bytes | memoryview]
    """The pieces of the body. Making one may take a millisecond; other requests run before the next is made."""
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=_none)
    size: int | None = None
    """Bytes of all chunks, if known before they are made."""
    memory_bytes: int = 0
    """Approximate bytes that stay in memory until the last chunk is made, if `size` is not known."""


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
    """Media types that a body may be declared as."""
    discriminators: frozenset[str]
    """Fields that select this route among several with one path; a route without any takes the bodies that are left."""
    accepts: Mapping[str, ParseRequest]
    """Media types that a client may accept in place of JSON, each with the parser for bodies that name no format."""
    status: Callable[[WhimbrelError], int]
    """Return the HTTP status of an error."""


@dataclass(frozen=True, slots=True)
class GetRoute:
    """A GET route over the models that are served."""

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
