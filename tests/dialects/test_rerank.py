"""/v1/rerank and /v1/score: every field, every way a body can be wrong, and real servers of every kind of model."""

from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest
from hypothesis import given
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer

from asgi import call
from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.encoders import write_bert
from checkpoints.late_interaction import write_stanford
from checkpoints.rerankers import CAUSAL, reference_score, write_reranker
from checkpoints.sentence_layout import sentence_layout
from exchanges import Small
from fake_embedder import CARD, FakeModel, asked
from serving import Server
from vectors import same_bits, told, vectors
from whimbrel import AsyncEngine, Engine
from whimbrel.dialects.common import rerank
from whimbrel.dialects.common.pair_inputs import Document
from whimbrel.dialects.common.pairs import RerankRequest
from whimbrel.dialects.vllm import pair_scores
from whimbrel.errors import ComputeError, InvalidRequest, Location, TooLarge
from whimbrel.server.app.app import create_app
from whimbrel.server.app.openapi import openapi_document
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Result, Timings

QUERY = "what is a whimbrel?"
DOCUMENTS = ["a sandwich", "The whimbrel is a wader, with a long curved bill.", "... ! ?", "birds fly far", "a sandwich"]


def read(body: dict[str, Any]) -> Request:
    return rerank.parse_rerank(orjson.dumps(body)).request(FakeModel.named("m", CARD))


def result(*scores: float) -> Result:
    return Result(Outputs(scores=np.array(scores, np.float32)[:, None]), 7, 0, Timings())


def test_every_field_of_rerank() -> None:
    body = {"query": {"text": "q"}, "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": False, "model": "m"}
    more = {"instruction": "judge", "prompt": "p: ", "use_activation": True, "priority": 3, "score_by": "sparse"}
    assert read(body | more | {"truncate_prompt_tokens": 9, "nobody": "knows"}) == Request(
        [("q", "a"), ("q", "b")],
        ("scores",),
        prompt="p: ",
        instruction="judge",
        listwise=True,
        score_by="sparse",
        activate=True,
        max_tokens=9,
    )
    least = {"query": "q", "documents": ["a"]}
    assert read(least) == Request([("q", "a")], ("scores",), listwise=True, truncate="never")
    assert (
        read(least | {"truncate_prompt_tokens": -1})
        == read(least | {"truncate": True})
        == Request([("q", "a")], ("scores",), listwise=True)
    )
    assert read(least | {"truncate": "left"}).truncate == "left"
    assert read(dict.fromkeys(RerankRequest.__struct_fields__) | least) == read(least)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"queries": "q", "documents": ["a", "b"]}, [("q", "a"), ("q", "b")]),
        ({"queries": ["q", "r"], "documents": ["a", "b"]}, [("q", "a"), ("r", "b")]),
        ({"text_1": "q", "text_2": {"text": "a"}}, [("q", "a")]),
    ],
)
def test_the_forms_of_score(body: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert pair_scores.parse_score(orjson.dumps(body)).request(FakeModel.named("m", CARD)).texts == expected


def test_vectors_may_stand_for_a_query() -> None:
    vector = {"data": base64.b64encode(np.ones(2, "<f4").tobytes()).decode()}
    (query, _), *_ = read({"query": vector, "documents": ["a"]}).texts
    assert np.array_equal(query, [1, 1])
    raw = orjson.dumps({"queries": [vector, "q"], "documents": ["a", "b"]})
    (query, _), *_ = asked(pair_scores.parse_score(raw)).texts
    assert np.array_equal(query, [1, 1])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": "a"}, "documents"),
        ({"query": "q", "documents": ["a", 3]}, "documents[1]"),
        ({"query": "q", "documents": ["a", {"image": "b"}]}, "documents[1]"),
        ({"query": ["q"], "documents": ["a"]}, "query"),
        ({"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "q", "documents": ["a"], "top_n": 1.5}, "top_n"),
        ({"query": "q", "documents": ["a"], "top_n": "all"}, "top_n"),
        ({"query": "q", "documents": ["a"], "truncate": "both"}, "truncate"),
        ({"query": "q", "documents": ["a"], "score_by": "scores"}, "score_by"),
        ({"query": "q", "documents": ["a"] * 10_001}, "documents"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.param == param
    assert isinstance(caught.value, TooLarge) == (len(body.get("documents") or "") > 10_000)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"queries": "q"}, "documents"),
        ({}, "text_1"),
        ({"text_2": "a"}, "text_1"),
        ({"queries": ["q", "r"], "documents": ["a", "b", "c"]}, "queries"),
        ({"queries": [], "documents": ["a"]}, "queries"),
        ({"queries": ["q"], "documents": []}, "documents"),
        ({"queries": ["q", ""], "documents": ["a", "b"]}, "queries[1]"),
    ],
)
def test_pairs_that_are_none(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        pair_scores.parse_score(orjson.dumps(body))
    assert caught.value.param == param


def test_the_best_come_first_and_equal_ones_as_they_came() -> None:
    body = RerankRequest(query="q", documents=["a", Document("b"), "c", "d"], top_n=3)
    found = orjson.loads(rerank.render_rerank(body, result(0.5, 2, 0.5, -1), FakeModel.named("m")))
    assert found["results"] == [
        {"index": 1, "relevance_score": 2.0, "document": {"text": "b", "multi_modal": None}},
        {"index": 0, "relevance_score": 0.5, "document": {"text": "a", "multi_modal": None}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "c", "multi_modal": None}},
    ]
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0}
    assert "data" not in found
    plain = RerankRequest(query="q", documents=["a", Document("b")], return_documents=True)
    assert orjson.loads(rerank.render_rerank(plain, result(1, 2), FakeModel.named("m")))["data"] == [
        {"index": 1, "relevance_score": 2.0, "document": "b"},
        {"index": 0, "relevance_score": 1.0, "document": "a"},
    ]
    bare = RerankRequest(query="q", documents=["a"], top_n=0, return_documents=False)
    assert orjson.loads(rerank.render_rerank(bare, result(1), FakeModel.named("m")))["results"] == [
        {"index": 0, "relevance_score": 1.0}
    ]


