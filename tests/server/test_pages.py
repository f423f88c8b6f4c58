"""Pages for browsers: files, policy, and the code of the playground that runs without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from serving import Server
from whimbrel import Client
from whimbrel.errors import InvalidRequest
from whimbrel.server.app.routing import ROUTES_BY_PATH
from whimbrel.server.pages import files
from whimbrel.server.pages.files import PLAYGROUND, page_files

FOLDER = Path(files.__file__).parent
SCRIPTS = sorted(FOLDER.glob("*.js"))
TEXTS = ['It\'s "quoted", $HOME `date` \\n and a\ttab.', "<script>alert(1)</script>", "Zwei Vögel 🐦 am Meer.", "True, null"]
QUERY = "Wo sind '$(birds)'?"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def test_pages_load_files_of_their_folder_only() -> None:
    names = set(page_files())
    for path in FOLDER.glob("*.html"):
        page = path.read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)
        links = re.findall(r'(?:src|href)="([^"]*)"', page)
        assert {link.removeprefix("assets/") for link in links if link.startswith("assets/")} <= names
        assert not [link for link in links if re.match(r"/|\w+:", link)], "URLs are relative, for proxies with a prefix"
    for path in SCRIPTS:
        code = path.read_text()
        assert set(re.findall(r'from "\./([^"]+)"', code)) <= names, path.name
        assert not re.search(
            r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|localStorage|sessionStorage)\b", code
        )
        assert set(re.findall(r"https?://[^\s\"'`/]+", code)) <= {"http://www.w3.org"}, path.name


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", True),
        ("TEXT/HTML; q=0.5, application/json; q=0.4", True),
        ("application/json, text/html;q=0.5", False),
        ("*/*", False),
        ("", False),
        ("application/json", False),
        ("text/html;q=0.000", False),
    ],
)
def test_browsers_are_known_by_what_they_prefer(server: Server, accept: str, is_page: bool) -> None:
    answer = httpx2.get(server.url, headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == ("text/html; charset=utf-8" if is_page else "application/json")


def test_pages_are_sent_once(server: Server) -> None:
    for path in ("/docs", "/assets/api.js"):
        etag = httpx2.get(server.url + path).headers["etag"]
        for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            assert httpx2.get(server.url + path, headers={"if-none-match": known}).status_code == 304
        assert httpx2.get(server.url + path, headers={"if-none-match": '"other"'}).status_code == 200


def test_the_playground_is_no_asset(server: Server) -> None:
    """Below /assets its relative URLs would lead elsewhere, and --no-playground would not turn it off."""
    assert httpx2.get(f"{server.url}/assets/{PLAYGROUND}").status_code == 404


@needs_node
def test_scripts_are_valid_modules() -> None:
    code = "".join(f"await import({json.dumps(path.as_uri())}).catch(check);" for path in SCRIPTS)
    node(f"const check = (error) => {{ if (!(error instanceof ReferenceError)) throw error; }}; {code} console.log('null');")


@needs_node
def test_the_map_s_axes_are_the_principal_components() -> None:
    rng = np.random.default_rng(5)
    for count, width in ((40, 12), (5, 64), (120, 30)):
        rows = rng.standard_normal((count, width)).astype(np.float32) * np.linspace(1, 3, width, dtype=np.float32)
        found = node(
            f"const rows = {json.dumps(rows.tolist())}.map((row) => Float32Array.from(row));"
            f"console.log(JSON.stringify(await (await import({module('pca.js')})).project(rows)));"
        )
        centred = rows.astype(np.float64) - rows.astype(np.float64).mean(axis=0)
        _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
        signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])
        expected = (centred @ (axes * signs[:, None]).T)[:, :2]
        np.testing.assert_allclose(np.array(found["points"]), expected, atol=2e-4 * np.abs(expected).max())
        np.testing.assert_allclose(found["shares"], (sizes**2 / (sizes**2).sum())[:2], rtol=1e-6)


@needs_node
def test_equal_lines_have_a_map() -> None:
    found = node(
        "const rows = [1, 2, 3].map(() => Float32Array.from([0.5, -0.5, 1]));"
        f"console.log(JSON.stringify(await (await import({module('pca.js')})).project(rows)));"
    )
    assert found == {"points": [[0, 0]] * 3, "shares": [0, 0]}


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"model": MODEL, "input": TEXTS, "encoding_format": "base64"}),
    ("/v1/rerank", {"model": MODEL, "query": QUERY, "documents": TEXTS}),
    ("/tokenize", {"model": MODEL, "inputs": TEXTS[0]}),
]
OTHER_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"model": "a/b", "input": TEXTS, "input_type": "query"}),
    ("/v1/embed", {"model": "a/b", "input": TEXTS, "outputs": "sparse", "input_type": "document"}),
    ("/v1/embed", {"model": "a/b", "input": TEXTS, "outputs": ["multi_vector"], "prompt_name": "query"}),
    ("/v1/rerank", {"model": "a/b", "query": QUERY, "documents": TEXTS, "top_n": 2, "explain": True}),
    ("/v1/score", {"model": "a/b", "queries": QUERY, "documents": TEXTS, "explain": True}),
    ("/v1/classify", {"model": "a/b", "input": TEXTS}),
    ("/v1/token_classify", {"model": "a/b", "input": TEXTS, "aggregation": "first"}),
]


@needs_node
def test_requests_are_valid_in_every_api() -> None:
    """Each request of the tab Request is one that its API's route reads, also for outputs that MiniLM does not give."""
    calls = ",".join(call(path, body) for path, body in CALLS + OTHER_CALLS)
    requests = node(
        f"const {{ APIS, intentOf }} = await import({module('snippets.js')});"
        "const all = (of) => APIS.map(({id, requests}) => ({id, ...(requests[of.verb]?.(of) || {})}));"
        f"console.log(JSON.stringify([{calls}].flatMap((sent) => all(intentOf(sent))).filter(({{path}}) => path)));"
    )
    for request in requests:
        raw = json.dumps(request["body"]).encode()
        try:
            ROUTES_BY_PATH[request["path"]].choose(raw).parse_request(raw)
        except InvalidRequest as error:
            raise AssertionError(request) from error
    seen = {request["id"] for request in requests}
    assert seen == {"whimbrel", "openai", "cohere", "voyage", "jina", "tei", "vllm", "ollama"}


