"""The page /docs in a browser: contents, search, links, and a form for every route."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import httpx2
import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from browsing import Watched, watched
from serving import Server

REFUSED: Final = "Failed to load resource: the server responded with a status of 4"
"""The browser's own line about an answer that is an error."""
KEY: Final = "s3cret-key"
EVIL: Final = "<img src=x onerror=alert(1)>\"'"
VOLATILE: Final = re.compile(r'"(id|created|modified_at|expires_at|total_duration|load_duration)":\s*("[^"]*"|\d+)')
CHANGING: Final = {"/metrics", "/load"}


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    """A server with a key, whose model has a hostile name."""
    with Server("--served-name", EVIL, WHIMBREL_API_KEY=KEY) as server:
        yield server


def open_docs(watch: Watched, server: Server, anchor: str = "") -> Page:
    page = watch.open(f"{server.url}/docs#{anchor}")
    expect(page.get_by_role("searchbox")).to_be_visible()
    return page


def send(page: Page, route: str) -> Any:
    """Press Send in a route's form and return the browser's response."""
    panel = page.locator(f"#{route} .try")
    with page.expect_response(lambda response: response.request.resource_type == "fetch") as response:
        panel.get_by_role("button", name="Send").click()
    expect(panel.locator(".status")).to_have_attribute("data-status", str(response.value.status))
    return response.value


def test_the_contents_list_every_path(watch: Watched, server: Server) -> None:
    page = open_docs(watch, server)
    links = page.get_by_role("navigation", name="Routes").get_by_role("listitem")
    listed = {text.removeprefix("GET ").split()[0] for text in links.all_inner_texts()}
    assert listed == set(httpx2.get(f"{server.url}/openapi.json").json()["paths"])
    first = page.get_by_role("heading", level=2).nth(0)
    expect(first).to_have_text("OpenAI")


def test_every_form_sends_what_it_says(watch: Watched, server: Server) -> None:
    """The answer is that of the API to the same body, and an error where the model is not made for the route."""
    watch.allow(REFUSED)
    page = open_docs(watch, server)
    expect(page.locator("#openai-v1-embeddings textarea")).to_have_value(re.compile("all-MiniLM-L6-v2"))
    page.get_by_role("button", name="Open all").click()
    routes = page.locator("details.route").evaluate_all("all => all.map((each) => ({id: each.id, ...each.dataset}))")
    statuses: dict[str, int] = {}
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        for route in routes:
            answer = send(page, route["id"])
            request = answer.request
            told = client.request(request.method, request.url, content=request.post_data or b"", headers=request.headers)
            assert (answer.status, request.method) == (told.status_code, route["method"]), route["id"]
            if route["path"] not in CHANGING:
                assert VOLATILE.sub("", answer.text()) == VOLATILE.sub("", told.text), route["id"]
            if "model" in route:
                assert msgspec.json.decode(request.post_data)["model"] == "sentence-transformers/all-MiniLM-L6-v2"
            statuses[route["id"]] = answer.status
    assert len(statuses) >= 60
    refused = {route["id"] for route in routes if route["madeFor"] in ("sparse", "classes", "entities")} | {
        "jina-v1-multi-vector"
    }
    assert {name for name, status in statuses.items() if status != 200} == refused
    assert {status for status in statuses.values() if status != 200} <= {400, 422, 424}
    expect(page.locator("#jina-v1-multi-vector .reply pre")).to_contain_text("this model gives no 'multi_vector'")
    expect(page.locator("#openai-v1-embeddings .reply pre")).to_contain_text("… 376 more")


def test_a_binary_answer_is_shown_by_its_numbers(watch: Watched, server: Server) -> None:
    page = open_docs(watch, server, "whimbrel-v1-embed")
    panel = page.locator("#whimbrel-v1-embed .try")
    for kind in ("application/octet-stream", "application/x-npy"):
        panel.get_by_label("Body").fill('{"input": ["A wader."], "encoding_format": null}')
        panel.get_by_label("Accept").select_option(kind)
        answer = send(page, "whimbrel-v1-embed")
        assert answer.headers["content-type"] == kind
        shown = panel.locator(".reply pre")
        expect(shown).to_contain_text(f"{len(answer.body()):,} bytes of {kind}")
        body = {"input": ["A wader."], "encoding_format": "float"}
        vector = httpx2.post(f"{server.url}/v1/embed", json=body).json()["outputs"]["dense"][0]
        numbers = re.findall(r"-?\d\.\d+(?:e-\d+)?", shown.inner_text().split("float32: ")[1])
        assert [float(each) for each in numbers] == pytest.approx(vector[: len(numbers)], abs=1e-7)
        assert len(numbers) == 8
    expect(panel.locator("pre.curl")).to_contain_text("--output answer.bin")


def test_search_finds_paths_and_fields(watch: Watched, server: Server) -> None:
    page = open_docs(watch, server)
    page.keyboard.press("/")
    box = page.get_by_role("searchbox")
    expect(box).to_be_focused()
    box.fill("truncate_prompt_tokens")
    shown = page.locator("details.route:visible")
    with_field = page.locator("details.route:has(tr[id$='.truncate_prompt_tokens'])")
    assert 0 < shown.count() == with_field.count() < 60
    expect(page.get_by_role("navigation", name="Routes").get_by_text("/api/embed", exact=True)).to_be_hidden()
    box.press("Enter")
    row = page.locator("[id='openai-v1-embeddings.truncate_prompt_tokens']")
    expect(row).to_be_in_viewport()
    assert page.url.endswith("#openai-v1-embeddings.truncate_prompt_tokens")
    box.fill("no such words")
    expect(page.get_by_text("No route and no field has these words.")).to_be_visible()
    box.press("Escape")
    expect(shown).to_have_count(page.locator("details.route").count())