@given(vectors(4, 1))
def test_scores_read_back(scores: np.ndarray) -> None:
    body = pair_scores.parse_score(b'{"text_1": "q", "text_2": ["a", "b", "c", "d"]}').body
    found = told(pair_scores.render_score(body, result(*scores[:, 0]), FakeModel.named("m")))["data"]
    assert same_bits([each["score"] for each in found], scores)
    body = rerank.parse_rerank(b'{"query": "q", "documents": ["a", "b", "c", "d"]}').body
    ranked = told(rerank.render_rerank(body, result(*scores[:, 0]), FakeModel.named("m")))["results"]
    assert same_bits([each["relevance_score"] for each in sorted(ranked, key=lambda each: each["index"])], scores)
    assert [each["index"] for each in ranked] == sorted(range(4), key=lambda index: -scores[index, 0])


def test_errors_name_the_query_and_the_documents() -> None:
    for location, of_rerank, of_score in (
        (Location("input", 3, 1), "documents[3]", "documents[3]"),
        (Location("input", 3, 0), "query", "queries[3]"),
        (Location("input", 2), "documents[2]", "documents[2]"),
        (Location("max_tokens"), "truncate_prompt_tokens", "truncate_prompt_tokens"),
    ):
        error = ComputeError("is broken.", location=location)
        assert orjson.loads(rerank.RERANK.render_error(error))["error"]["param"] == of_rerank
        assert orjson.loads(pair_scores.V1_SCORE.render_error(error))["error"]["param"] == of_score


def test_both_are_in_the_description() -> None:
    assert {"/v1/rerank", "/v1/score"} <= openapi_document()["paths"].keys()


def write_dense(folder: Path) -> None:
    write_bert(folder)
    sentence_layout(folder)


def cross_encoder(folder: Path) -> tuple[list[str], NDArray[np.float64]]:
    """(options, scores of QUERY and each of DOCUMENTS), by Sentence Transformers."""
    write_classifier(folder, "bert", num_labels=1)
    model = CrossEncoder(str(folder), device="cpu")
    return [], np.asarray(model.predict([(QUERY, document) for document in DOCUMENTS]), np.float64)


