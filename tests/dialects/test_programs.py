"""Programs of others against a server: five packages from npm, as tests/npm/clients.mjs uses them, and programs in Python.

`make recipes` installs what they need; elsewhere they skip.
"""

from __future__ import annotations

import gc
import importlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dialect_results import QUERY, TEXTS
from exchanges import Small

pytestmark = pytest.mark.filterwarnings("ignore")  # programs leave their clients open
NPM = Path(__file__).parents[1] / "npm"
TYPES = {"dense": False, "unit": True}


@pytest.fixture
def need(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """Import a program's module; without --recipes the test skips where it is not installed."""
    always = request.config.getoption("--recipes")
    yield importlib.import_module if always else lambda name: pytest.importorskip(name, reason="make recipes installs it")
    gc.collect()  # here, where no user is warned


@pytest.fixture(scope="module")
def answers(small: Small, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the values that each package read, by its name."""
    if not request.config.getoption("--recipes"):
        pytest.skip("make recipes installs the packages")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("npm")
    for name in ("package.json", "package-lock.json", "clients.mjs"):
        shutil.copy(NPM / name, folder)
    subprocess.run([npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder, check=True, timeout=240)
    command = ["node", "clients.mjs", small.url, json.dumps(TEXTS), QUERY]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", ["openai", "cohere-ai", "voyageai", "ollama", "ai"])
def test_packages_from_npm(package: str, answers: dict[str, Any], small: Small) -> None:
    """Programs in JavaScript read the numbers of the model."""
    found, vectors = answers[package], small.engines["dense"]
    for name, normalize in TYPES.items():
        for rows in found.get(name, ()):
            expected = vectors.embed(TEXTS, normalize=True) if normalize else vectors.embed(TEXTS)
            np.testing.assert_array_equal(np.array(rows, np.float32), expected)
    for scores in found.get("scores", ()):
        np.testing.assert_array_equal(np.array(scores, np.float32), small.engines["ranker"].score(QUERY, TEXTS))
    assert found.keys() & {"dense", "unit", "scores"}


def test_what_else_they_read(answers: dict[str, Any], small: Small) -> None:
    """Programs in JavaScript find models, errors, documents and the end of a pull where they look for them."""
    names = list(small.engines)
    assert answers["openai"]["models"] == names
    assert answers["ollama"]["models"] == [f"{name}:latest" for name in names]
    error = answers["openai"]["error"]
    assert (error["status"], error["code"]) == (404, "model_not_found")
    assert "no model 'nobody'" in error["message"]
    assert (answers["ollama"]["pulled"], answers["ollama"]["capabilities"]) == ("success", ["embedding"])
    best = small.engines["ranker"].rerank(QUERY, TEXTS)[0]
    assert answers["voyageai"]["best"] == [TEXTS[best.index]]


def test_infinity_client(small: Small, need: Any) -> None:
    """The client that Infinity generates reads vectors, ranks and classes as Infinity gives them."""
    need("infinity_client")
    from infinity_client import Client
    from infinity_client.api.default import classify, embeddings, models, rerank
    from infinity_client.models import ClassifyInput, OpenAIEmbeddingInputText, RerankInput

    with Client(small.url) as client:
        wanted = OpenAIEmbeddingInputText(input_=TEXTS, model="dense", dimensions=0)
        found: Any = embeddings.sync(client=client, body=wanted)
        vectors = small.engines["dense"].embed(TEXTS)
        np.testing.assert_array_equal(np.array([each.embedding for each in found.data], np.float32), vectors)
        found = rerank.sync(client=client, body=RerankInput(query=QUERY, documents=TEXTS, return_documents=True))
        ranked = small.engines["ranker"].rerank(QUERY, TEXTS)
        assert [(each.index, np.float32(each.relevance_score)) for each in found.results] == [
            (each.index, np.float32(each.score)) for each in ranked
        ]
        assert [each.document for each in found.results] == [TEXTS[each.index] for each in ranked]
        found = classify.sync(client=client, body=ClassifyInput(input_=TEXTS, model="classes"))
        scores = np.array([[each.score for each in row] for row in found.data], np.float32)
        np.testing.assert_array_equal(scores, -np.sort(-small.engines["classes"].classify(TEXTS).scores_NC, axis=1))
        listed: Any = models.sync(client=client)
        assert [each.id for each in listed.data] == list(small.engines)


PROVIDERS = {
    "openai": "/v1", "hosted_vllm": "/v1", "jina_ai": "/v1", "voyage": "/v1", "mistral": "/v1", "nvidia_nim": "/v1",
    "together_ai": "/v1", "infinity": "", "ollama": "",
}  # fmt: skip
"""LiteLLM's providers of embeddings -> the path that the address ends with."""


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_embeds(provider: str, small: Small, need: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM reads the vectors of each API that it knows."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download
    base = small.url + PROVIDERS[provider]
    found = need("litellm").embedding(model=f"{provider}/dense", input=TEXTS, api_base=base, api_key="none")
    vectors = np.array([each["embedding"] for each in found.data], np.float32)
    np.testing.assert_array_equal(vectors, small.engines["dense"].embed(TEXTS))


@pytest.mark.parametrize("documents", [None, False])
@pytest.mark.parametrize("provider", ["cohere", "jina_ai", "voyage", "hosted_vllm", "huggingface", "infinity"])
def test_litellm_reranks(
    provider: str, documents: bool | None, small: Small, need: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LiteLLM reads the ranks of each API that it knows, with its defaults and without documents.

    With a key its requests to Infinity are those to vLLM, byte for byte, so Infinity's go without.
    """
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    more = {} if documents is None else {"return_documents": documents}
    rerank, key = need("litellm").rerank, None if provider == "infinity" else "none"
    found = rerank(model=f"{provider}/ranker", query=QUERY, documents=TEXTS, api_base=small.url, api_key=key, **more)
    ranked = small.engines["ranker"].rerank(QUERY, TEXTS)
    assert [each["index"] for each in found.results] == [each.index for each in ranked]
    np.testing.assert_allclose([each["relevance_score"] for each in found.results], [each.score for each in ranked], rtol=1e-6)


def test_mtebs_own_wrappers(small: Small, need: Any) -> None:
    """The wrappers of servers in mteb read vectors, scores and token vectors."""
    wrappers = need("mteb.models.openai_wrappers")
    encoder = wrappers.OpenAIAPIEncodeWrapper(small.url, "dense", use_chat_template=False)
    np.testing.assert_array_equal(np.array(encoder._get_embeddings(TEXTS), np.float32), small.engines["dense"].embed(TEXTS))
    reranker = wrappers.OpenAIAPIRerankWrapper(small.url, "ranker")
    scores = np.array(reranker._rerank(QUERY, TEXTS), np.float32)
    np.testing.assert_array_equal(scores, small.engines["ranker"].score(QUERY, TEXTS))
    tokens = wrappers.OpenAIAPITokenEmbedWrapper(small.url, "late", use_chat_template=False)
    expected = small.engines["late"].multi_vector(TEXTS, input_type="document")
    for index, rows in enumerate(tokens._encode_texts(TEXTS)):
        np.testing.assert_array_equal(rows.astype(np.float32), expected[index])


def test_chroma_functions(small: Small, need: Any) -> None:
    """Chroma's own embedding functions for OpenAI's and Ollama's API."""
    functions = need("chromadb.utils.embedding_functions")
    vectors = small.engines["dense"].embed(TEXTS)
    openai = functions.OpenAIEmbeddingFunction(api_key="none", model_name="dense", api_base=f"{small.url}/v1")
    np.testing.assert_array_equal(np.array(openai(TEXTS), np.float32), vectors)
    ollama = functions.OllamaEmbeddingFunction(url=small.url, model_name="dense")
    unit = small.engines["dense"].embed(TEXTS, normalize=True)
    np.testing.assert_allclose(np.array(ollama(TEXTS), np.float32), unit, atol=1e-6)


def test_haystacks_embedder(small: Small, need: Any) -> None:
    secret = need("haystack.utils").Secret.from_token("none")
    kind = need("haystack.components.embedders").OpenAITextEmbedder
    embedder = kind(api_key=secret, model="dense", api_base_url=f"{small.url}/v1")
    found = np.array([embedder.run(text)["embedding"] for text in TEXTS], np.float32)
    np.testing.assert_array_equal(found, small.engines["dense"].embed(TEXTS))


def test_llama_index_packages(small: Small, need: Any) -> None:
    """LlamaIndex's own packages for OpenAI's and Ollama's API."""
    like = need("llama_index.embeddings.openai_like").OpenAILikeEmbedding
    found = like(model_name="dense", api_base=f"{small.url}/v1", api_key="none").get_text_embedding_batch(TEXTS)
    np.testing.assert_array_equal(np.array(found, np.float32), small.engines["dense"].embed(TEXTS))
    ollama = need("llama_index.embeddings.ollama").OllamaEmbedding(model_name="dense", base_url=small.url)
    unit = small.engines["dense"].embed(TEXTS, normalize=True)
    np.testing.assert_allclose(np.array(ollama.get_text_embedding_batch(TEXTS), np.float32), unit, atol=1e-6)
