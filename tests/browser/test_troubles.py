"""The playground under hostile texts and names, wrong keys, huge pastes, dying engines and lost connections."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest
import torch
from playwright.sync_api import Page, Route, expect

from browsing import Watched
from checkpoints.classifiers import write_classifier
from checkpoints.encoders import write_bert
from checkpoints.sentence_layout import sentence_layout
from serving import Server

IMAGE = "<img src=x onerror=alert(1)>"
SCRIPT = "</script><script>alert(2)</script>"
KEY = "a-key-of-this-test"
PREFIX = "/behind/a/proxy"
CHROMIUM_LINE = "Failed to load resource"
"""Chromium's own line about an answer that is an error, or about a lost connection."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A dense model, and a classifier whose labels are markup."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(7)
    write_bert(folder / "dense")
    sentence_layout(folder / "dense")
    write_classifier(folder / "classes", "bert", num_labels=3, id2label={0: IMAGE, 1: SCRIPT, 2: "&lt;b&gt;"})
    return [str(folder / name) for name in ("dense", "classes")]


@pytest.fixture(scope="module")
def start(folders: list[str]) -> Callable[..., Server]:
    """Starts a server of both models, with a key, under a prefix and by hostile names."""
    options = ("--served-name", IMAGE, "--served-name", SCRIPT, "--api-key", KEY, "--root-path", PREFIX)
    return partial(Server, *folders, *options)


@pytest.fixture(scope="module")
def guarded(start: Callable[..., Server]) -> Iterator[Server]:
    with start() as server:
        yield server


@pytest.fixture
def playground(watch: Watched, guarded: Server) -> Page:
    """The page of `guarded`, with the key given."""
    watch.allow(CHROMIUM_LINE)
    page = watch.open(f"{guarded.url}{PREFIX}/")
    give_key(page, KEY)
    expect(page.locator("#panel-compare td[data-cosine]").first).to_be_visible()
    return page


def give_key(page: Page, key: str) -> None:
    """Type a key into the dialog."""
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").press("Enter")


def test_a_wrong_key_then_the_right_one(watch: Watched, guarded: Server) -> None:
    watch.allow(r"status of 401")
    page = watch.open(f"{guarded.url}{PREFIX}/")
    give_key(page, "wrong")
    expect(page.locator("#key-wrong")).to_contain_text("refused")
    give_key(page, KEY)
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#panel-compare td[data-cosine]").first).to_be_visible()
    kept = page.evaluate(
        "() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href, history.state])"
    )
    fields = page.evaluate("() => [...document.querySelectorAll('input, textarea')].map((field) => field.value).join()")
    assert KEY not in kept + fields + page.content()
    assert json.loads(kept)[:3] == [{}, {}, ""]
    assert watch.page.context.cookies() == []
    page.locator("#tab-request").click()
    expect(page.locator("#snippet")).to_contain_text("$WHIMBREL_API_KEY")
    assert KEY not in page.content()
    page.reload()  # which forgets the key
    expect(page.locator("#key-dialog")).to_be_visible()


def test_no_key_given(watch: Watched, guarded: Server) -> None:
    watch.allow(r"status of 401")
    page = watch.open(f"{guarded.url}{PREFIX}/")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#panels")).to_contain_text("asks for a key")
    page.get_by_role("button", name="Enter the key").click()
    give_key(page, KEY)
    expect(page.locator("#panel-compare td[data-cosine]").first).to_be_visible()


def test_behind_a_prefix(watch: Watched, guarded: Server) -> None:
    watch.allow(r"status of 401")
    paths: list[str] = []
    watch.page.on("request", lambda request: paths.append(request.url.removeprefix(guarded.url)))
    page = watch.open(f"{guarded.url}{PREFIX}")  # without the slash at its end
    give_key(page, KEY)
    expect(page.locator("#panel-compare td[data-cosine]").first).to_be_visible()
    assert len(paths) > 10
    assert {path for path in paths if not path.startswith(f"{PREFIX}/")} == {PREFIX}


