"""Each tab of the playground shows the API's own numbers."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect

from browsing import Watched, watched
from serving import Server
from whimbrel import Client

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
TABS = ("compare", "late", "sparse", "rerank", "classify", "entities", "tokens", "request")


def open_tab(watch: Watched, served: Server, tab: str) -> Locator:
    """Open a tab and return its panel, once its example has run."""
    page = watch.open(f"{served.url}/#{tab}")
    panel = page.locator(f"#panel-{tab}")
    expect(panel.locator(".output > *").first).to_be_visible()
    return panel


def run(panel: Locator, **fields: str) -> None:
    """Fill fields by their labels' first words, press the button and wait for the result."""
    for label, text in fields.items():
        field(panel, label).fill(text)
    panel.locator("button.primary").click()
    expect(panel.locator(".output")).to_have_attribute("aria-busy", "false")


def numbers(nodes: Locator, name: str) -> list[float]:
    """Return a data attribute of each node, as numbers."""
    return [float(value) for value in nodes.evaluate_all("(nodes, name) => nodes.map((node) => node.dataset[name])", name)]


def words(nodes: Locator, name: str) -> list[str]:
    """Return a data attribute of each node."""
    return nodes.evaluate_all("(nodes, name) => nodes.map((node) => node.dataset[name])", name)


