"""Routes: the interface between dialects and the server, and errors in the terms of an API."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Final, Generic, Literal, Self, TypeAlias, TypeVar, cast, get_args, get_type_hints

from whimbrel.dialects.common.bodies import decode
from whimbrel.dialects.common.operations import Operation
from whimbrel.dialects.common.responses import ARROW, JSON, NPY, OCTETS, Response, ServedModel
from whimbrel.errors import InvalidRequest, Locate, Location, WhimbrelError
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest

MESSAGE_PACK: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
ANY: Final = ()
"""Media types of a route that does not check how a body is declared."""
PLACEHOLDERS: Final = frozenset(("", "tei", "text-embeddings-inference", "default/not-specified"))
"""Names that clients send where a server takes any: mem0's and LiteLLM's of TEI and of Infinity, and none at all."""
_FORMATS: Final = {OCTETS: "bytes", NPY: "npy", ARROW: "arrow"}
ModelKind: TypeAlias = Literal["any", "dense", "sparse", "multi_vector", "ranking", "classes", "entities"]
EngineCall: TypeAlias = Request | TokenizeRequest | DetokenizeRequest
B = TypeVar("B")


@dataclass(frozen=True, slots=True, eq=False)
class Parsed(Generic[B]):
    """A body, and the second step: the request that it makes of a model."""

    body: B
    request: Callable[[ServedModel], EngineCall | None]
    """Return the request for a model. Raises InvalidRequest if the model cannot answer it.

    None in place of a request needs no run of the model, and the result is None."""


def ready(body: B, request: EngineCall | None) -> Parsed[B]:
    """Return a parsed body whose request is the same for every model."""
    return Parsed(body, lambda _: request)


Parse: TypeAlias = Callable[[bytes], Parsed[Any]]
"""Parser of bytes, without a model. Raises InvalidRequest and TooLarge."""


def parser(kind: type[B], request: Callable[[B], EngineCall | None]) -> Parse:
    """Return the parser of JSON bodies of one type whose request is the same for every model."""

    def parse(raw: bytes) -> Parsed[Any]:
        body = decode(kind, raw)
        return ready(body, request(body))

    parse.__annotations__["return"] = cast(Any, Parsed)[kind]
    return parse


@dataclass(frozen=True, slots=True)
class ErrorTerms:
    """The terms of an API: its names of fields, and its spelling of the options that hints name."""

    fields: Mapping[str, str | Locate] = field(default_factory=dict[str, "str | Locate"])
    """Names of fields of a Request that differ, or functions that map locations in a field."""
    options: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    """Spellings of `whimbrel.errors.OPTIONS` that differ."""

    def extended(self, fields: Mapping[str, str | Locate], options: Mapping[str, str | None] | None = None) -> Self:
        return replace(self, fields={**self.fields, **fields}, options={**self.options, **(options or {})})

    def locate(self, location: Location) -> Location:
        """Return a location in a Request by the API's names."""
        name = self.fields.get(location.field, location.field)
        return Location(name, location.item, location.part, location.path) if isinstance(name, str) else name(location)

    def describe(self, error: WhimbrelError) -> tuple[str, str | None]:
        """Return the text of an error with its location, and the location alone."""
        message = error.message
        if isinstance(error, InvalidRequest) and error.hint is not None:
            message = error.statement + error.hint.sentence(self.options)
        if error.location is None:
            return message, None
        location = str(self.locate(error.location))
        return f"{location}: {message}", location


@dataclass(frozen=True, slots=True)
class Route:
    """A POST route in three steps: `parse` reads a body, `Parsed.request` makes a request of it for a model, and
    `render_response` gets the body back with the result. The body is a struct of the dialect's own.

    Several may have one path: then the body decides, by the fields that it has. Each dialect has a partial Route with its way
    to render errors.
    """

    path: str
    summary: str
    parse: Parse
    render_response: Callable[[Any, Any, ServedModel], bytes | Response]
    """(body, result, model) -> response. The result is a Result, or what a TokenizeRequest or DetokenizeRequest gets."""
    _: KW_ONLY
    response_type: Any
    example: str
    render: Callable[[WhimbrelError, ErrorTerms], bytes]
    """Return the body of an error in the words of its terms."""
    error_type: type
    """The type of that body."""
    terms: ErrorTerms = ErrorTerms()
    """Those of the Python API by default, as on Whimbrel's own routes."""
    status: Callable[[WhimbrelError], int] = lambda error: error.status
    """Return the HTTP status of an error."""
    media_types: tuple[str, ...] = (JSON,)
    """Media types that a body may be declared as."""
    discriminators: frozenset[str] = frozenset()
    """Fields that select this route among several with one path; a route without any takes the bodies that are left."""
    of_client: Callable[[Mapping[bytes, bytes]], bool] | None = None
    """Return whether headers are of a client of this API whose bodies look like those of the route without discriminators."""
    placeholders: frozenset[str] = frozenset()
    """Names of models that clients of this API send without meaning one; they count as none."""
    suits: Callable[[Any, ServedModel], bool] = lambda body, model: True
    """Return whether a model is made for a body; the others may answer it too."""
    made_for: ModelKind = "any"
    """The kind of model whose answers the route is for. Other models may answer it too."""
    operate: Callable[[Any], Operation | None] = lambda body: None
    """Return what a body asks of the server itself, where an operator sends it. Raises InvalidRequest."""
    accepts: Mapping[str, Parse] = field(default_factory=dict[str, Parse])
    """Media types that a client may accept in place of JSON, each with the parser for bodies that name no format."""
    parse_by: Callable[[Mapping[bytes, bytes]], Parse] | None = None
    """Return the parser by the headers of a request, where they say how the body is to be read."""
    body_type: type | None = None
    """The type of the JSON, where `parse` returns something else."""

    @property
    def request_type(self) -> type:
        """The type of the JSON; by default that of the body which `parse` is annotated to return."""
        return self.body_type or get_args(get_type_hints(self.parse)["return"])[0]

    def render_error(self, error: WhimbrelError) -> bytes:
        return self.render(error, self.terms)


@dataclass(frozen=True, slots=True)
class GetRoute:
    """A GET route over the models that are served, or over the one that `{model}` in its path stands for."""

    path: str
    summary: str
    render_response: Callable[[Sequence[ServedModel]], bytes]
    render_error: Callable[[WhimbrelError], bytes]
    error_type: type
    response_type: Any
    if_ready: bool = False
    """Answer 503 while these models are not ready."""


@dataclass(frozen=True, slots=True)
class API:
    """An API and the routes that its documentation describes. Routes that it shares with others are listed with one of them."""

    name: str
    about: str
    """A sentence for readers of /docs."""
    routes: tuple[Route, ...]
    get_routes: tuple[GetRoute, ...] = ()


def binary_types(formats: Sequence[str]) -> list[str]:
    """Return the media types of the binary answers among some formats."""
    return [media_type for media_type, name in _FORMATS.items() if name in formats]


def binary_formats(parse: Callable[..., Parsed[Any]]) -> dict[str, Parse]:
    """Return the media types of binary answers, each with `parse` for bodies that name no format."""
    return {media_type: partial(parse, default=name) for media_type, name in _FORMATS.items()}
