"""/v1/rerank and /v1/score: every field, every way a body can be wrong, and real servers of every kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest

from checkpoints import sentence_layout, write_bert
from late_models import write_stanford
from serving import Server
from test_bge_m3 import write_m3
from whimbrel import Engine
from whimbrel.dialects import rerank
from whimbrel.errors import ComputeError, InvalidRequest, TooLarge
from whimbrel.server.openapi import openapi_document
from whimbrel.types import Outputs, Request, Result, Timings

QUERY = "what is a whimbrel?"
DOCUMENTS = ["a sandwich", "The whimbrel is a wader, with a long curved bill.", "... ! ?", "birds fly far", "a sandwich"]


def read(body: dict[str, Any]) -> Request:
    return rerank.read_rerank(orjson.dumps(body))[1]


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
        score_by="sparse",
        activate=True,
        max_tokens=9,
        priority=3,
    )
    least = {"query": "q", "documents": ["a"]}
    assert read(least) == Request([("q", "a")], ("scores",), truncate="never")
    assert (
        read(least | {"truncate_prompt_tokens": -1}) == read(least | {"truncate": True}) == Request([("q", "a")], ("scores",))
    )
    assert read(least | {"truncate": "left"}).truncate == "left"
    assert read(dict.fromkeys(rerank.RerankRequest.__struct_fields__) | least) == read(least)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"queries": "q", "documents": ["a", "b"]}, [("q", "a"), ("q", "b")]),
        ({"queries": ["q", "r"], "documents": ["a", "b"]}, [("q", "a"), ("r", "b")]),
        ({"text_1": "q", "text_2": {"text": "a"}}, [("q", "a")]),
    ],
)
def test_the_forms_of_score(body: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert rerank.read_score(orjson.dumps(body))[1].texts == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, None),
        ({"query": "q"}, None),
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
        ({"queries": [], "documents": []}, "documents"),
        ({"queries": ["q", ""], "documents": ["a", "b"]}, "queries[1]"),
    ],
)
def test_pairs_that_are_none(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rerank.read_score(orjson.dumps(body))
    assert caught.value.param == param


def test_the_best_come_first_and_equal_ones_as_they_came() -> None:
    sent = rerank.RerankRequest(query="q", documents=["a", rerank.Document("b"), "c", "d"], top_n=3)
    found = orjson.loads(rerank.write_rerank(sent, result(0.5, 2, 0.5, -1), "m"))
    assert found["results"] == [
        {"index": 1, "relevance_score": 2.0, "document": {"text": "b"}},
        {"index": 0, "relevance_score": 0.5, "document": {"text": "a"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
    ]
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    bare = rerank.RerankRequest(query="q", documents=["a"], top_n=0, return_documents=False)
    assert orjson.loads(rerank.write_rerank(bare, result(1), "m"))["results"] == [{"index": 0, "relevance_score": 1.0}]


def test_errors_name_the_query_and_the_documents() -> None:
    for param, of_rerank, of_score in (
        ("input[3][1]", "documents[3]", "documents[3]"),
        ("input[3][0]", "query", "queries[3]"),
        ("input[2]", "documents[2]", "documents[2]"),
        ("max_tokens", "truncate_prompt_tokens", "truncate_prompt_tokens"),
    ):
        error = ComputeError("is broken.", param=param)
        assert orjson.loads(rerank.write_rerank_error(error))["error"]["param"] == of_rerank
        assert orjson.loads(rerank.write_score_error(error))["error"]["param"] == of_score


def test_both_are_in_the_description() -> None:
    assert {"/v1/rerank", "/v1/score"} <= openapi_document()["paths"].keys()


def write_dense(folder: Path) -> None:
    write_bert(folder)
    sentence_layout(folder)


KINDS: dict[str, Callable[[Path], object]] = {"dense": write_dense, "late": write_stanford, "m3": write_m3}


@pytest.mark.parametrize("kind", KINDS)
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
        long = client.post("/v1/rerank", json={"query": "a", "documents": ["b", "far away " * 3000]})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "documents[1]")
