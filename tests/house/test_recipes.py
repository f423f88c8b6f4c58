"""The recipes of docs/recipes.md, run as they are against a server, each with its program.

OpenSearch and Open WebUI are servers that do not come as libraries. For these, the tests send the requests that they send.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from string import Template
from threading import Thread
from typing import Any, ClassVar

import httpx2
import numpy as np
import pytest

from checkpoints.bge_m3 import write_m3
from mteb_tasks import birds_task
from postgres_server import postgres
from serving import Server
from whimbrel import Client

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
PROGRAMS = {
    "LangChain": "langchain_openai", "LlamaIndex": "llama_index", "Haystack": "haystack", "Chroma": "chromadb", "LanceDB": "lancedb",
    "Qdrant": "qdrant_client", "pgvector": "psycopg", "OpenSearch": "opensearchpy", "Open WebUI": None, "Triton's client": "tritonclient",
    "LiteLLM": "litellm",
    "mteb": "mteb",
}  # fmt: skip
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = ["A sandwich.", "A wader."]

pytestmark = pytest.mark.filterwarnings("ignore")  # recipes leave their clients open


def recipes(language: str = "python") -> dict[str, list[str]]:
    """The blocks of a language under each heading."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    return {section.split("\n", 1)[0]: re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL) for section in sections}


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run a block with its addresses replaced; its names."""
    kept: list[dict[str, Any]] = []

    def run(program: str, number: int, url: str, *replaced: tuple[str, str]) -> dict[str, Any]:
        if importlib.util.find_spec(str(PROGRAMS[program])) is None and not request.config.getoption("--recipes"):
            pytest.skip(f"{program} is not installed; `make recipes` installs it")
        block = recipes()[program][number]
        for old, new in (("127.0.0.1:8000", url.removeprefix("http://")), *replaced):
            assert old in block
            block = block.replace(old, new)
        kept.append({"__name__": "recipe"})
        exec(block, kept[-1])
        return kept[-1]

    yield run
    for names in kept:
        names.clear()
    gc.collect()  # here, where no user is warned


@pytest.fixture
def expected(server: Server) -> np.ndarray[Any, Any]:
    """The vectors of TEXTS, from the client."""
    with Client(server.url) as client:
        return client.embed(TEXTS)


def test_every_program_has_a_recipe() -> None:
    assert list(recipes()) == list(PROGRAMS)
    assert all(recipes()[program] or recipes("sh")[program] for program in PROGRAMS)


def test_langchain(run: Any, server: Server, expected: Any) -> None:
    own = run("LangChain", 0, server.url)["WhimbrelEmbeddings"](server.url)
    openai = run("LangChain", 1, server.url)["embeddings"]
    for embeddings in (own, openai):
        np.testing.assert_allclose(embeddings.embed_documents(TEXTS), expected, atol=1e-6)
        np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), expected[0], atol=1e-6)


def test_llamaindex(run: Any, server: Server, expected: Any) -> None:
    embedding = run("LlamaIndex", 0, server.url)["WhimbrelEmbedding"](server.url)
    np.testing.assert_allclose(embedding.get_text_embedding_batch(TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(embedding.get_query_embedding(TEXTS[0]), expected[0], atol=1e-6)


def test_haystack(run: Any, server: Server, expected: Any) -> None:
    names = run("Haystack", 0, server.url)
    documents = [names["Document"](content=text) for text in TEXTS]
    found = names["WhimbrelDocumentEmbedder"](server.url).run(documents)["documents"]
    np.testing.assert_allclose([each.embedding for each in found], expected, atol=1e-6)


@pytest.mark.parametrize("program", ["Chroma", "LanceDB", "Qdrant"])
def test_stores(program: str, run: Any, server: Server) -> None:
    """The blocks themselves assert which text is found."""
    run(program, 0, server.url)


def test_pgvector(run: Any, server: Server) -> None:
    if importlib.util.find_spec("psycopg") is None:
        run("pgvector", 0, server.url)  # skips, or fails
    with postgres() as database:
        run("pgvector", 0, server.url, ("postgresql://127.0.0.1/postgres", database.url))


class OpenSearch(BaseHTTPRequestHandler):
    """Stands in for OpenSearch: keeps what it is asked, and answers as OpenSearch's documentation has it."""

    received: ClassVar[dict[str, Any]] = {}

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.received[f"{self.command} {self.path}"] = json.loads(self.rfile.read(length) or b"null")
        answers = {"_create": {"connector_id": "c1"}, "_register": {"task_id": "t1"}, "/tasks/t1": {"model_id": "m1"}}
        hits = {"hits": {"hits": [{"_source": {"text": "A wader."}}]}}
        said = next((answer for part, answer in answers.items() if part in self.path), hits)
        answer = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST

    def log_message(self, *_: Any) -> None: ...