def language_model(folder: Path) -> tuple[list[str], NDArray[np.float64]]:
    """The same, by transformers and the recipe of Qwen3-Reranker's card."""
    kind, config, files, recipe, tokens, divisor = CAUSAL["qwen3"]
    model = write_reranker(folder, kind, files(), **config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [recipe(tokenizer, QUERY, document, None, 400) for document in DOCUMENTS]
    logits = np.array([reference_score(model, tokenizer, each, tokens, divisor) for each in ids])
    return ["--reranker", "qwen3"], 1 / (1 + np.exp(-logits))


@pytest.mark.parametrize("make", [cross_encoder, language_model])
@pytest.mark.sample(1)
def test_rerankers(make: Callable[[Path], tuple[list[str], NDArray[np.float64]]], tmp_path: Path) -> None:
    """Models that score pairs give the reference's scores, and the banner shows an example for them."""
    options, expected = make(tmp_path)
    order = np.argsort(-expected, kind="stable").tolist()
    with (
        Server(str(tmp_path), "--dtype", "float32", "--max-length", "40" if not options else "400", *options) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        body: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS, "top_n": 3}
        found = client.post("/v1/rerank", json=body).raise_for_status().json()["results"]
        assert [each["index"] for each in found] == order[:3]
        np.testing.assert_allclose([each["relevance_score"] for each in found], expected[order[:3]], rtol=1e-5)
        pairs = {"text_1": [QUERY] * len(DOCUMENTS), "text_2": DOCUMENTS}
        found = client.post("/v1/score", json=pairs).raise_for_status().json()["data"]
        np.testing.assert_allclose([each["score"] for each in found], expected, rtol=1e-5)
        for wrong in ({"score_by": "dense"}, {"explain": True}, {"dimensions": 4}):
            refused = client.post("/v1/rerank", json=body | wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, *wrong)
        vectors = client.post("/v1/rerank", json=body | {"documents": ["a", {"data": "AACAPw=="}]})
        assert (vectors.status_code, vectors.json()["error"]["param"]) == (400, "documents[1]")
        assert "strings" in vectors.json()["error"]["message"]
        curl = server.log.split("In a shell")[1].splitlines()[1]
        answer = orjson.loads(subprocess.run(["bash", "-c", curl], capture_output=True, check=True).stdout)
        assert sorted(each["index"] for each in answer["results"]) == [0, 1]


KINDS: dict[str, Callable[[Path], object]] = {"dense": write_dense, "late": write_stanford, "m3": write_m3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_a_real_server(kind: str, tmp_path: Path) -> None:
    """Scores that pass between processes have the bits of those of an engine in this one; many come in shared memory."""
    KINDS[kind](tmp_path)
    many = DOCUMENTS + [f"text {i} of birds" for i in range(1000)]
    by = ["dense", "sparse", "multi_vector"] if kind == "m3" else [None]
    with (
        Engine(str(tmp_path), dtype="float32") as engine,
        Server(str(tmp_path), "--dtype", "float32") as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        for name in by:
            expected = engine.score(QUERY, many, score_by=name)
            body = {"queries": QUERY, "documents": many, "score_by": name, "truncate": True}
            answer = client.post("/v1/score", json=body).raise_for_status().json()
            assert [np.float32(each["score"]) for each in answer["data"]] == expected.tolist()
            body = {"query": QUERY, "documents": DOCUMENTS, "score_by": name}
            ranked = client.post("/v1/rerank", json=body).raise_for_status().json()["results"]
            assert [(each["index"], np.float32(each["relevance_score"])) for each in ranked] == [
                (each.index, each.score) for each in engine.rerank(QUERY, DOCUMENTS, score_by=name)
            ]
        cut = {"truncate": False} if kind == "late" else {}  # which cuts documents to its length otherwise
        long = client.post("/v1/rerank", json={"query": "a", "documents": ["b", "far away " * 3000]} | cut)
        assert (long.status_code, long.json()["error"]["param"]) == (400, "documents[1]")


def test_C11_no_documents_one_thousands_empty_and_equal_ones(small: Small) -> None:
    with httpx2.Client(base_url=small.url, timeout=60) as client:

        def ranked(documents: list[str], **more: Any) -> Any:
            return client.post("/v1/rerank", json={"model": "late", "query": QUERY, "documents": documents} | more)

        none = ranked([])
        assert (none.status_code, none.json()["error"]["param"]) == (400, "documents")
        assert [each["index"] for each in ranked(["one"]).json()["results"]] == [0]
        golden = ranked(DOCUMENTS).json()
        thousands = [f"text {i % 997} of birds" for i in range(9_999)] + [""]
        found = ranked(thousands, top_n=20_000).json()["results"]
        assert sorted(each["index"] for each in found) == list(range(10_000))
        order = [(-each["relevance_score"], each["index"]) for each in found]
        assert order == sorted(order), "of equal ones the first comes first"
        many = ranked([*thousands, "one more"])
        assert (many.status_code, many.json()["error"]["param"]) == (413, "documents")
        assert "10,000" in many.json()["error"]["message"]
        equal = ranked(["a sandwich"] * 50, top_n=7).json()["results"]
        assert [each["index"] for each in equal] == list(range(7))
        assert len({each["relevance_score"] for each in equal}) == 1
        assert all("document" not in each for each in ranked(DOCUMENTS, return_documents=False).json()["results"])
        assert ranked(DOCUMENTS).json()["results"] == golden["results"]


def test_C12_sparse_vectors_of_zeros(tmp_path: Path) -> None:
    """They are empty, and score 0 with any other."""
    write_m3(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        app = create_app(ModelRegistry(AsyncEngine(engine)))

        def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            headers = {"content_type": "application/json"}
            answer = asyncio.run(call(app, "POST", path, body=orjson.dumps(body), headers=headers))
            return answer.status, orjson.loads(answer.body)

        body: dict[str, Any] = {"input": ["", "far away"], "outputs": "sparse", "encoding_format": "base64"}
        empty, other = post("/v1/embed", body)[1]["outputs"]["sparse"]
        assert empty == {"ids": "", "weights": ""}
        assert other["ids"]
        pairs = {
            "queries": ["", "far away", "", "far away"],
            "documents": ["far away", other, empty, empty],
            "score_by": "sparse",
        }
        status, refused = post("/v1/score", pairs)
        assert (status, refused["error"]["param"]) == (400, "queries[0]")
        pairs["queries"] = [empty, "far away", empty, "far away"]
        scores = [each["score"] for each in post("/v1/score", pairs)[1]["data"]]
        assert scores[1] > 0
        assert [scores[0], *scores[2:]] == [0.0] * 3
