"""The page /docs: the bodies of all routes by API, as the document /openapi.json describes them."""

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from html import escape
from typing import Any, Final

import msgspec

from whimbrel import __version__
from whimbrel.dialects import APIS, Route
from whimbrel.server.app.openapi import ABOUT_OWN, GETS, JSON, OF_OPENAI, OWN, openapi_json, post_operation
from whimbrel.server.pages.files import PageFile, page_headers
from whimbrel.server.pages.reference import Entry, Place, Section, reference_html

_BASE_URL: Final = "{base_url}"


def docs_file(base_url: str, *, needs_key: bool, playground: bool) -> PageFile:
    """Return /docs for a server that the client calls by this URL. The first call of a process takes a while."""
    template, digest = _template(needs_key, playground)
    etag = sha256(f"{digest} {base_url}".encode()).hexdigest()
    return PageFile(template.replace(_BASE_URL, escape(base_url)).encode(), page_headers("text/html", etag))


@cache
def _template(needs_key: bool, playground: bool) -> tuple[str, str]:
    """Return the page with a placeholder for the URL, and its digest. It takes some 100 ms to make, once per process."""
    page = docs_page(msgspec.json.decode(openapi_json()), base_url=_BASE_URL, needs_key=needs_key, playground=playground)
    return page, sha256(page.encode()).hexdigest()


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
        gets = [page.path for page in api.get_routes] or (OF_OPENAI if api is APIS[0] else ())
        entries += [_get_entry([path], document) for path in gets]
        found.append(Section(api.name, api.about, entries))
    own: dict[str, list[str]] = {}
    for page in GETS:
        if page.path not in OF_OPENAI:
            own.setdefault(page.summary, []).append(page.path)
    return [*found, Section(OWN, ABOUT_OWN, [_get_entry(paths, document) for paths in own.values()])]


def _post_entry(routes: Sequence[Route], schemas: JSON) -> Entry:
    places = [Place(route.path, tuple(sorted(route.discriminators))) for route in routes]
    return Entry("POST", places, post_operation(routes[:1], schemas), routes[0].made_for)


def _get_entry(paths: Sequence[str], document: JSON) -> Entry:
    return Entry("GET", [Place(path) for path in paths], document["paths"][paths[0]]["get"])
