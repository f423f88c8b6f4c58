"""`whimbrel eval --mteb`: mteb itself evaluates our models by its protocols. `make recipes` installs mteb."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.fitted import write_late, write_sparse
from command import Here
from mteb_tasks import birds_task
from serving import Server
from whimbrel import Engine
from whimbrel.errors import SetupError
from whimbrel_bench.evaluation.models import Model, similarities_of
from whimbrel_bench.evaluation.mteb_models import CrossEncoder, Encoder, Search, evaluate_tasks, mteb_model

pytestmark = pytest.mark.filterwarnings("ignore")  # mteb's own


@pytest.fixture(autouse=True, scope="module")
def _needs_mteb(request: pytest.FixtureRequest) -> None:
    """Skip without mteb, unless `make recipes` asks for it."""
    if importlib.util.find_spec("mteb") is None and not request.config.getoption("--recipes"):
        pytest.skip("mteb is not installed; `make recipes` installs it")


@pytest.fixture(params=["retrieval", "reranking"])
def task(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a task that mteb finds here."""
    import mteb

    monkeypatch.setattr(mteb, "get_tasks", lambda **_: [birds_task(reranking=request.param == "reranking")])
    return "Birds"


@pytest.fixture
def minilm_model(engine32: Engine) -> Model:
    return Model("sentence-transformers/all-MiniLM-L6-v2", engine32, {"dense": "cosine"}, False, "")


@pytest.fixture(scope="module", params=["late", "sparse"])
def searched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, str]]:
    """A model of late interaction or of sparse vectors that gives sensible answers, and its output."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    (write_late if request.param == "late" else write_sparse)(folder)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine, "multi_vector" if request.param == "late" else "sparse"


def test_dense_models_are_encoders(task: str, minilm_model: Model) -> None:
    """Each document is found by mteb, which computes the similarity that the card states."""
    assert isinstance(mteb_model(minilm_model), Encoder)
    (result,) = evaluate_tasks(minilm_model, None, task)
    assert (result["task"], result["measure"], result["score"]) == ("Birds", "ndcg_at_1", 1.0)
    encoder: Any = mteb_model(minilm_model)
    a, b = np.array([[3.0, 0.0]], np.float32), np.array([[1.0, 1.0]], np.float32)
    assert float(encoder.similarity(a, b)[0, 0]) == pytest.approx(0.5**0.5)
    assert float(encoder.similarity_pairwise(a, b)[0]) == pytest.approx(0.5**0.5)
    with pytest.raises(SetupError, match="compares by euclidean distance"):
        mteb_model(Model("m", minilm_model.source, {"dense": "euclidean"}, False, ""))


def test_models_without_a_similarity_in_mteb_search_themselves(task: str, searched: tuple[Engine, str]) -> None:
    """Scores are those of the engine's own verb, and mteb's measure is that of their order."""
    engine, output = searched
    model = Model("m", engine, similarities_of(engine.card), False, "")
    wrapped: Any = mteb_model(model, output)
    assert isinstance(wrapped, Search)
    task_of = birds_task()
    task_of.load_data()
    data = task_of.dataset["default"]["test"]
    wrapped.index(data["corpus"])
    found = wrapped.search(data["queries"], top_k=2)
    texts = {row["id"]: f"{row['title']} {row['text']}".strip() for row in data["corpus"]}
    for row in data["queries"]:
        scores = engine.score(row["text"], list(texts.values()), score_by=output)
        assert found[row["id"]] == pytest.approx(dict(zip(texts, scores.tolist(), strict=True)), abs=1e-4)
    (result,) = evaluate_tasks(model, output, task)
    right = [max(found[f"q{each}"], key=lambda name: found[f"q{each}"][name]) == each for each in "ab"]
    assert result["score"] == np.mean(right)


def test_rerankers_are_cross_encoders(monkeypatch: pytest.MonkeyPatch, minilm_model: Model) -> None:
    """The scores are those of the verb `score`; MiniLM stands in for a reranker, as its answers are sensible."""
    import mteb

    monkeypatch.setattr(mteb, "get_tasks", lambda **_: [birds_task(reranking=True)])
    model = Model("m", minilm_model.source, {}, True, "")
    assert isinstance(mteb_model(model), CrossEncoder)
    (result,) = evaluate_tasks(model, None, "Birds")
    assert result["score"] == 1


def test_the_command_runs_tasks(task: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here(monkeypatch)
    out, _ = here.run("eval", server.url, "--mteb", task, "--json")
    assert [each["score"] for each in json.loads(out)] == [1.0]
    out, _ = here.run("eval", server.url, "--mteb", task)
    assert "1.0000" in out.decode()


def test_unknown_tasks_and_failing_ones_are_one_line(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import mteb

    here = Here(monkeypatch)
    assert "'NoSuchTask' not found" in here.error("eval", server.url, "--mteb", "NoSuchTask")
    assert "names no task" in here.error("eval", server.url, "--mteb", " , ")
    broken = birds_task()
    monkeypatch.setattr(broken, "load_data", lambda **_: (tmp_path / "none").read_text())
    monkeypatch.setattr(mteb, "get_tasks", lambda **_: [broken])
    assert "mteb cannot run Birds" in here.error("eval", server.url, "--mteb", "Birds")
