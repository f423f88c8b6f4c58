"""The document /openapi.json, from the types of the dialects' routes, and /docs, which shows it by API as a page to read."""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from html import escape
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, cast

import msgspec

from whimbrel import __version__, errors
from whimbrel.dialects import APIS, ROUTES, Route, openai
from whimbrel.dialects import JSON as JSON_TYPE
from whimbrel.dialects.common.bodies import REPLACES, MalformedBody
from whimbrel.dialects.common.openai_errors import OpenAIError
from whimbrel.dialects.common.route import binary_types
from whimbrel.dialects.common.schemas import any_of
from whimbrel.server.app.batch_routes import BATCHES, FILES
from whimbrel.server.app.guards import OPEN_PATHS, OPEN_ROUTES
from whimbrel.server.app.openapi_batches import with_batches
from whimbrel.server.app.routing import ROUTES_BY_PATH, PathRoutes
from whimbrel.server.pages.files import HTML, PageFile, page_file
from whimbrel.server.pages.reference import Entry, Place, Section, reference_html

JSON: TypeAlias = dict[str, Any]

_BASE_URL: Final = "{base_url}"
_REF: Final = "#/components/schemas/{name}"


class Status(msgspec.Struct):
    """Answer of the health routes."""

    status: str


class ServerLoad(msgspec.Struct):
    """Answer of GET /load."""

    server_load: Annotated[int, msgspec.Meta(description="Requests that have not ended; requests for pages do not count.")]


OWN: Final = "Server"
_ABOUT_OWN: Final = "What is served, how the server does, and what it offers."


class Page(NamedTuple):
    """A GET route in OpenAPI's terms."""

    path: str
    summary: str
    kind: Any
    media_types: tuple[str, ...] = (JSON_TYPE,)
    error_type: type = OpenAIError
    api: str = OWN


PAGES: Final = (
    Page("/v1/models", "The models that are served (OpenAI).", openai.ModelsResponse, api=APIS[0].name),
    Page("/v1/models/{model}", "One model.", openai.NamedModel, api=APIS[0].name),
    *(Page(path, "Whether requests are answered: 200 or 503.", Status) for path in ("/health", "/health/ready", "/ping", "/")),
    Page("/health/live", "Whether the process runs.", Status),
    Page("/info", "What the checkpoint says (card) and how it is run (plan); and what TEI says.", dict[str, Any]),
    Page("/load", "How many requests are in progress, of all processes (vLLM).", ServerLoad),
    Page("/metrics", "Prometheus metrics.", str, ("text/plain", "application/openmetrics-text")),
    Page("/openapi.json", "This description of all routes.", dict[str, Any]),
    Page("/docs", "The same as a page to read.", str, ("text/html",)),
    *(
        Page(each.path, each.summary, each.response_type, error_type=each.error_type, api=api.name)
        for api in APIS
        for each in api.get_routes
    ),
)

_COMMON: Final = (
    (errors.MalformedHTTP("there are 2 Host headers; send one."), "The request is no valid HTTP."),
    (errors.Unauthorized("the API key is missing or wrong."), "The API key is missing or wrong."),
    (errors.Forbidden("this server does not answer to the host a."), "The host or the origin is not one that is answered."),
    (errors.PermissionDenied("the API key search may not use this."), "The API key may not use this route or this model."),
    (errors.HeadersTooLarge("there are 200 headers; the limit is 100."), "Too many headers, or too many bytes in them."),
    (errors.Overloaded("the queue is full.", retry_after=1), "The queue is full; `Retry-After` says when to come back."),
    (
        errors.RateLimited("the API key search may use 600 requests a minute, which are used up.", retry_after=1),
        "A budget of the API key is used up; `Retry-After` and the `x-ratelimit` headers say until when.",
    ),
    (errors.WhimbrelError("KeyError in Whimbrel. This is a bug."), "A bug of the server."),
    (errors.Unavailable("the engine is not running.", retry_after=1), "The engine is not running."),
)
_NO_MODEL: Final = (errors.ModelNotFound("no model 'a' here; this server serves b.", param="model"), "No such model.")
_ERRORS: Final = (
    (
        errors.InvalidRequest("is an empty list; give at least one text.", param="input"),
        "The request is wrong; the answer says where.",
    ),
    (MalformedBody("the body is empty; send a JSON object."), "The body cannot be read."),
    (
        errors.InvalidRequest("this model gives no 'sparse'; it gives: dense.", param="outputs"),
        "The model is not made for this route.",
    ),
    *_COMMON,
    _NO_MODEL,
    (errors.BodyTimeout("the body came too slowly: 10 bytes in 30.0 s."), "The body came too slowly."),
    (errors.TooLarge("4,096 inputs; the limit is 2,048.", param="input"), "Too many bytes, inputs or tokens."),
    (errors.TooLarge("the body has 40,000,000 bytes or more; the limit is 33,554,432."), "Too many bytes, inputs or tokens."),
    (errors.UnsupportedMediaType("Content-Type is missing."), "The body is not declared as a type that the route takes."),
    (errors.ComputeError("the computation failed."), "The computation failed."),
    (errors.OutOfMemory("the text does not fit into the device's memory."), "A text does not fit into the device's memory."),
    (errors.DeadlineExceeded("the deadline has passed."), "The time of `X-Request-Timeout` is over."),
)
"""One error of each kind with its description. Status and body depend on the dialect."""


