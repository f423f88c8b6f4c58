"""Order of scores that the activation has made equal: engine, clients, command line, and every route of every dialect."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.classifiers import write_classifier
from serving import Server
from whimbrel import AsyncClient, Client, Engine
from whimbrel.client.responses import Ranking, ScoredRow, join_rankings, ranking_of
from whimbrel.dialects import ROUTES, Route
from whimbrel.types.arrays import Float32Array
from whimbrel.types.request import Request
from whimbrel.types.result import Ranked

QUERY = "what is it"
DOCUMENTS = [f"{letter}{other} {other * 2}" for letter in "abcdefghijklmnopqrst" for other in "uvwxyzabcd"]
SCALE, SHIFT = 20.0, 150.0


@dataclass
class Saturated:
    """Models with logits far above 20, served by two replicas in float32; their engines, and the logits of DOCUMENTS."""

    server: Server
    ranker: Engine
    classes: Engine
    folder: Path
    logits: Float32Array

    @property
    def order(self) -> list[int]:
        return np.argsort(-self.logits, kind="stable").tolist()


def write(folder: Path, num_labels: int, **config: Any) -> None:
    """A BERT classifier whose last layer is scaled, so that its activation gives 1 for every text."""
    write_classifier(folder, "bert", num_labels=num_labels, **config)
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"] *= SCALE
    weights["classifier.bias"] = torch.full_like(weights["classifier.bias"], SHIFT)
    if num_labels > 1:  # all likely, and their order is not that of the labels
        weights["classifier.bias"] += torch.arange(num_labels) * 3.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def saturated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saturated]:
    folder = tmp_path_factory.mktemp("models")
    write(folder / "ranker", 1)
    write(folder / "classes", 3)
    config = json.loads((folder / "classes/config.json").read_text())
    (folder / "classes/config.json").write_text(json.dumps(config | {"problem_type": "multi_label_classification"}))
    models = [str(folder / "ranker"), str(folder / "classes"), "--served-name", "ranker", "--served-name", "classes"]
    with (
        Engine(str(folder / "ranker"), dtype="float32") as ranker,
        Engine(str(folder / "classes"), dtype="float32") as classes,
        Server(*models, "--dtype", "float32", "--replicas", "2") as server,
    ):
        yield Saturated(server, ranker, classes, folder, ranker.score(QUERY, DOCUMENTS, activate=False))


def test_the_order_is_that_of_the_references_logits(saturated: Saturated) -> None:
    """All printed scores are 1, and the documents come in the order of transformers' logits."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = saturated.folder / "ranker"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        encoded = tokenizer([QUERY] * 20, DOCUMENTS[:20], padding=True, truncation=True, return_tensors="pt")
        logits = model.eval()(**encoded).logits[:, 0].numpy()
    assert logits.min() > 20
    assert np.abs(logits - saturated.logits[:20]).max() <= 1e-5 * np.abs(logits).max()
    distinct = {float(value) for value in saturated.ranker.score(QUERY, DOCUMENTS)}
    assert distinct == {1.0}
    found = [each.index for each in saturated.ranker.rerank(QUERY, DOCUMENTS[:20])]
    assert np.all(np.diff(logits[found]) < 1e-3)
    assert found != list(range(20))


def test_python_and_clients(saturated: Saturated) -> None:
    """Also of lists in several requests, and of lists that replicas share."""
    engine, order = saturated.ranker, saturated.order
    right = [Ranked(index, 1.0) for index in order]
    assert engine.rerank(QUERY, DOCUMENTS) == right
    assert engine.rerank(QUERY, DOCUMENTS, top_n=7) == right[:7]
    raw = engine.rerank(QUERY, DOCUMENTS, activate=False)
    assert [each.index for each in raw] == order
    assert [each.score for each in raw] == saturated.logits[order].tolist()
    for max_items in (512, 9):
        with Client(saturated.server.url, model="ranker", max_items=max_items) as client:
            assert client.rerank(QUERY, DOCUMENTS) == right
            assert client.rerank(QUERY, DOCUMENTS, top_n=7) == right[:7]
            assert client.rerank(QUERY, DOCUMENTS, activate=False) == raw
            assert client.rerank(QUERY, []) == []

    async def rank() -> list[Ranked]:
        async with AsyncClient(saturated.server.url, model="ranker") as client:
            return await client.rerank(QUERY, DOCUMENTS)

    assert asyncio.run(rank()) == right
    with Client(saturated.server.url, model="ranker", dialect="cohere") as client:
        assert client.rerank(QUERY, DOCUMENTS) == right
    with Client(saturated.server.url, model="ranker", dialect="tei") as client:
        few = [each.index for each in client.rerank(QUERY, DOCUMENTS[:32])]
        assert few == [index for index in order if index < 32]