def test_a_link_opens_what_it_leads_to(watch: Watched, server: Server) -> None:
    page = open_docs(watch, server, "tei-rerank.texts")
    expect(page.locator("[id='tei-rerank.texts']")).to_be_in_viewport()
    page.get_by_role("navigation", name="Routes").get_by_text("/v2/rerank").click()
    expect(page.locator("#cohere-v2-rerank table").first).to_be_in_viewport()
    assert page.url.endswith("#cohere-v2-rerank")
    page.go_back()
    expect(page.locator("[id='tei-rerank.texts']")).to_be_in_viewport()


def test_by_keyboard_alone(watch: Watched, server: Server) -> None:
    page = open_docs(watch, server)
    page.keyboard.press("/")
    page.keyboard.type("/api/embed")
    page.keyboard.press("Enter")
    expect(page.locator("#ollama-api-embed > summary")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the button that leads to the form
    body = page.locator("#ollama-api-embed textarea")
    expect(body).to_be_focused()
    page.keyboard.press("Control+Enter")
    expect(page.locator("#ollama-api-embed .status")).to_have_text("200 OK")


def test_a_key_and_a_hostile_name(watch: Watched, locked: Server) -> None:
    watch.allow(REFUSED)
    asked: list[str] = []
    watch.page.on("request", lambda request: request.resource_type == "fetch" and asked.append(request.url))
    page = open_docs(watch, locked, "cohere-v2-embed")
    expect(page.get_by_text("Type the API key")).to_be_visible()
    expect(page.locator("#cohere-v2-embed table").first).to_be_visible()
    panel = page.locator("#cohere-v2-embed .try")
    panel.get_by_role("button", name="Send").click()
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    assert asked == []
    key.fill("wrong")
    key.press("Enter")
    expect(page.get_by_text("The server refused this key.")).to_be_visible()
    key.fill(KEY)
    key.press("Enter")
    body = panel.get_by_label("Body")
    expect(body).to_have_value(re.compile(re.escape(msgspec.json.encode(EVIL).decode())))
    assert send(page, "cohere-v2-embed").status == 200
    curl = panel.locator("pre.curl").inner_text()
    assert "$WHIMBREL_API_KEY" in curl
    assert KEY not in page.content()
    assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    assert page.locator("img[src=x]").count() == 0
    page.reload()
    expect(page.get_by_label("API key")).to_have_value("")


def test_the_model_that_is_made_for_the_route_is_filled_in(watch: Watched, server: Server) -> None:
    def model(name: str, outputs: dict[str, Any]) -> dict[str, Any]:
        return {"card": {"outputs": outputs}, "plan": {"served_name": name, "adapters": {}}, "status": "ready"}

    models = [
        model("ranks", {"scores": {"width": 1}}),
        model("embeds", {"dense": {}}),
        model("sorts", {"scores": {"width": 3}}),
    ]
    answers = [{"status": 503, "json": {"error": {"message": "the model is being loaded."}}}, {"json": {"models": models}}]
    watch.allow("status of 503")
    watch.page.route("**/info", lambda route: route.fulfill(**answers.pop(0)))
    page = open_docs(watch, server)
    expect(page.get_by_text("the model is being loaded.")).to_be_visible()
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("button", name="Open all").click()
    for route, name in {"openai-v1-embeddings": "embeds", "jina-v1-rerank": "ranks", "vllm-classify": "sorts"}.items():
        panel = page.locator(f"#{route} .try")
        expect(panel.get_by_label("Model")).to_have_value(name)
        expect(panel.get_by_label("Body")).to_have_value(re.compile(f'"model": "{name}"'))
        expect(panel.get_by_text("No served model")).to_be_hidden()
    panel = page.locator("#tei-embed-sparse .try")
    expect(panel.get_by_text("No served model is made for this route.")).to_be_visible()
    panel.get_by_label("Model").select_option("embeds")
    expect(panel.get_by_label("Body")).to_have_value(re.compile('"model": "embeds"'))


def test_a_body_that_is_no_json_and_a_server_that_is_gone(watch: Watched, server: Server) -> None:
    watch.allow(REFUSED, "ERR_FAILED|ERR_INTERNET_DISCONNECTED")
    page = open_docs(watch, server, "openai-v1-embeddings")
    panel = page.locator("#openai-v1-embeddings .try")
    panel.get_by_label("Body").fill('{"input": <script>alert(1)</script>')
    assert send(page, "openai-v1-embeddings").status == 400
    page.context.set_offline(True)
    panel.get_by_role("button", name="Send").click()
    expect(panel.get_by_text("No connection to the server.")).to_be_visible()
    page.context.set_offline(False)
    panel.get_by_role("button", name="Reset").click()
    assert send(page, "openai-v1-embeddings").status == 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen(browser: Browser, server: Server, scheme: Any) -> None:
    with watched(browser, viewport={"width": 360, "height": 740}, color_scheme=scheme) as watch:
        page = open_docs(watch, server)
        page.get_by_role("button", name="Open all").click()
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
        send(page, "server-get-info")
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_without_its_script_the_page_can_be_read(browser: Browser, server: Server) -> None:
    with watched(browser, java_script_enabled=False) as watch:
        page = watch.open(f"{server.url}/docs")
        expect(page.get_by_role("navigation", name="Routes").get_by_text("/v1/embed", exact=True).first).to_be_visible()
        page.locator("#tei-embed > summary").click()
        expect(page.locator("#tei-embed pre.curl")).to_contain_text(f"curl {server.url}/embed -H")
