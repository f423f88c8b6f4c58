"""Jina's embeddings and multi-vector APIs: every field, every way a body can be wrong, and a server of its kinds of models."""

from __future__ import annotations

from typing import Any

import httpx2
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.jina_v3 import TASKS
from dialect_results import QUERY, TEXTS, as_floats, dense_result, fake_model
from exchanges import Exchanges, Small
from fake_embedder import asked
from vectors import is_read_back, vectors
from whimbrel.dialects import jina, openai
from whimbrel.errors import InvalidRequest
from whimbrel.server.app.routing import ROUTES_BY_PATH
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Ragged, Result, Timings

TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def read(*prompts: str, **body: Any) -> Request:
    return jina.parse_embeddings(orjson.dumps({"input": "a"} | body)).request(fake_model(*prompts))


def parse_multi_vector(**body: Any) -> Request:
    return jina.parse_multi_vector(orjson.dumps({"input": "a"} | body)).request(fake_model())


def test_every_field() -> None:
    body = {"dimensions": 8, "normalized": False, "truncate": True, "late_chunking": True, "model": "m", "new": 1}
    assert read(**body) == Request(["a"], ("dense",), dimensions=8, normalize=False, late_chunking=True, split_long=False)
    assert read() == Request(["a"], ("dense",), truncate="never"), "what is too long is an error"
    assert read(**dict.fromkeys(jina.JinaEmbeddingsRequest.__struct_fields__) | {"input": "a"}) == read()
    assert read(return_multivector=True).outputs == ("multi_vector",)
    assert read(input=[{"text": "a"}, {"text": "b"}, "c"]).texts == ["a", "b", "c"]
    assert parse_multi_vector() == Request(["a"], ("multi_vector",), truncate="never", input_type="document")
    assert parse_multi_vector(input_type="query", dimensions=8, embedding_type="binary") == Request(
        ["a"], ("multi_vector",), truncate="never", input_type="query", dimensions=8
    )
    assert parse_multi_vector(task="retrieval.query").input_type == "query"


@pytest.mark.parametrize(
    ("task", "prompts", "expected"),
    [
        ("retrieval.query", (), (None, "query")), ("retrieval.passage", ("query",), (None, "document")),
        ("retrieval.query", ("retrieval.query",), ("retrieval.query", "query")), ("code.query", (), (None, "query")),
        ("text-matching", (), (None, None)), ("classification", ("Classification",), ("Classification", None)),
        ("STS", ("STS",), ("STS", None)), ("separation", ("STS",), (None, None)),
    ],
)  # fmt: skip
def test_tasks(task: str, prompts: tuple[str, ...], expected: tuple[str | None, str | None]) -> None:
    request = read(*prompts, task=task)
    assert (request.prompt_name, request.input_type) == expected


def test_what_the_body_says_itself_comes_first() -> None:
    assert read("query", task="retrieval.query", prompt="find: ") == Request(
        ["a"], ("dense",), prompt="find: ", input_type="query", truncate="never"
    )
    assert read(task="retrieval.query", input_type="passage").input_type == "document"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"task": "search"}, "task"), ({"input": [{"image": "data:"}]}, "input[0]"), ({"input": []}, "input"), ({"input": [{}]}, "input[0]"),
        ({"embedding_type": "int4"}, "embedding_type"), ({"embedding_type": ["float", "x"]}, "embedding_type[1]"),
        ({"embedding_type": "ubinary", "dimensions": 12}, "embedding_type"), ({"normalized": 1}, "normalized"), ({"task": 3}, "task"),
        ({"input": ["a", 3]}, "input[1]"), ({"input": [{"text": "a"}, 3]}, "input[1]"), ({"input": ["a"] * 2049}, "input"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**body)
    told = orjson.loads(jina.ROUTES[0].render_error(caught.value))
    assert told.keys() == {"detail"}
    assert told["detail"].startswith(f"{param}: ")


@given(vectors(3, 16), st.one_of(st.none(), st.sampled_from(TYPES), st.lists(st.sampled_from(TYPES), unique=True)))
def test_what_is_written_reads_back(rows: np.ndarray, kinds: Any) -> None:
    body = jina.parse_embeddings(orjson.dumps({"input": TEXTS, "embedding_type": kinds})).body
    found = orjson.loads(jina.render_embeddings(body, dense_result(rows), fake_model()))
    assert (found["model"], found["usage"]) == ("m", {"prompt_tokens": 7, "total_tokens": 7})
    assert [(each["object"], each["index"]) for each in found["data"]] == [("embedding", i) for i in range(3)]
    names = [kinds] if isinstance(kinds, str) else kinds or ["float"]
    for name in names:
        column = [each["embedding"][name] if len(names) > 1 else each["embedding"] for each in found["data"]]
        assert is_read_back(name, as_floats(name, column), rows)