def test_the_command_line(saturated: Saturated) -> None:
    command = [sys.executable, "-m", "whimbrel", "rerank", QUERY, *DOCUMENTS[:30], "--top-n", "9"]
    command += ["--model", str(saturated.folder / "ranker"), "--dtype", "float32"]
    rows = [json.loads(line) for line in subprocess.run(command, capture_output=True, check=True).stdout.splitlines()]
    assert [row["index"] for row in rows] == [index for index in saturated.order if index < 30][:9]
    assert {row["score"] for row in rows} == {1.0}


def body_of(route: Route, **more: Any) -> dict[str, Any]:
    """The route's example with QUERY and DOCUMENTS, without a limit of results."""
    example = json.loads(route.example)
    for name, value in example.items():
        if isinstance(value, list):
            example[name] = [{"text": each} for each in DOCUMENTS] if isinstance(value[0], dict) else DOCUMENTS
    query = {"text": QUERY} if isinstance(example["query"], dict) else QUERY
    limits = {name: len(DOCUMENTS) for name in ("top_n", "top_k") if name in example}
    return example | {"query": query, "model": "ranker"} | limits | more


def rows_of(answer: Any) -> list[dict[str, Any]]:
    """The list of objects with an index, wherever it is in an answer."""
    lists = [answer] if isinstance(answer, list) else [each for each in answer.values() if isinstance(each, list)]
    return next(each for each in lists if "index" in each[0])


RANKING = [route for route in ROUTES if route.made_for == "ranking" and "queries" not in route.example]


def test_all_dialects_that_rank_are_here() -> None:
    assert {route.parse.__module__.rpartition(".")[2] for route in RANKING} >= {
        "rerank", "scores", "cohere", "voyage", "infinity", "mixedbread", "nvidia",
    }  # fmt: skip
    assert {"/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/v1/ranking", "/reranking", "/"} <= {
        r.path for r in RANKING
    }


@pytest.mark.parametrize("route", RANKING, ids=lambda route: f"{route.path} {route.summary}")
def test_every_route_that_ranks(route: Route, saturated: Saturated) -> None:
    with httpx2.Client(base_url=saturated.server.url, timeout=60) as client:
        response = client.post(route.path, json=body_of(route))
        assert response.status_code == 200, response.text
        rows = rows_of(response.json())
        msgspec.json.decode(response.content, type=route.response_type)
        assert [row["index"] for row in rows] == saturated.order
        scores = [next(row[name] for name in ("relevance_score", "score", "logit") if name in row) for row in rows]
        assert (set(scores) == {1.0}) == ("rankings" not in response.json())
        assert all(
            set(row) <= {"index", "relevance_score", "score", "logit", "document", "text", "input", "object"} for row in rows
        )
        assert ("logit" in rows[0]) == ("rankings" in response.json())
        limit = next((name for name in ("top_k", "top_n") if name in route.request_type.__struct_fields__), None)
        if limit is not None:
            fewer = rows_of(client.post(route.path, json=body_of(route, **{limit: 5})).json())
            assert [row["index"] for row in fewer] == saturated.order[:5]


