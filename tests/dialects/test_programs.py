"""Programs of others against a server: five packages from npm, as tests/npm/clients.mjs uses them, and Infinity's client.

`make recipes` installs what they need; elsewhere they skip.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cohere import QUERY, TEXTS

from exchanges import Small

NPM = Path(__file__).parents[1] / "npm"
TYPES = {"dense": False, "unit": True}


@pytest.fixture(scope="module")
def answers(small: Small, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What each package read, by its name."""
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


def test_infinity_client(small: Small, request: pytest.FixtureRequest) -> None:
    """The client that Infinity generates reads vectors, ranks and classes as Infinity gives them."""
    if not request.config.getoption("--recipes"):
        pytest.importorskip("infinity_client", reason="make recipes installs infinity-client")
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