def key_routes() -> frozenset[str]:
    """Return the routes that need a key where a server has keys, as tables of keys name them."""
    return frozenset((*ROUTES_BY_PATH, FILES, BATCHES, *(page.path for page in PAGES if page.path not in OPEN_ROUTES)))


def openapi_document() -> JSON:
    types = [each for route in ROUTES for each in (route.request_type, route.response_type, route.error_type)]
    types += [page.kind for page in PAGES]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    schemas = {name: _replaced(schema) for name, schema in schemas.items()}
    for kind in dict.fromkeys(_structs(msgspec.inspect.multi_type_info(types))):
        if rules := getattr(kind, "RULES", ()):
            schemas[kind.__name__]["allOf"] = list(rules)
    for route in ROUTES:
        name = route.request_type.__name__
        schemas[name] = {"title": name, "description": f"Body of POST {route.path}."} | schemas[name]
    paths: dict[str, JSON] = {path: {"post": post_operation(group.routes, schemas)} for path, group in ROUTES_BY_PATH.items()}
    for path, methods in paths.items():
        methods["post"]["tags"] = [api.name for api in APIS if any(route.path == path for route in api.routes)]
    for page in PAGES:
        paths.setdefault(page.path, {})["get"] = _get(page) | {"tags": [page.api]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Whimbrel", "version": __version__, "summary": "Embeddings from pooling models."},
        "tags": [{"name": api.name, "description": api.about} for api in APIS] + [{"name": OWN, "description": _ABOUT_OWN}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


@cache
def openapi_json(root_path: str = "", *, batches: bool = False) -> bytes:
    """Return /openapi.json for a server under a prefix, perhaps with batches. It takes some 50 ms to make, once per process."""
    document = with_batches(openapi_document()) if batches else openapi_document()
    return msgspec.json.encode(document | ({"servers": [{"url": root_path}]} if root_path else {}))


def _replaced(schema: Any) -> Any:
    """Return a schema in which the keywords of `schema` replace those that msgspec derives from types."""
    if isinstance(schema, dict):
        named = cast(JSON, schema)
        keywords: JSON = {name: _replaced(value) for name, value in named.items()}
        return keywords | {
            name.removeprefix(REPLACES): keywords.pop(name) for name in list(keywords) if name.startswith(REPLACES)
        }
    return [_replaced(each) for each in cast(Sequence[Any], schema)] if isinstance(schema, list | tuple) else schema


def _structs(infos: Sequence[Any]) -> Iterator[type]:
    """Yield the structs that some types consist of; none is recursive."""
    for info in infos:
        if isinstance(info, msgspec.inspect.StructType):
            yield info.cls
        inner = (getattr(info, name, None) for name in ("type", "types", "item_type", "value_type", "fields"))
        for each in inner:
            if each is not None:
                yield from _structs(cast(Sequence[Any], each) if isinstance(each, tuple) else (each,))


def _schema(kinds: Sequence[Any]) -> JSON:
    refs = list(map(_reference, dict.fromkeys(kinds)))
    return dict(refs[0]) if len(refs) == 1 else any_of(*refs)


@cache  # routes share types, and msgspec takes its time
def _reference(kind: Any) -> JSON:
    (ref,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return ref


def post_operation(routes: Sequence[Route], schemas: JSON) -> JSON:
    schema = _body(routes)
    body: JSON = {each: {"schema": schema} for each in PathRoutes(routes).media_types or (JSON_TYPE,)}
    body[JSON_TYPE]["examples"] = {route.summary: {"value": msgspec.json.decode(route.example)} for route in routes}
    binary: JSON = {kind: {} for route in routes for kind in binary_types(_formats(route, schemas))}
    content = {JSON_TYPE: {"schema": _schema([route.response_type for route in routes])}} | binary
    return {
        **_parameters(routes[0].path),
        "summary": " Or: ".join(route.summary for route in routes),
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "The answer.", "content": content}} | _errors(routes),
    }


def _body(routes: Sequence[Route]) -> JSON:
    """Return the schema of the bodies of some routes, of which the fields of the body select the first that has any of them."""
    options: list[JSON] = []
    for index, route in enumerate(routes):
        earlier = sorted({name for each in routes[:index] for name in each.discriminators})
        own = sorted(route.discriminators) if route is not routes[-1] else []
        rules = [_schema([route.request_type])]
        rules += [any_of(*({"required": [name]} for name in own))] if own else []
        rules += [{"not": any_of(*({"required": [name]} for name in earlier))}] if earlier else []
        options.append(rules[0] if len(rules) == 1 else {"allOf": rules})
    return options[0] if len(options) == 1 else any_of(*options)


def _formats(route: Route, schemas: JSON) -> Sequence[str]:
    """Return the formats of answers that the body of a route may ask for."""
    field: JSON = schemas[route.request_type.__name__]["properties"].get("encoding_format", {})
    return [name for option in field.get("anyOf", [field]) for name in option.get("enum", ())]


def _errors(routes: Sequence[Route]) -> dict[str, JSON]:
    """Return the errors of some routes by status, with the types of their bodies and an example from each dialect."""
    responses: dict[str, JSON] = {}
    types: dict[str, list[type]] = {}
    for route in routes:
        for error, text in _ERRORS:
            status = str(route.status(error))
            answer = _described(responses, status, text)
            if body := route.render_error(error):
                types.setdefault(status, []).append(route.error_type)
                examples = answer.setdefault("content", {}).setdefault(JSON_TYPE, {}).setdefault("examples", {})
                examples.setdefault(route.summary, {"value": msgspec.json.decode(body)})
    for status, kinds in types.items():
        responses[status]["content"][JSON_TYPE]["schema"] = _schema(kinds)
    return dict(sorted(responses.items()))


def _described(responses: dict[str, JSON], status: str, text: str) -> JSON:
    answer = responses.setdefault(status, {"description": text})
    if text not in answer["description"]:
        answer["description"] += f" {text}"
    return answer


def _get(page: Page) -> JSON:
    content = {each: {"schema": _schema([page.kind])} for each in page.media_types}
    operation: JSON = {"summary": page.summary, "responses": {"200": {"description": "The answer.", "content": content}}}
    refusals: dict[str, JSON] = {}
    for error, text in (*_COMMON, *([_NO_MODEL] if "{model}" in page.path else [])):
        if not (page.path in OPEN_PATHS and isinstance(error, errors.Unauthorized)):
            _described(refusals, str(error.status), text)["content"] = {JSON_TYPE: {"schema": _schema([page.error_type])}}
    operation["responses"] |= dict(sorted(refusals.items()))
    return operation | _parameters(page.path)


def _parameters(path: str) -> JSON:
    """Return the parameters of a path, if it has any."""
    name: JSON = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {"parameters": [name]} if "{model}" in path else {}


@lru_cache(maxsize=4)
def docs_file(base_url: str, *, needs_key: bool, playground: bool) -> PageFile:
    """Return /docs for a server that the client calls by this URL. The first call of a process takes a while."""
    return page_file(_template(needs_key, playground).replace(_BASE_URL, escape(base_url)).encode(), HTML)


@cache
def _template(needs_key: bool, playground: bool) -> str:
    """Return the page with a placeholder for the URL. It takes some 100 ms to make, once per process."""
    return docs_page(msgspec.json.decode(openapi_json()), base_url=_BASE_URL, needs_key=needs_key, playground=playground)


def docs_page(document: JSON, **facts: Any) -> str:
    """Return the OpenAPI document as a page to read, with the facts that `reference_html` takes. Its script adds search."""
    return reference_html(sections(document), document["components"]["schemas"], version=__version__, **facts)


def sections(document: JSON) -> list[Section]:
    """Return a section per API, then the server's own GET routes. A body that several paths of an API take is one entry."""
    schemas = document["components"]["schemas"]
    found: list[Section] = []
    for api in APIS:
        posts: dict[Any, list[Route]] = {}
        for route in api.routes:
            kind = (route.request_type, str(route.response_type), route.error_type, route.example)
            posts.setdefault(kind, []).append(route)
        entries = [_post_entry(routes, schemas) for routes in posts.values()]
        found.append(Section(api.name, api.about, [*entries, *_get_entries(api.name, document)]))
    return [*found, Section(OWN, _ABOUT_OWN, _get_entries(OWN, document))]


def _post_entry(routes: Sequence[Route], schemas: JSON) -> Entry:
    places = [Place(route.path, tuple(sorted(route.discriminators))) for route in routes]
    return Entry("POST", places, post_operation(routes[:1], schemas), routes[0].made_for)


def _get_entries(api: str, document: JSON) -> list[Entry]:
    """Return an entry for each summary of an API's pages."""
    places: dict[str, list[Place]] = {}
    for page in PAGES:
        if page.api == api:
            places.setdefault(page.summary, []).append(Place(page.path))
    return [Entry("GET", each, document["paths"][each[0].path]["get"]) for each in places.values()]
