"""Voyage's embeddings and rerank: every field, every way a body can be wrong, and Voyage's SDK (voyageai 0.5.0) against a server."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest
import requests
import voyageai
from hypothesis import given
from hypothesis import strategies as st
from voyageai import error

from dialect_results import QUERY, TEXTS, dense_result, fake_model, ranked_result
from exchanges import Exchanges, Small
from fake_embedder import asked
from vectors import is_read_back, vectors
from whimbrel.dialects import voyage
from whimbrel.errors import Hint, InvalidRequest, TooLong
from whimbrel.server.app.routing import ROUTES_BY_PATH
from whimbrel.types.request import Request

TYPES = ["float", "int8", "uint8", "binary", "ubinary"]


def read(**body: Any) -> Request:
    return voyage.parse_embeddings(orjson.dumps({"input": "a"} | body)).request(fake_model())


def parse_rerank(**body: Any) -> Request:
    return asked(voyage.parse_rerank(orjson.dumps({"query": "q", "documents": ["a"]} | body)))


def test_every_field() -> None:
    body = {"input_type": "query", "output_dimension": 8, "output_dtype": "int8", "truncation": False, "model": "m", "new": 1}
    assert read(**body) == Request(["a"], ("dense",), input_type="query", dimensions=8, truncate="never")
    assert read() == Request(["a"], ("dense",))
    assert read(truncation=True) == Request(["a"], ("dense",), split_long=False)
    assert read(**dict.fromkeys(voyage.VoyageEmbeddingsRequest.__struct_fields__) | {"input": "a"}) == read()
    assert read(dimensions=8, truncate="left") == Request(["a"], ("dense",), dimensions=8, truncate="left")
    assert read(output_dimension=8, dimensions=8) == read(dimensions=8)
    assert read(input=["a", "b"]).texts == ["a", "b"]
    assert parse_rerank(model="m", top_k=3, truncation=False) == Request(
        [("q", "a")], ("scores",), listwise=True, truncate="never"
    )
    nulls = dict.fromkeys(voyage.VoyageRerankRequest.__struct_fields__) | {"query": "q", "documents": ["a"]}
    assert parse_rerank(**nulls) == parse_rerank(truncation=True) == Request([("q", "a")], ("scores",), listwise=True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"), ({"input": ["a", None]}, "input[1]"), ({"output_dtype": "int4"}, "output_dtype"), ({"input": 3}, "input"),
        ({"output_dtype": "binary", "output_dimension": 12}, "output_dtype"), ({"truncation": "yes"}, "truncation"),
        ({"output_dimension": 8, "dimensions": 9}, "output_dimension"), ({"input_type": "search_query"}, "input_type"),
        ({"encoding_format": "hex"}, "encoding_format"), ({"input": ["a"] * 2049}, "input"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**body)
    told = orjson.loads(voyage.ROUTES[0].render_error(caught.value))
    assert told.keys() == {"detail"}
    assert told["detail"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("body", "param"),
    [({"query": ""}, "query"), ({"documents": []}, "documents"), ({"top_k": 0}, "top_k"), ({"documents": [3]}, "documents[0]")],
)
def test_what_is_wrong_with_a_rerank_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_rerank(**body)
    assert orjson.loads(voyage.ROUTES[1].render_error(caught.value))["detail"].startswith(f"{param}: ")


DTYPES = {"int8": np.int8, "binary": np.int8, "uint8": np.uint8, "ubinary": np.uint8}


@given(vectors(3, 16), st.sampled_from([None, *TYPES]), st.sampled_from([None, "base64"]))
def test_what_is_written_reads_back(rows: np.ndarray, kind: Any, encoding_format: Any) -> None:
    body = {"input": TEXTS, "output_dtype": kind, "encoding_format": encoding_format}
    sent = voyage.parse_embeddings(orjson.dumps(body)).body
    found = orjson.loads(voyage.render_embeddings(sent, dense_result(rows), fake_model()))
    assert (found["object"], found["model"], found["usage"]) == ("list", "m", {"prompt_tokens": 7, "total_tokens": 7})
    assert [(each["object"], each["index"]) for each in found["data"]] == [("embedding", i) for i in range(3)]
    read_back: Any = [each["embedding"] for each in found["data"]]
    if encoding_format == "base64":
        read_back = [np.frombuffer(base64.b64decode(row), DTYPES.get(kind, "<f4")) for row in read_back]
    assert is_read_back(kind or "float", np.array(read_back, np.float32), rows)


def test_ranked_documents_are_under_data() -> None:
    body = {"query": "q", "documents": ["a", {"text": "b"}, "c"], "top_k": 2, "return_documents": True}
    sent = voyage.parse_rerank(orjson.dumps(body)).body
    assert orjson.loads(voyage.render_rerank(sent, ranked_result(0.5, 2, 0.5), fake_model())) == {
        "object": "list",
        "data": [{"index": 1, "relevance_score": 2.0, "document": "b"}, {"index": 0, "relevance_score": 0.5, "document": "a"}],
        "model": "m",
        "usage": {"total_tokens": 7},
    }
    sent = voyage.parse_rerank(b'{"query": "q", "documents": ["a"]}').body
    assert orjson.loads(voyage.render_rerank(sent, ranked_result(1), fake_model()))["data"] == [
        {"index": 0, "relevance_score": 1.0}
    ]


def test_errors_are_in_the_words_of_the_api() -> None:
    long = TooLong("is long.", item=3, part=1, hint=Hint.TRUNCATE)
    told = orjson.loads(voyage.ROUTES[1].render_error(long))["detail"]
    assert told == "documents[3]: is long. Pass truncation=true to cut it."
    for ours, theirs in (("dimensions", "output_dimension"), ("outputs", "model"), ("input[3]", "input[3]")):
        told = orjson.loads(voyage.ROUTES[0].render_error(InvalidRequest("is wrong.", param=ours)))
        assert told == {"detail": f"{theirs}: is wrong."}


def test_which_bodies_are_voyage_s() -> None:
    for field in ("output_dtype", "output_dimension", "truncation"):
        chosen = ROUTES_BY_PATH["/v1/embeddings"].choose(orjson.dumps({"input": "a", field: None}))
        assert chosen.request_type is voyage.VoyageEmbeddingsRequest
    for field in ("top_k", "truncation"):
        chosen = ROUTES_BY_PATH["/v1/rerank"].choose(orjson.dumps({"query": "a", field: None}))
        assert chosen.request_type is voyage.VoyageRerankRequest
    assert (
        ROUTES_BY_PATH["/v1/embeddings"].choose(b'{"input": "top_k", "model": "m"}') is ROUTES_BY_PATH["/v1/embeddings"].default
    )


# A server


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchanges]:
    """Notes what the SDK sends and gets."""
    said = Exchanges()

    def note(response: requests.Response, *_: Any, **__: Any) -> None:
        body = response.request.body
        assert isinstance(body, bytes)
        said.note(response.request.path_url, body, response.status_code, response.content)

    with requests.Session() as session:
        session.hooks["response"].append(note)
        monkeypatch.setattr("voyageai.api_resources.api_requestor._make_session", lambda: session)
        yield said


@pytest.mark.extended
def test_the_sdk(small: Small, exchanges: Exchanges) -> None:
    client = voyageai.Client("any", base_url=f"{small.url}/v1")
    engine = small.engines["dense"]
    vectors = engine.embed(TEXTS)
    for kind in (None, *TYPES):
        answer = client.embed(TEXTS, model="dense", output_dtype=kind)
        assert is_read_back(kind or "float", np.array(answer.embeddings, np.float32), vectors)
        assert answer.total_tokens == engine.run(Request(TEXTS)).num_tokens
    for input_type in ("query", "document"):
        answer = client.embed(TEXTS, model="dense", input_type=input_type, output_dimension=16)
        found = engine.embed(TEXTS, prompt=input_type, dimensions=16)
        assert np.array_equal(np.array(answer.embeddings, np.float32), found)
    for name in ("dense", "late", "ranker"):
        ranking = client.rerank(QUERY, TEXTS, model=name, top_k=2)
        assert [(each.index, np.float32(each.relevance_score)) for each in ranking.results] == [
            (each.index, each.score) for each in small.engines[name].rerank(QUERY, TEXTS)[:2]
        ]
        assert ranking.results[0].document == TEXTS[ranking.results[0].index]
    long = "whimbrel " * 100
    assert np.array_equal(client.embed([long], model="dense").embeddings, engine.embed([long]).astype(float))
    for ask, kind, words in (
        (lambda: client.embed([], model="dense"), error.InvalidRequestError, "input: is an empty list"),
        (lambda: client.embed(["a"], model="x"), error.InvalidRequestError, "no model 'x'"),
        (lambda: client.embed(["a"], model="ranker"), error.InvalidRequestError, "model: this model gives no 'dense'"),
        (lambda: client.embed(["a"], model="dense", output_dimension=99), error.InvalidRequestError, "output_dimension: 99"),
        (lambda: client.embed(["a", long], model="dense", truncation=False), error.InvalidRequestError, "Pass truncation=true"),
        (lambda: client.rerank("", TEXTS, model="ranker"), error.InvalidRequestError, "query: is empty"),
        (lambda: client.rerank("a", [long], model="ranker", truncation=False), error.InvalidRequestError, "documents[0]: "),
        (lambda: client.rerank("a", TEXTS, model="classes"), error.InvalidRequestError, "3 scores"),
    ):
        with pytest.raises(kind) as caught:
            ask()
        assert words in str(caught.value)
    exchanges.check("voyage/sdk")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("embeddings", {"input": ["a"]}, 400, "name one of"), ("embeddings", {"model": "dense"}, 400, "input: is missing"),
        ("embeddings", {"input": ["a"] * 2049, "model": "dense"}, 400, "2,049"), ("rerank", {"model": "ranker"}, 400, "query: is missing"),
        ("embeddings", {"input": ["a"], "model": "late"}, 400, "model: "), ("embeddings", {"input": "a", "model": 3}, 400, "model: "),
        ("rerank", {"query": "a", "documents": ["b"] * 10_001, "model": "ranker"}, 400, "documents: 10,001"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_bad_bodies(small: Small, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = httpx2.post(f"{small.url}/v1/{path}", json=body | {"truncation": True})
    assert (answer.status_code, answer.json().keys()) == (status, {"detail"})
    assert words in answer.json()["detail"]