def test_markup_in_names_labels_and_texts(watch: Watched, playground: Page) -> None:
    dialogs: list[str] = []
    playground.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    hostile = "\n".join([IMAGE, SCRIPT, "javascript:alert(3)", '" onload="alert(4)', "<svg onload=alert(5)>"])
    for tab in ("compare", "rerank", "classify", "tokens", "request"):
        playground.locator(f"#tab-{tab}").click()
        panel = playground.locator(f"#panel-{tab}")
        for area in panel.locator("textarea, input[type=text]:not([inputmode])").all():
            area.fill(hostile)
        if tab != "request":
            panel.locator("button.primary").click()
            expect(panel.locator(".output")).to_have_attribute("aria-busy", "false")
            expect(panel.locator(".notice.error")).to_have_count(0)
        expect(panel.locator(".output")).to_contain_text("<")
    expect(playground.locator("#panel-classify .bar-label").get_by_text(IMAGE, exact=True)).to_have_count(5)
    expect(playground.locator("#panel-compare h2").first).to_have_text(IMAGE)
    assert playground.locator("main img, main script, main svg[onload], [onload], [onerror]").count() == 0
    assert dialogs == []


def test_ten_thousand_lines(playground: Page) -> None:
    panel = playground.locator("#panel-compare")
    panel.get_by_role("textbox", name=re.compile("^Texts")).fill(
        "\n".join(f"line {number} of birds" for number in range(10_000))
    )
    expect(panel.locator(".inputs")).to_contain_text("10,000 texts; only the first 200 are used")
    held: list[Route] = []
    playground.route("**/v1/embeddings", lambda route: held.append(route))  # noqa: PLW0108 - Playwright marks the function
    panel.locator("button.primary").click()
    panel.get_by_role("button", name="Stop", exact=True).click()  # the page answers while it works
    expect(panel.locator(".run-notice")).to_contain_text("Stopped")
    assert len(held) == 1
    playground.unroute("**/v1/embeddings")
    panel.locator("button.primary").click()
    expect(panel.locator("tbody tr")).to_have_count(200)


def test_a_text_beyond_the_limits(playground: Page) -> None:
    playground.locator("#tab-classify").click()
    panel = playground.locator("#panel-classify")
    expect(panel.locator(".card").first).to_be_visible()
    panel.get_by_role("textbox").fill("a" * 1_100_000)
    panel.locator("button.primary").click()
    expect(panel.locator(".notice.error")).to_contain_text("1,048,576")
    panel.get_by_role("textbox").fill("a bird")
    panel.locator("button.primary").click()
    expect(panel.locator(".notice.error")).to_have_count(0)
    expect(panel.locator(".card")).to_have_count(1)


def test_tabs_that_no_model_serves_say_so(playground: Page) -> None:
    for tab, needed in {"late": "late-interaction", "sparse": "sparse model", "entities": "labels tokens"}.items():
        node = playground.locator(f"#tab-{tab}")
        expect(node).to_have_attribute("aria-disabled", "true")
        assert needed in (node.get_attribute("title") or "")
        node.click(force=True)
        expect(playground.locator(f"#panel-{tab}")).to_be_hidden()


def test_an_engine_restarts(playground: Page, guarded: Server) -> None:
    before = guarded.children("engine")
    panel = playground.locator("#panel-compare")
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    panel.get_by_role("textbox", name=re.compile("^Texts")).fill("after the crash")
    panel.locator(".run-notice").evaluate(  # a notice may be short
        """(node) => {
          window.told = [];
          new MutationObserver(() => window.told.push(node.textContent)).observe(node, {childList: true, subtree: true});
        }"""
    )
    panel.locator("button.primary").click()
    expect(panel.locator("tbody th")).to_have_text(["after the crash"], timeout=90_000)
    expect(panel.locator(".run-notice")).to_be_empty()
    assert re.search("waits|Next try", " ".join(playground.evaluate("window.told")))
    assert set(guarded.children("engine")).isdisjoint(before)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"status": 429, "headers": {"x-should-retry": "false"}, "json": {"error": IMAGE}}, IMAGE),
        ({"status": 404, "json": {"error": {"message": "no model x."}}}, "No model x. Reload the page"),
        ({"json": {"unknown": 1}}, "cannot read the answer"),
        ({"json": {"data": [{"embedding": "AADAfwAAwH8="}] * 6}}, "vectors that are not numbers"),
    ],
)
def test_answers_that_are_of_no_use(watch: Watched, server: Server, answer: Any, told: str) -> None:
    watch.allow(CHROMIUM_LINE, "TypeError")
    watch.page.route("**/v1/embeddings", lambda route: route.fulfill(**answer))
    page = watch.open(f"{server.url}/#%")  # an address that cannot be decoded
    expect(page.locator("#panel-compare .notice.error")).to_contain_text(told)
    page.unroute("**/v1/embeddings")
    page.locator("#panel-compare button.primary").click()
    expect(page.locator("#panel-compare td[data-cosine]").first).to_be_visible()
    expect(page.locator("#panel-compare .notice")).to_have_count(0)