@given(vectors(3, 16), st.sampled_from(TYPES), st.booleans())
def test_token_vectors_read_back(rows: np.ndarray, kind: str, several: bool) -> None:
    body = jina.parse_multi_vector(orjson.dumps({"input": TEXTS, "embedding_type": [kind, "float"] if several else kind})).body
    texts = Ragged(rows, np.array([0, 2, 3]))
    found = orjson.loads(jina.render_embeddings(body, Result(Outputs(multi_vector=texts), 7, 0, Timings()), fake_model()))
    assert [each["object"] for each in found["data"]] == ["embeddings", "embeddings"]
    for text, each in zip(texts, found["data"], strict=True):
        told = each["embeddings"][kind] if several and kind != "float" else each["embeddings"]
        assert is_read_back(kind, as_floats(kind, told), text)


def test_which_bodies_are_jina_s() -> None:
    ways = ROUTES_BY_PATH["/v1/embeddings"]
    for field in ("task", "embedding_type", "encoding_type", "normalized", "return_multivector"):
        assert ways.choose(orjson.dumps({"input": "a", field: None})).request_type is jina.JinaEmbeddingsRequest
    assert ways.choose(b'{"input": "task", "late_chunking": true}') is ways.default, "which does it as well"


def test_the_default_of_the_path_takes_objects_and_input_types() -> None:
    body = {"input": [{"text": "a"}, "b"], "input_type": "passage"}
    assert asked(openai.parse_request(orjson.dumps(body))) == Request(["a", "b"], ("dense",), input_type="document")
    with pytest.raises(InvalidRequest, match=r"input\[0\]: .* no images"):
        openai.parse_request(b'{"input": [{"image": "data:"}]}')


# A server


@pytest.mark.extended
def test_a_server(small: Small) -> None:
    exchanges = Exchanges()
    with httpx2.Client(base_url=small.url, timeout=60) as client:

        def ask(path: str = "/v1/embeddings", **body: Any) -> Any:
            body = {"model": "dense", "input": TEXTS} | body
            answer = client.post(path, json=body)
            exchanges.note(path, orjson.dumps(body), answer.status_code, answer.content)
            return answer.raise_for_status().json()

        def vectors(**body: Any) -> Any:
            return np.array([each["embedding"] for each in ask(**body)["data"]], np.float32)

        dense, adapted = small.engines["dense"], small.engines["jina"]
        for task in TASKS:
            assert np.array_equal(vectors(model="jina", task=task), adapted.embed(TEXTS, prompt=task))
        for task, prompt in (("retrieval.query", "query"), ("classification", "Classification"), ("separation", None)):
            assert np.array_equal(vectors(task=task), dense.embed(TEXTS, prompt=prompt))
        for kind in TYPES:
            found = [each["embedding"] for each in ask(embedding_type=kind)["data"]]
            assert is_read_back(kind, as_floats(kind, found), dense.embed(TEXTS))
        late = {"normalized": True, "late_chunking": True, "input": [{"text": text} for text in TEXTS]}
        assert np.array_equal(vectors(**late), dense.embed(TEXTS, late_chunking=True))
        assert np.array_equal(vectors(normalized=False, dimensions=16), dense.embed(TEXTS, normalize=False, dimensions=16))
        encode = small.engines["late"].multi_vector
        for body, input_type in (({}, "document"), ({"input_type": "query"}, "query")):
            tokens = encode(TEXTS, input_type=input_type)
            for found in (
                ask("/v1/multi-vector", model="late", truncate=True, **body),
                ask(model="late", return_multivector=True, truncate=True, **({"input_type": "document"} | body)),
            ):
                rows = [np.array(each["embeddings"], np.float32) for each in found["data"]]
                assert all(np.array_equal(row, expected) for row, expected in zip(rows, tokens, strict=True))
        ranking = ask(
            "/v1/rerank", model="ranker", query={"text": QUERY}, documents=[{"text": text} for text in TEXTS], top_n=2
        )
        assert [(each["index"], np.float32(each["relevance_score"])) for each in ranking["results"]] == [
            (each.index, each.score) for each in small.engines["ranker"].rerank(QUERY, TEXTS)[:2]
        ]
        assert ranking["results"][0]["document"]["text"] == TEXTS[ranking["results"][0]["index"]]
    exchanges.check("jina/http")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("embeddings", {"input": ["a"]}, 400, "name one of"), ("embeddings", {"model": "dense"}, 400, "input: is missing"),
        ("embeddings", {"input": "a", "model": "x"}, 400, "no model 'x'"), ("embeddings", {"input": [], "model": "dense"}, 400, "input: "),
        ("embeddings", {"input": "a", "model": "ranker"}, 400, "model: "), ("multi-vector", {"input": "a", "model": "dense"}, 400, "model: "),
        ("embeddings", {"input": "a", "model": "dense", "task": "find"}, 400, "task: 'find' is no prompt of this model"),
        ("embeddings", {"input": ["a", "bird " * 300], "model": "dense"}, 400, "input[1]: "), ("multi-vector", {"input": 3}, 400, "input: "),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_bad_bodies(small: Small, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = httpx2.post(f"{small.url}/v1/{path}", json={"embedding_type": None} | body)
    assert (answer.status_code, answer.json().keys()) == (status, {"detail"})
    assert words in answer.json()["detail"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"input": "\\ud800"}'])
def test_bodies_that_cannot_be_read(small: Small, body: bytes) -> None:
    answer = httpx2.post(f"{small.url}/v1/multi-vector", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json().keys()) == (400, {"detail"})
