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
from whimbrel.dialects import APIS, ROUTES
from whimbrel.server.app.openapi import openapi_document
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


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"model": MODEL, "input": TEXTS, "encoding_format": "base64"}),
    ("/v1/rerank", {"model": MODEL, "query": QUERY, "documents": TEXTS}),
    ("/tokenize", {"model": MODEL, "inputs": TEXTS[0]}),
]


@needs_node
def test_every_example_is_a_call() -> None:
    """The tab Request shows the examples of /openapi.json by API, each with a model; its API's route reads the body."""
    script = (
        f"const {{ examplesOf }} = await import({module('snippets.js')});"
        f"console.log(JSON.stringify(examplesOf({json.dumps(openapi_document())}, 'a/b')));"
    )
    examples = node(script)
    assert list(examples) == [api.name for api in APIS]
    for calls in examples.values():
        for sent in calls:
            raw = json.dumps(sent["body"]).encode()
            parsed = ROUTES_BY_PATH[sent["path"]].choose(raw).parse(raw)
            assert parsed.body.model == "a/b", sent
    assert sum(map(len, examples.values())) >= len(ROUTES)


@needs_node
def test_snippets_give_what_the_call_gave(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands for curl and Python in the tab Request run as they are, and give the vectors and scores of our own client."""
    monkeypatch.setenv("WHIMBREL_API_KEY", "no-key-is-needed")
    with Client(server.url, model=MODEL) as client:
        vectors, scores = client.embed(TEXTS), client.score(QUERY, TEXTS)
    found = [(path, each["id"], each["code"]) for path, body in CALLS for each in snippets(path, body, server.url)]
    ran = {(path, kind): curl(code) for path, kind, code in found if kind == "curl"}
    pythons = [each for each in found if each[1] == "python"]
    ran |= {each[:2]: answer for each, answer in zip(pythons, run_python([code for *_, code in pythons]), strict=True)}
    assert ran.keys() == {(path, kind) for path, _ in CALLS for kind in ("curl", "python")}
    for kind in ("curl", "python"):
        data = ran["/v1/embeddings", kind]["data"]
        rows = [np.frombuffer(b64decode(each["embedding"]), np.float32) for each in data]
        np.testing.assert_allclose(rows, vectors, atol=1e-6)
        ranked = sorted(ran["/v1/rerank", kind]["results"], key=lambda each: each["index"])
        np.testing.assert_allclose([each["relevance_score"] for each in ranked], scores, atol=1e-6)


@needs_node
def test_a_large_body_goes_to_curl_by_a_pipe(server: Server) -> None:
    for texts in (["whimbrel " * 150] * 130, ["\u9e1f" * 1000] * 50):  # a limit of bytes, not of characters
        code = snippets("/tokenize", {"model": MODEL, "inputs": texts}, server.url)[0]["code"]
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
answers = []
for code in json.load(sys.stdin):
    exec(compile(code, "snippet", "exec"), {"print": answers.append})
print(json.dumps(answers))
"""


def run_python(snippets: list[str]) -> list[Any]:
    """Run snippets of Python in one process; what each prints, from JSON."""
    command = [sys.executable, "-c", RUN_ALL]
    done = subprocess.run(command, input=json.dumps(snippets), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
