"""The page /docs: every body of every path by API, and the kind of model that each route is made for."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from typing import Any, Final, cast

import msgspec
import pytest
from starlette.testclient import TestClient

from fake_embedder import CARD, FakeEmbedder
from whimbrel.dialects import APIS, GET_ROUTES, ROUTES, Route
from whimbrel.dialects.common.route import ModelKind
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.openapi import docs_page, openapi_document, sections
from whimbrel.server.app.routing import AsyncEmbedder, ModelRegistry, fitness
from whimbrel.server.pages.reference import Entry, Place, Section, reference_html
from whimbrel.types.card import Card, Output

DOCUMENT = openapi_document()
PAGE = docs_page(DOCUMENT, base_url="http://localhost:8000")
VOID: Final = {"meta", "link", "img", "br", "input"}
OPTIONAL_ENDS: Final = {"li", "td", "th", "tr"}


class Outline(HTMLParser):
    """Ids, links within the page, captions of tables, and elements that are never closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.captions: list[str] = []
        self.opened: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        if tag == "a" and (found["href"] or "").startswith("#"):
            self.targets.append((found["href"] or "")[1:])
        if tag == "caption":
            self.captions.append("")
        if tag not in VOID | OPTIONAL_ENDS:
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in OPTIONAL_ENDS:
            assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.opened and self.opened[-1] == "caption":
            self.captions[-1] += data


OUTLINE = Outline(PAGE)


def test_each_route_is_of_one_api() -> None:
    assert sorted(map(id, (route for api in APIS for route in api.routes))) == sorted(map(id, ROUTES))
    assert sorted(page.path for api in APIS for page in api.get_routes) == sorted(page.path for page in GET_ROUTES)


def test_openai_comes_first_and_the_document_has_the_same_sections() -> None:
    names = [section.name for section in sections(DOCUMENT)]
    assert names[0] == "OpenAI"
    assert names == [tag["name"] for tag in DOCUMENT["tags"]]
    tags = {tag for methods in DOCUMENT["paths"].values() for operation in methods.values() for tag in operation["tags"]}
    assert tags == set(names)
    assert DOCUMENT["paths"]["/rerank"]["post"]["tags"] == ["TEI", "vLLM", "Infinity"]


def test_every_body_of_every_path_has_an_entry() -> None:
    found = Counter((place.path, place.selectors) for section in sections(DOCUMENT) for entry in section.entries
                    for place in entry.places if entry.method == "POST")  # fmt: skip
    assert found == Counter((route.path, tuple(sorted(route.discriminators))) for route in ROUTES)
    gets = sorted(place.path for section in sections(DOCUMENT) for entry in section.entries for place in entry.places
                  if entry.method == "GET")  # fmt: skip
    assert gets == sorted(path for path, methods in DOCUMENT["paths"].items() if "get" in methods)


def test_the_contents_list_every_path() -> None:
    contents = PAGE.split('<nav aria-label="Routes">')[1].split("</nav>")[0]
    listed = re.findall(r'<li><a href="#[^"]+">(?:<b>GET</b> )?([^<\s]+)', contents)
    assert set(listed) == set(DOCUMENT["paths"])


def test_the_markup_is_sound() -> None:
    assert OUTLINE.opened == []
    assert [name for name, times in Counter(OUTLINE.ids).items() if times > 1] == []
    assert set(OUTLINE.targets) - set(OUTLINE.ids) == set()


def test_each_body_has_one_table_that_is_named_by_its_api() -> None:
    counts = Counter(caption for caption in OUTLINE.captions if caption.startswith("Request"))
    assert counts == {
        f"Request, {section.name}": sum(entry.method == "POST" for entry in section.entries)
        for section in sections(DOCUMENT)
        if section.name != "Server"
    }


def test_each_field_of_each_request_can_be_linked_to() -> None:
    for section in sections(DOCUMENT):
        for entry in section.entries:
            if entry.method == "POST":
                schema = str(entry.operation["requestBody"]["content"]["application/json"]["schema"])
                name = re.search(r"schemas/(\w+)", schema)
                assert name is not None
                for field in DOCUMENT["components"]["schemas"][name[1]]["properties"]:
                    assert f"{section.anchor_of(entry)}.{field}" in OUTLINE.ids


def test_examples_are_those_of_the_routes() -> None:
    commands = re.findall(r"-d '(.*?)'</code>", PAGE)
    examples = [msgspec.json.decode(unescape(command)) for command in commands]
    for route in ROUTES:
        assert msgspec.json.decode(route.example) in examples


def test_texts_are_escaped() -> None:
    evil = '<script>alert("1")</script>'
    content = {"application/json": {"schema": {"type": evil, "properties": {evil: {"description": evil, "enum": [evil]}}},
                                    "examples": {"a": {"value": {evil: f"{evil}'"}}}}}  # fmt: skip
    operation = {"summary": evil, "requestBody": {"content": content},
                 "responses": {"200": {"content": content}, "400": {"description": evil, "content": content}}}  # fmt: skip
    section = Section(evil, evil, [Entry("POST", [Place(f"/{evil}", (evil,)), Place(evil)], operation)])
    page = reference_html([section], {}, version=evil, base_url=evil)
    assert evil not in page
    assert "alert(&quot;" in page
    Outline(page)


# The page as it is served


def client(**limits: Any) -> TestClient:
    embedder = cast(AsyncEmbedder, FakeEmbedder())
    return TestClient(create_app(ModelRegistry(embedder), guards=ServerLimits(**limits)), base_url="http://localhost")


def test_the_page_names_the_address_that_was_called() -> None:
    answer = client().get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "curl http://localhost/v1/embeddings -H" in answer.text
    assert "It asks for no API key." in answer.text
    tag = answer.headers["etag"]
    assert client().get("/docs", headers={"if-none-match": tag}).status_code == 304
    assert client().get("/docs", headers={"host": "localhost:9", "if-none-match": tag}).status_code == 200


def test_the_page_says_that_a_key_is_needed_and_can_be_read_without() -> None:
    page = client(api_keys=("s3cret",)).get("/docs").text
    assert "It asks for an API key" in page
    assert "s3cret" not in page
    assert len(page) > 100_000


def test_the_page_links_to_the_playground_where_there_is_one() -> None:
    assert ">Playground</a>" in client().get("/docs").text
    assert "Playground" not in client(playground=False).get("/docs").text


def test_a_slash_at_the_end_leads_to_the_page() -> None:
    answer = client().get("/docs/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (308, "../docs")


# Models


def card(**outputs: Output) -> Card:
    return replace(CARD, outputs=outputs)


CARDS: Final[dict[ModelKind, Card]] = {
    "dense": card(dense=Output(8, modes=("mean",), activation="normalize")),
    "sparse": card(sparse=Output(100, activation="relu")),
    "multi_vector": card(multi_vector=Output(4, rows="token")),
    "ranking": card(scores=Output(1)),
    "classes": replace(card(scores=Output(3)), labels=("a", "b", "c")),
    "entities": replace(card(token_scores=Output(3, rows="token")), labels=("O", "B-X", "I-X")),
}


def fitness_of(route: Route, of: Card) -> int:
    embedder = FakeEmbedder()
    embedder.card = of
    return fitness(cast(AsyncEmbedder, embedder), route, route.parse(route.example.encode()))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.path}-{route.request_type.__name__}")
def test_the_kind_of_model_is_one_that_the_server_prefers(route: Route) -> None:
    prefers = {kind for kind, each in CARDS.items() if fitness_of(route, each) == 2}
    assert route.made_for in (prefers if len(prefers) == 1 else {*prefers, "any"})