def post(served: Server, path: str, **body: Any) -> Any:
    """Return the answer to a call."""
    answer = httpx2.post(served.url + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(panel: Locator, label: str) -> list[str]:
    """Return the lines of a field."""
    return field(panel, label).input_value().splitlines()


def field(panel: Locator, label: str) -> Locator:
    """Return the field of text whose label begins so."""
    return panel.get_by_role("textbox", name=re.compile(f"^{label}"))


def test_compare(watch: Watched, served: Server) -> None:
    panel = open_tab(watch, served, "compare")
    run(panel, Queries="winter birds\nbread & butter", Texts="Whimbrels fly to Africa.\nToast.\n\nA loaf, <b>sliced</b>")
    with Client(served.url, model="all-MiniLM-L6-v2") as client:
        queries = client.embed(["winter birds", "bread & butter"])
        texts = client.embed(["Whimbrels fly to Africa.", "Toast.", "A loaf, <b>sliced</b>"])
    shown = np.array(numbers(panel.locator("td[data-cosine]"), "cosine")).reshape(3, 2)
    np.testing.assert_allclose(shown, texts @ queries.T, rtol=0, atol=1e-6)
    assert panel.locator("td.best").count() == 2
    assert panel.locator("b").count() == 0


def test_late_interaction(watch: Watched, served: Server) -> None:
    panel = open_tab(watch, served, "late")
    query = field(panel, "Query").input_value()
    documents = lines(panel, "Documents")
    with Client(served.url, model="late") as client:
        found = client.explain(query, documents)
        query_vectors = client.multi_vector([query], input_type="query")[0]
        vectors = client.multi_vector(documents, input_type="document")
    cards = {int(card.get_attribute("data-index") or -1): card for card in panel.locator(".match").all()}
    for index, (card, each) in enumerate(zip([cards[place] for place in range(len(found))], found, strict=True)):
        assert float(card.get_attribute("data-score") or 0) == pytest.approx(each.score, abs=1e-6)
        assert float(card.get_attribute("data-total") or 0) == pytest.approx(each.score, abs=1e-5)
        np.testing.assert_allclose(numbers(card.locator("td.max"), "max"), each.maxima_Q, rtol=0, atol=1e-6)
        np.testing.assert_allclose(numbers(card.locator("td.sum"), "sum"), np.cumsum(each.maxima_Q), rtol=0, atol=1e-5)
        shown = np.array(numbers(card.locator("td[data-similarity]"), "similarity"))
        np.testing.assert_allclose(shown.reshape(len(query_vectors), -1), query_vectors @ vectors[index].T, rtol=0, atol=2e-6)
        assert [int(place) for place in numbers(card.locator("td.best"), "place")] == list(each.places_Q)
    ranked = sorted(range(len(found)), key=lambda index: -found[index].score)
    assert [int(index) for index in words(panel.locator(".match"), "index")] == ranked


def test_a_query_token_lights_its_best_match(watch: Watched, served: Server) -> None:
    panel = open_tab(watch, served, "late")
    with Client(served.url, model="late") as client:
        found = client.explain(field(panel, "Query").input_value(), lines(panel, "Documents"))
    row = found[0].query_tokens.index("winter")
    panel.locator(".chip").nth(row).hover()
    expect(panel.locator("th.column.lit")).to_have_count(len(found))
    for card in panel.locator(".match").all():
        each = found[int(card.get_attribute("data-index") or -1)]
        assert card.locator("th.column.lit").inner_text() == each.document_tokens[each.places_Q[row]]
    panel.locator(".chip").nth(0).focus()  # the keyboard does the same
    watch.page.mouse.move(5, 5)
    panel.locator(".chip").nth(row).focus()
    expect(panel.locator(".match").first.locator("tr.lit th")).to_have_text("winter")


def test_documents_reorder_without_struck_tokens(watch: Watched, served: Server) -> None:
    panel = open_tab(watch, served, "late")
    query, documents = "whimbrel winter", ["Whimbrels sing.", "Cold winters, warm coats: winter."]
    run(panel, Query=query, Documents="\n".join(documents))
    with Client(served.url, model="late") as client:
        found = client.explain(query, documents)
    maxima_DQ = np.array([each.maxima_Q for each in found], np.float64)
    first = int(maxima_DQ.sum(1).argmax())
    struck = sorted(range(maxima_DQ.shape[1]), key=lambda row: maxima_DQ[1 - first, row] - maxima_DQ[first, row])
    expect(panel.locator(".match").first).to_have_attribute("data-index", str(first))
    kept = np.ones(maxima_DQ.shape[1], bool)
    for row in struck[:-1]:
        panel.locator(".chip").nth(row).click()
        kept[row] = False
        totals_D = maxima_DQ[:, kept].sum(1)
        shown = dict(zip(words(panel.locator(".match"), "index"), numbers(panel.locator(".match"), "total"), strict=True))
        np.testing.assert_allclose([shown["0"], shown["1"]], totals_D, rtol=0, atol=1e-5)
        assert words(panel.locator(".match"), "index")[0] == str(totals_D.argmax())
    assert words(panel.locator(".match"), "index")[0] == str(1 - first)  # the order changed
    panel.get_by_role("button", name="Restore all").click()
    assert words(panel.locator(".match"), "index")[0] == str(first)


def test_sparse(watch: Watched, served: Server) -> None:
    panel = open_tab(watch, served, "sparse")
    query, texts = field(panel, "Query").input_value(), lines(panel, "Texts")
    with Client(served.url, model="sparse") as client:
        [own] = client.sparse([query], input_type="query")
        found = client.sparse(texts, input_type="document")
        scores = client.score(query, texts)
    tokens = post(served, "/tokenize", model="sparse", inputs=texts)
    for place, (ids, weights) in enumerate(found):
        card = panel.locator(f".card[data-text='{place}']")
        shown = [int(each) for each in words(card.locator(".bar"), "id")]
        order = sorted(range(len(ids)), key=lambda row: (-weights[row], ids[row]))
        assert shown == [int(ids[row]) for row in order][: len(shown)]
        assert len(shown) > 30
        np.testing.assert_array_equal(np.float32(numbers(card.locator(".bar"), "value")), weights[order][: len(shown)])
        contained = {token["id"] for token in tokens[place]}
        assert {int(each) for each in words(card.locator(".bar.added"), "id")} == set(shown) - contained
        common, left, right = np.intersect1d(own[0], ids, return_indices=True)
        assert {int(each) for each in words(card.locator(".bar.hit"), "id")} == set(shown) & set(common.tolist())
        products = dict(zip(common.tolist(), (own[1][left] * weights[right]).tolist(), strict=True))
        rows = card.locator("table.hits tbody tr")
        for number, product in zip(words(rows, "id"), numbers(rows, "product"), strict=True):
            assert product == pytest.approx(products[int(number)], abs=1e-6)
        assert numbers(card.locator("table.hits"), "total") == pytest.approx([scores[place]], abs=1e-5)
        assert numbers(card, "score") == pytest.approx([scores[place]], abs=1e-6)
    names = post(served, "/decode", model="sparse", ids=[[int(found[0][0][0])]], skip_special_tokens=False)
    assert names[0] in panel.locator(".card").first.locator(".bar-label").all_inner_texts() or len(found[0][0]) > 134


def test_sparse_without_a_query(watch: Watched, served: Server) -> None:
    panel = open_tab(watch, served, "sparse")
    run(panel, Query="", Texts="A bird.")
    expect(panel.locator(".card")).to_have_count(1)
    assert panel.locator(".hits, .hit, .score").count() == 0


@pytest.mark.parametrize("before", ["", "all-MiniLM-L6-v2"])
def test_rerank(watch: Watched, served: Server, before: str) -> None:
    panel = open_tab(watch, served, "rerank")
    panel.get_by_label("Order before").select_option(before)
    expect(panel.locator(".before h2")).to_have_text(before or "As written")
    query, documents = field(panel, "Query").input_value(), lines(panel, "Documents")
    with Client(served.url, model="ranker") as client:
        ranked = client.rerank(query, documents)
    order = list(range(len(documents)))
    if before:
        with Client(served.url, model=before) as client:
            order = [hit.index for hit in client.rerank(query, documents)]
    rows = panel.locator(".after li")
    assert [int(index) for index in words(rows, "index")] == [hit.index for hit in ranked]
    np.testing.assert_allclose(numbers(rows, "score"), [hit.score for hit in ranked], rtol=0, atol=1e-6)
    assert [int(index) for index in words(panel.locator(".before li"), "index")] == order
    assert numbers(rows, "moved") == [order.index(hit.index) - place for place, hit in enumerate(ranked)]
    assert rows.nth(0).locator(".clip").inner_text() == documents[ranked[0].index]


def test_classify(watch: Watched, served: Server) -> None:
    panel = open_tab(watch, served, "classify")
    texts = lines(panel, "Texts")
    with Client(served.url, model="classes") as client:
        found = client.classify(texts)
    for place, scores in enumerate(found.scores_NC):
        bars = panel.locator(f".card[data-text='{place}'] .bar")
        order = np.argsort(-scores)
        assert words(bars, "label") == [found.labels[label] for label in order]
        np.testing.assert_allclose(numbers(bars, "value"), scores[order], rtol=0, atol=1e-6)


def test_entities(watch: Watched, served: Server) -> None:
    panel = open_tab(watch, served, "entities")
    text = "🐦🐦 Anna saw <b>whimbrels</b> in Iceland.\nShe works for BirdLife."  # places count code points, not UTF-16 units
    run(panel, Text=text)
    with Client(served.url, model="entities") as client:
        [found] = client.token_classify([text])
    marks = panel.locator("mark")
    assert [(each.label, each.start, each.end) for each in found] == [
        (label, int(start), int(end))
        for label, start, end in zip(words(marks, "label"), words(marks, "start"), words(marks, "end"), strict=True)
    ]
    np.testing.assert_allclose(numbers(marks, "score"), [each.score for each in found], rtol=0, atol=1e-6)
    shown = marks.evaluate_all("(marks) => marks.map((mark) => mark.firstChild.textContent)")
    assert shown == [text[each.start : each.end] for each in found]
    assert {"LOC", "ORG", "PER"} <= {each.label for each in found}


def test_tokens(watch: Watched, served: Server) -> None:
    panel = open_tab(watch, served, "tokens")
    panel.get_by_label("Model").select_option("all-MiniLM-L6-v2")
    run(panel, Text="Whimbrels winter in Africa, where the coasts are warm.", Limit="8")
    text = "Whimbrels winter in Africa, where the coasts are warm."
    [tokens] = post(served, "/tokenize", model="all-MiniLM-L6-v2", inputs=[text])
    chips = panel.locator("ol.tokens .token")
    assert [int(each) for each in words(chips, "id")] == [token["id"] for token in tokens]
    assert words(chips, "kind") == ["special" if token["special"] else "text" for token in tokens]
    computed = post(served, "/v1/embed", model="all-MiniLM-L6-v2", input=[text], max_tokens=8)["usage"]["prompt_tokens"]
    assert words(chips, "cut").count("true") == len(tokens) - computed
    assert words(chips, "cut") == ["false"] * 7 + ["true"] * (len(tokens) - 8) + ["false"]
    assert "limit of 8 tokens" in panel.locator(".notice.warn").inner_text()


RUN_ALL = "import json, sys\nfor code in json.load(sys.stdin):\n    exec(code, {})\n    print('ran')"


def test_requests_run_as_they_are(watch: Watched, served: Server) -> None:
    page = watch.open(served.url)
    for tab in ("classify", "entities", "tokens", "rerank", "late", "compare"):
        page.locator(f"#tab-{tab}").click()
        expect(page.locator(f"#panel-{tab} .output > *").first).to_be_visible()
    page.locator("#tab-request").click()
    panel = page.locator("#panel-request")
    expect(panel.locator("#snippet")).to_contain_text("curl")
    codes = _codes(panel, "As sent")
    assert {path for path, _ in codes["curl"]} == {
        "/v1/classify", "/v1/token_classify", "/tokenize", "/v1/embed", "/v1/rerank", "/v1/score", "/v1/embeddings"
    }  # fmt: skip
    examples = _codes(panel, "Ollama")
    assert {path for path, _ in examples["curl"]} == {"/api/embed", "/api/embeddings", "/api/show", "/api/pull"}
    curls = [code.replace("curl ", "curl -sS --fail-with-body ", 1) for _, code in codes["curl"] + examples["curl"]]
    command = ["bash", "-c", "set -e\n" + "\n".join(f"{code}\necho; echo ran" for code in curls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.count("\nran\n")) == (0, len(curls)), done.stdout[-500:] + done.stderr
    pythons = [code for _, code in codes["python"]]
    command = [sys.executable, "-W", "ignore", "-c", RUN_ALL]
    done = subprocess.run(command, input=json.dumps(pythons), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.count("\nran\n")) == (0, len(pythons)), done.stdout[-500:] + done.stderr


def _codes(panel: Locator, api: str) -> dict[str, list[tuple[str, str]]]:
    """Return the code of one call of each path of an API: (path, code) of curl and of Python."""
    panel.get_by_label("API", exact=True).select_option(api)
    codes: dict[str, list[tuple[str, str]]] = {"curl": [], "python": []}
    for number, title in enumerate(panel.get_by_label("Call", exact=True).locator("option").all_inner_texts()):
        path = title.split("POST ")[1].split(",")[0].split(":")[0]
        if path in {known for known, _ in codes["curl"]}:
            continue
        panel.get_by_label("Call", exact=True).select_option(str(number))
        for language, found in codes.items():
            panel.get_by_label("Language", exact=True).select_option(language)
            found.append((path, panel.locator("#snippet").inner_text()))
    return codes


def test_every_tab_by_keyboard(watch: Watched, served: Server) -> None:
    page = watch.open(served.url)
    expect(page.locator("#tab-compare")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Tab")
    while page.evaluate("() => document.activeElement.getAttribute('role')") != "tab":
        page.keyboard.press("Tab")
    for tab in TABS:
        assert page.evaluate("() => document.activeElement.id") == f"tab-{tab}"
        panel = page.locator(f"#panel-{tab}")
        expect(panel).to_be_visible()
        if tab != "request":
            expect(panel.locator(".output > *").first).to_be_visible()  # it ran
            _run_by_keyboard(page, panel)
            _back_to_tab(page)
        page.keyboard.press("ArrowRight")
    assert page.evaluate("() => document.activeElement.id") == "tab-compare"


def _run_by_keyboard(page: Page, panel: Locator) -> None:
    """Go to the Run button by the Tab key, press it and see that it asks the server."""
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.matches('.primary')"):
            break
    outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    with page.expect_response(lambda response: response.request.method == "POST") as answer:
        page.keyboard.press("Enter")
    assert answer.value.status == 200
    expect(panel.locator(".output")).to_have_attribute("aria-busy", "false")


def _back_to_tab(page: Page) -> None:
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("() => document.activeElement.getAttribute('role')") == "tab":
            return
    raise AssertionError("Shift+Tab did not reach the tabs")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen(browser: Browser, served: Server, scheme: Any) -> None:
    with watched(browser, viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True) as watch:
        page = watch.open(served.url)
        for tab in TABS:
            page.locator(f"#tab-{tab}").click()
            panel = page.locator(f"#panel-{tab}")
            expect(panel.locator(".output > *").first).to_be_visible()
            width = page.evaluate("() => document.documentElement.scrollWidth")
            assert width == 360, f"{tab} is {width} pixels wide"


def test_the_served_bytes_are_the_vectors(served: Server) -> None:
    """The references above come through the client; this one does not."""
    answer = post(served, "/v1/embeddings", model="all-MiniLM-L6-v2", input=["a"], encoding_format="base64")
    with Client(served.url, model="all-MiniLM-L6-v2") as client:
        vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), np.float32)
        np.testing.assert_array_equal(vector, client.embed("a"))


@pytest.mark.pictures
@pytest.mark.parametrize("tab", ["compare", "late", "sparse", "rerank", "entities"])
def test_pictures(browser: Browser, served: Server, tab: str) -> None:
    """Draw a tab for README and the docs: twice as many pixels as the page has, below 200 kB."""
    with watched(browser, viewport={"width": 1280, "height": 820}, device_scale_factor=2, color_scheme="light") as watch:
        panel = open_tab(watch, served, tab)
        if tab == "rerank":
            panel.get_by_label("Order before").select_option("all-MiniLM-L6-v2")
            expect(panel.locator(".before h2")).to_have_text("all-MiniLM-L6-v2")
        if tab == "late":
            panel.locator(".chip", has_text="winter").hover()
            expect(panel.locator("th.column.lit").first).to_be_visible()
        picture = PICTURES / f"playground-{tab}.webp"
        with Image.open(BytesIO(watch.page.screenshot(animations="disabled"))) as image:
            image.save(picture, lossless=True, quality=100, method=6)
    assert picture.stat().st_size < 200_000