@pytest.mark.parametrize("function", ["sigmoid", "none"])
def test_classes(function: str, saturated: Saturated) -> None:
    """The best class of a text, and the order of all, where all have the probability 1."""
    engine, texts = saturated.classes, DOCUMENTS[:20]
    logits = engine.classify(texts, activate=False).scores_NC
    classes = engine.classify(texts)
    assert set(classes.scores_NC.ravel().tolist()) == {1.0}
    best = [classes.labels[index] for index in logits.argmax(axis=1)]
    assert set(best) != {classes.labels[0]}
    assert classes.best == best
    orders = [[classes.labels[i] for i in row] for row in np.argsort(-logits, axis=1, kind="stable")]
    with httpx2.Client(base_url=saturated.server.url, timeout=60) as client:
        posted = client.post("/classify", json={"model": "classes", "input": texts}).json()["data"]
        assert [each["label"] for each in posted] == best
        raw = {"raw_scores": function == "none"}
        predicted = client.post("/predict", json={"model": "classes", "inputs": [[text] for text in texts], **raw}).json()
        assert [[each["label"] for each in row] for row in predicted] == orders
        infinity = client.post("/classify", json={"model": "classes", "input": texts, **raw}).json()["data"]
        assert [[each["label"] for each in row] for row in infinity] == orders
        cohere = client.post("/v1/classify", json={"model": "classes", "inputs": texts}).json()["classifications"]
        assert [each["predictions"] for each in cohere] == orders
        assert [each["prediction"] for each in cohere] == best
        native = client.post("/v1/classify", json={"model": "classes", "input": texts}).json()
        assert set(native) == {"labels", "scores", "model", "usage"}
    with Client(saturated.server.url, model="classes", max_items=7) as client:
        theirs = client.classify(texts)
        assert theirs.best == best
        assert [[label for label, _ in row] for row in theirs.ranked] == orders


def test_scores_with_logits(saturated: Saturated) -> None:
    """Only a body that asks for them gets logits; scores have the bits that they had."""
    body = {"model": "ranker", "queries": QUERY, "documents": DOCUMENTS}
    with httpx2.Client(base_url=saturated.server.url, timeout=60) as client:
        assert {*client.post("/v1/score", json=body).json()["data"][0]} == {"index", "object", "score"}
        rows = client.post("/v1/score", json=body | {"return_logits": True}).json()["data"]
        assert [np.float32(row["logit"]) for row in rows] == saturated.logits.tolist()
        raw = client.post("/v1/score", json=body | {"return_logits": True, "use_activation": False}).json()["data"]
        assert {*raw[0]} == {"index", "object", "score"}
        embed = client.post("/v1/embed", json={"model": "classes", "input": ["a"], "outputs": ["scores"]}).json()
        assert {*embed["outputs"]} == {"scores"}


def test_printed_scores_have_the_bits_of_the_activation(saturated: Saturated) -> None:
    """Also in a batch with texts whose scores are not activated, in any batch, and for scores that are not 1."""
    engine = saturated.classes
    logits = torch.from_numpy(engine.classify(DOCUMENTS, activate=False).scores_NC)
    from whimbrel.model.pooling import ACTIVATIONS

    expected = ACTIVATIONS["sigmoid"](logits).numpy()
    futures = [engine.submit(Request([text], ("scores",), activate=i % 3 != 0)) for i, text in enumerate(DOCUMENTS)]
    for i, future in enumerate(futures):
        outputs = future.result().outputs
        assert (outputs.logits is None) == (i % 3 == 0)
        assert outputs.order.tolist() == logits[i : i + 1].tolist()
        if i % 3:
            assert outputs.scores is not None
            assert outputs.scores.flags.c_contiguous
            assert np.array_equal(outputs.scores, expected[i : i + 1])


def test_equal_logits_keep_the_order_of_the_documents(saturated: Saturated) -> None:
    ranked = saturated.ranker.rerank(QUERY, [DOCUMENTS[3], DOCUMENTS[1]] * 3)
    groups = [[each.index for each in ranked[:3]], [each.index for each in ranked[3:]]]
    assert sorted(groups) == [[0, 2, 4], [1, 3, 5]]


def test_rankings_of_other_servers_keep_their_order() -> None:
    """Equal scores keep the order of the server, and those of several requests the order of the requests."""
    first = ranking_of([ScoredRow(2, 1.0), ScoredRow(0, 1.0), ScoredRow(1, 0.5)], 3)
    second = ranking_of([ScoredRow(1, 1.0), ScoredRow(0, 0.75)], 2)
    assert [each.index for each in join_rankings([first, second]).ranked(None)] == [2, 0, 4, 3, 1]
    assert join_rankings([]).ranked(None) == []
    assert isinstance(first, Ranking)
    unsorted = ranking_of([ScoredRow(0, 0.1), ScoredRow(1, 0.9)], 2)
    assert [each.index for each in unsorted.ranked(1)] == [1]