def test_a_model_becomes_ready_after_a_lost_connection(watch: Watched, server: Server) -> None:
    watch.allow(CHROMIUM_LINE)
    ready = httpx2.get(f"{server.url}/info").json()
    model = ready["models"][0]
    answers = [{**ready, "models": []}, {**ready, "models": [{**model, "status": "loading"}]}, None]

    def answer(route: Route) -> None:
        following = answers.pop(0) if answers else ready
        route.fulfill(json=following) if following else route.abort()

    watch.page.route("**/info", answer)
    page = watch.open(server.url)
    expect(page.locator(".notice.error")).to_contain_text("no model yet")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#status")).to_contain_text("loading")
    expect(page.locator("#status")).to_contain_text("No connection")
    expect(page.locator("#status")).to_contain_text("ready")


def test_halves_of_characters_and_cut_texts(watch: Watched, server: Server) -> None:
    page = watch.open(server.url.replace("://", "://user:password@"))  # as for a proxy that asks for it
    panel = page.locator("#panel-compare")
    texts = panel.get_by_role("textbox", name=re.compile("^Texts"))
    texts.evaluate("(area) => { area.value = '\\ud83d bird\\n' + 'bird '.repeat(1000); }")
    panel.locator("button.primary").click()
    expect(panel.locator("tbody th").first).to_have_text("\ufffd bird")
    expect(panel.locator(".notice.warn")).to_contain_text("One text was cut")
    page.locator("#tab-request").click()
    expect(page.locator("#snippet")).to_contain_text("curl")
    assert "password" not in page.locator("#snippet").inner_text()


@contextmanager
def another_origin(page: str) -> Iterator[str]:
    """Serve an HTML page from a port of its own; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_page_of_another_origin(watch: Watched, guarded: Server) -> None:
    watch.allow(CHROMIUM_LINE, "CORS policy", "frame-ancestors", "X-Frame-Options", "Refused to")
    with another_origin(f"<!doctype html><link rel=icon href=data:,><iframe src='{guarded.url}{PREFIX}/'></iframe>") as url:
        page = watch.open(url)
        headers = {"authorization": f"Bearer {KEY}"}
        ask_it = """async ([url, headers, type, mode]) => {
          const body = JSON.stringify({model: "", input: "a"});
          const options = {method: "POST", mode, headers: {...headers, "content-type": type}, body};
          return fetch(url, options).then((answer) => answer.type + answer.status, (error) => error.name);
        }"""
        to = f"{guarded.url}/v1/embeddings"
        assert page.evaluate(ask_it, [to, headers, "application/json", "cors"]) == "TypeError"
        with page.expect_response(to) as answer:
            assert page.evaluate(ask_it, [to, {}, "text/plain", "no-cors"]) == "opaque0"
        assert answer.value.status in (401, 403, 415)
        expect(page.frame_locator("iframe").locator("#tabs, #panels")).to_have_count(0)


def test_a_lost_connection(playground: Page, guarded: Server, start: Callable[..., Server]) -> None:
    """The last test here, since it stops the server of the others."""
    panel = playground.locator("#panel-compare")
    assert guarded.stop() == 0
    panel.get_by_role("textbox", name=re.compile("^Texts")).fill("once it is back")
    panel.locator("button.primary").click()
    expect(panel.locator(".notice.error")).to_contain_text("No connection")
    with start("--port", str(guarded.port)):
        panel.get_by_role("button", name="Try again").click()
        expect(panel.locator("tbody th")).to_have_text(["once it is back"])
        expect(panel.locator(".notice.error")).to_have_count(0)