def test_opensearch(run: Any, server: Server, expected: Any) -> None:
    """OpenSearch sends the connector's template: the test fills it in and sends it. Hybrid search follows."""
    OpenSearch.received.clear()
    with HTTPServer(("127.0.0.1", 0), OpenSearch) as stand_in:
        Thread(target=stand_in.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{stand_in.server_port}"
        names = run("OpenSearch", 0, server.url, ("http://127.0.0.1:9200", address))
        exec(recipes()["OpenSearch"][1], names)
        stand_in.shutdown()
    received = OpenSearch.received
    [action] = received["POST /_plugins/_ml/connectors/_create"]["actions"]
    template = Template(re.sub(r"\$\{\w+\.(\w+)\}", r"${\1}", action["request_body"]))
    body = template.substitute(received["POST /_plugins/_ml/connectors/_create"]["parameters"], input=json.dumps(TEXTS))
    answer = httpx2.post(
        action["url"], content=body, headers={"Content-Type": "application/json", "Authorization": "Bearer none"}
    )
    np.testing.assert_allclose([row["embedding"] for row in answer.json()["data"]], expected, atol=1e-6)
    assert received["POST /_plugins/_ml/models/_register?deploy=true"]["connector_id"] == "c1"
    assert received["PUT /_ingest/pipeline/whimbrel"]["processors"][0]["text_embedding"]["model_id"] == "m1"
    assert received["PUT /birds"]["mappings"]["properties"]["vector"]["dimension"] == expected.shape[1]
    assert "normalization-processor" in received["PUT /_search/pipeline/hybrid"]["phase_results_processors"][0]
    words, meaning = received["POST /birds/_search?search_pipeline=hybrid"]["query"]["hybrid"]["queries"]
    assert (words["match"].keys(), meaning["neural"]["vector"]["model_id"]) == ({"text"}, "m1")
    assert names["texts"] == ["A wader."]


def test_open_webui(server: Server, expected: Any) -> None:
    """The two requests that Open WebUI makes with these settings."""
    [block] = recipes("sh")["Open WebUI"]
    settings = dict(line.split("=", 1) for line in block.replace("http://127.0.0.1:8000", server.url).splitlines())
    key = {"Authorization": f"Bearer {settings['RAG_OPENAI_API_KEY']}"}
    body: dict[str, Any] = {"input": TEXTS, "model": settings["RAG_EMBEDDING_MODEL"]}
    answer = httpx2.post(f"{settings['RAG_OPENAI_API_BASE_URL']}/embeddings", json=body, headers=key)
    np.testing.assert_allclose([row["embedding"] for row in answer.json()["data"]], expected, atol=1e-6)
    body = {"model": settings["RAG_RERANKING_MODEL"], "query": "Which bird?", "documents": TEXTS, "top_n": len(TEXTS)}
    answer = httpx2.post(settings["RAG_EXTERNAL_RERANKER_URL"], json=body, headers=key)
    by_index = sorted(answer.json()["results"], key=lambda each: each["index"])
    assert by_index[0]["relevance_score"] < by_index[1]["relevance_score"]


def test_open_webui_prefixes(server: Server) -> None:
    """With RAG_EMBEDDING_PREFIX_FIELD_NAME the prefix is a field of its own, which the server takes as the prompt."""
    field = re.search(r"RAG_EMBEDDING_PREFIX_FIELD_NAME=(\w+)", PAGE)[1]  # pyright: ignore[reportOptionalSubscript]
    answer = httpx2.post(f"{server.url}/v1/embeddings", json={"input": TEXTS, "model": MODEL, field: "query: "})
    with Client(server.url) as client:
        prompted = client.embed([f"query: {text}" for text in TEXTS])
    np.testing.assert_allclose([row["embedding"] for row in answer.json()["data"]], prompted, atol=1e-6)


def test_tritons_client(run: Any, server: Server, expected: Any) -> None:
    names = run("Triton's client", 0, server.url)
    np.testing.assert_allclose(names["vectors"], expected, atol=1e-6)
    with Client(server.url) as client:
        np.testing.assert_allclose(names["scores"], client.score("Which bird?", TEXTS), atol=1e-6)


def test_litellm(run: Any, server: Server, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download
    np.testing.assert_allclose(run("LiteLLM", 0, server.url)["vectors"], expected, atol=1e-6)


def test_mteb(run: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retrieval of mteb itself finds each document; tests/bench/test_mteb.py has the other protocols."""
    if importlib.util.find_spec("mteb") is not None:
        import mteb

        monkeypatch.setattr(mteb, "get_tasks", lambda **_: [birds_task()])
    assert run("mteb", 0, server.url)["results"].task_results[0].get_score() == 1


def test_qdrant_hybrid(run: Any, tmp_path: Path) -> None:
    """The three kinds of vectors, from a model of the layout of bge-m3; MaxSim of a text with itself is the highest."""
    write_m3(tmp_path)
    with Server(str(tmp_path), "--served-name", "BAAI/bge-m3") as server:
        names = run("Qdrant", 1, server.url)
        texts = names["texts"]
        rows = [names["client"].multi_vector([text], input_type="document")[0] for text in texts]
    scores = [float((rows[0] @ row.T).max(axis=1).sum()) for row in rows]
    assert [each.payload["text"] for each in names["found"]] == texts
    np.testing.assert_allclose([each.score for each in names["found"]], scores, rtol=1e-2)
