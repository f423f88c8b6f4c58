"""The page /docs in a browser: contents, search and links."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from browsing import Watched, watched
from serving import Server


def open_docs(watch: Watched, server: Server, anchor: str = "") -> Page:
    page = watch.open(f"{server.url}/docs#{anchor}")
    expect(page.get_by_role("searchbox")).to_be_visible()
    return page


def test_the_contents_list_every_path(watch: Watched, server: Server) -> None:
    page = open_docs(watch, server)
    links = page.get_by_role("navigation", name="Routes").get_by_role("listitem")
    listed = {text.removeprefix("GET ").split()[0] for text in links.all_inner_texts()}
    assert listed == set(httpx2.get(f"{server.url}/openapi.json").json()["paths"])
    first = page.get_by_role("heading", level=2).nth(0)
    expect(first).to_have_text("OpenAI")


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
    expect(page.locator("#ollama-api-embed pre.curl")).to_be_visible()


def test_an_address_that_cannot_be_decoded(watch: Watched, server: Server) -> None:
    page = open_docs(watch, server, "%")
    page.locator("#tei-embed > summary").click()
    expect(page.locator(".toc [aria-current]")).to_have_attribute("aria-current", "true")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen(browser: Browser, server: Server, scheme: Any) -> None:
    with watched(browser, viewport={"width": 360, "height": 740}, color_scheme=scheme) as watch:
        page = open_docs(watch, server)
        page.get_by_role("button", name="Open all").click()
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_without_its_script_the_page_can_be_read(browser: Browser, server: Server) -> None:
    with watched(browser, java_script_enabled=False) as watch:
        page = watch.open(f"{server.url}/docs")
        expect(page.get_by_role("navigation", name="Routes").get_by_text("/v1/embed", exact=True).first).to_be_visible()
        page.locator("#tei-embed > summary").click()
        expect(page.locator("#tei-embed pre.curl")).to_contain_text(f"curl {server.url}/embed -H")