@needs_node
def test_snippets_give_what_the_call_gave(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands for curl and Python in the tab Request run as they are, and give the vectors and scores of our own client."""
    monkeypatch.setenv("WHIMBREL_API_KEY", "no-key-is-needed")
    with Client(server.url, model=MODEL) as client:
        vectors, scores = client.embed(TEXTS), client.score(QUERY, TEXTS)
    found = [
        (path, each["api"], language["id"], language["code"])
        for path, body in CALLS
        for each in snippets(path, body, server.url)
        for language in each["languages"]
    ]
    ran = {tuple(names): curl(code) for *names, code in found if names[2] == "curl"}
    pythons = [each for each in found if each[2].startswith("python")]
    ran |= {
        each[:3]: answer for each, answer in zip(pythons, run_python([code for *_, code in pythons]), strict=True) if answer
    }
    for names, answer in ran.items():
        if names[0] == "/v1/embeddings":
            np.testing.assert_allclose(np.array(vectors_in(answer), np.float32), vectors, atol=1e-6, err_msg=str(names))
        elif names[0] == "/v1/rerank":
            np.testing.assert_allclose(scores_in(answer), scores, atol=1e-6, err_msg=str(names))
    assert {
        ("/v1/embeddings", "openai", "python-client"),
        ("/v1/rerank", "cohere", "python-client"),
        ("/tokenize", "sent", "curl"),
    } <= ran.keys()
    assert len([each for each in ran if each[2] == "curl"]) >= 15


@needs_node
def test_a_large_body_goes_to_curl_by_a_pipe(server: Server) -> None:
    for texts in (["whimbrel " * 150] * 130, ["\u9e1f" * 1000] * 50):  # a limit of bytes, not of characters
        sent = snippets("/tokenize", {"model": MODEL, "inputs": texts}, server.url)[0]
        code = next(each["code"] for each in sent["languages"])
        assert len(code.encode()) > 131_072
        assert len(curl(code)) == len(texts)


def test_no_snippet_holds_a_key() -> None:
    """Code is made without the key: `snippetsOf` is told only whether there is one."""
    code = (FOLDER / "tab-request.js").read_text()
    assert "withKey: context.api.hasKey" in code
    assert "#key" in (FOLDER / "api.js").read_text(), "the key is private to the module of calls"


def node(code: str) -> Any:
    """Run a module in node; what it prints, from JSON."""
    assert NODE is not None
    done = subprocess.run([NODE, "--input-type=module"], input=code, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def module(name: str) -> str:
    return json.dumps((FOLDER / name).as_uri())


def call(path: str, body: dict[str, Any]) -> str:
    return json.dumps({"method": "POST", "path": path, "body": body})


def snippets(path: str, body: dict[str, Any], url: str) -> list[dict[str, Any]]:
    return node(
        f"const {{ snippetsOf }} = await import({module('snippets.js')});"
        f"console.log(JSON.stringify(snippetsOf({call(path, body)}, {{ base: {json.dumps(url + '/')}, withKey: true }})));"
    )


def curl(code: str) -> Any:
    """Run a snippet of curl in a shell; its answer, from JSON."""
    script = code.replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(["sh"], input=script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + code
    return json.loads(done.stdout)


RUN_ALL = """
import json, sys
def plain(value):
    return value.tolist() if hasattr(value, "tolist") else [value.index, value.score]
answers = []
for code in json.load(sys.stdin):
    printed = []
    try:
        exec(compile(code, "snippet", "exec"), {"print": printed.append})
    except ModuleNotFoundError:
        printed.append(None)
    answers.append(printed[0])
print(json.dumps(answers, default=plain))
"""


def run_python(snippets: list[str]) -> list[Any]:
    """Run snippets of Python in one process; what each prints, from JSON. None where its package is not installed."""
    command = [sys.executable, "-c", RUN_ALL]
    done = subprocess.run(command, input=json.dumps(snippets), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def vectors_in(answer: Any) -> Any:
    """Dense vectors of an answer of any API."""
    if isinstance(answer, dict):
        if "outputs" in answer:
            return answer["outputs"]["dense"]
        if "embeddings" in answer:
            return answer["embeddings"]["float"] if isinstance(answer["embeddings"], dict) else answer["embeddings"]
        rows = [each.get("embedding", each.get("data")) for each in answer["data"]]
        return [np.frombuffer(b64decode(row), np.float32) if isinstance(row, str) else row for row in rows]
    return answer


def scores_in(answer: Any) -> list[float]:
    """Scores of an answer of any API, in the order of the documents."""
    if isinstance(answer, dict):
        answer = answer.get("results") or answer["data"]
    pairs = [
        (each["index"], each.get("relevance_score", each.get("score"))) if isinstance(each, dict) else each for each in answer
    ]
    return [score for _, score in sorted(pairs)]
