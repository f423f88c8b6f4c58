"""Cohere's embed and rerank: every field, every way a body can be wrong, and Cohere's SDK (cohere 7.3.1) against a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import cohere
import httpx
import httpx2
import numpy as np
import orjson
import pytest
from cohere.core.api_error import ApiError
from hypothesis import given
from hypothesis import strategies as st

from asgi import call
from dialect_results import QUERY, TEXTS, as_floats, dense_result, fake_model, ranked_result
from exchanges import Exchanges, Small
from fake_embedder import FakeEmbedder, FakeModel, asked
from vectors import is_read_back, vectors
from whimbrel.dialects import cohere as dialect
from whimbrel.errors import Hint, InvalidRequest, Location, TooLarge, TooLong
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.routing import AsyncEmbedder, ModelRegistry
from whimbrel.types.request import Request

TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
JSON = {"content-type": "application/json"}


def read(body: dict[str, Any], served: FakeModel | None = None) -> Request:
    return dialect.parse_embed(orjson.dumps(body)).request(served or fake_model())


# Embed


def test_every_field_of_embed() -> None:
    body = {"texts": ["a"], "model": "m", "output_dimension": 8, "max_tokens": 9, "truncate": "NONE", "priority": 3, "new": 1}
    assert read(body) == Request(["a"], ("dense",), dimensions=8, max_tokens=9, truncate="never")
    assert read({"texts": ["a"]}) == Request(["a"], ("dense",), truncate="right")
    assert read(dict.fromkeys(dialect.CohereEmbedRequest.__struct_fields__) | {"texts": ["a"]}) == read({"texts": ["a"]})
    assert read({"texts": ["a"], "truncate": "START"}).truncate == "left"
    assert read({"texts": ["a"], "max_tokens": 10_000}).max_tokens == 256, "the model's own limit holds as well"
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    assert read({"inputs": inputs}).texts == read({"texts": TEXTS}).texts == TEXTS


@pytest.mark.parametrize(
    ("word", "prompts", "expected"),
    [
        ("search_query", (), (None, "query")), ("search_document", ("query",), (None, "document")), (None, ("query",), (None, None)),
        ("search_query", ("search_query",), ("search_query", "query")), ("classification", (), (None, None)),
        ("classification", ("Classification",), ("Classification", None)), ("clustering", ("classification",), (None, None)),
        ("query", ("query",), ("query", None)),
    ],
)  # fmt: skip
def test_what_texts_are_for(word: str | None, prompts: tuple[str, ...], expected: tuple[str | None, str | None]) -> None:
    request = read({"texts": ["a"], "input_type": word}, fake_model(*prompts))
    assert (request.prompt_name, request.input_type) == expected


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"), ({"texts": []}, "texts"), ({"texts": "a"}, "texts"), ({"texts": ["a", 3]}, "texts[1]"), ({"inputs": []}, "inputs"),
        ({"texts": ["a"], "inputs": []}, "inputs"), ({"images": ["data:"]}, "images"), ({"texts": ["a"], "input_type": "image"}, "input_type"),
        ({"inputs": [{"content": [IMAGE]}]}, "inputs[0].content[0]"), ({"inputs": [{"content": []}]}, "inputs[0].content"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}] * 2}]}, "inputs[0].content"), ({"inputs": ["a"]}, "inputs[0]"),
        ({"texts": ["a"], "embedding_types": ["float", "int4"]}, "embedding_types[1]"), ({"texts": ["a"], "truncate": "end"}, "truncate"),
        ({"texts": ["a"], "embedding_types": "float"}, "embedding_types"), ({"texts": ["a"], "input_type": "query"}, "input_type"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"), ({"texts": ["a"], "output_dimension": "8"}, "output_dimension"),
        ({"texts": ["a"], "priority": 2**31}, "priority"), ({"texts": ["a"] * 2049}, "texts"),
        ({"texts": ["a"], "output_dimension": 12, "embedding_types": ["float", "binary"]}, "embedding_types"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.param == param
    assert isinstance(caught.value, TooLarge) == (len(body.get("texts") or "") > 2048)
    told = orjson.loads(dialect.render_error(caught.value))
    assert told.keys() == {"message"}
    assert told["message"].startswith("texts: " if param == "input" else f"{param}: ")


@given(vectors(3, 16), st.lists(st.sampled_from(TYPES), unique=True))
def test_what_is_written_reads_back(rows: np.ndarray, types: list[str]) -> None:
    body = dialect.parse_embed(orjson.dumps({"texts": TEXTS, "embedding_types": types})).body
    found = orjson.loads(dialect.render_embed(body, dense_result(rows), fake_model()))
    assert (found["texts"], found["response_type"]) == (TEXTS, "embeddings_by_type")
    assert found["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 7, "image_tokens": 0}}
    assert set(found["embeddings"]) == set(types or ["float"])
    for kind, numbers in found["embeddings"].items():
        assert is_read_back(kind, as_floats(kind, numbers), rows)


def test_version_1_gives_bare_vectors_where_no_types_are_asked_for() -> None:
    body = dialect.parse_embed(orjson.dumps({"texts": ["a"]})).body
    found = orjson.loads(dialect.render_embed(body, dense_result([[1, 2]]), fake_model(), version="1"))
    assert (found["embeddings"], found["response_type"], found["texts"]) == ([[1, 2]], "embeddings_floats", ["a"])
    assert found["meta"]["api_version"] == {"version": "1"}


def test_errors_are_in_the_words_of_the_api() -> None:
    error = TooLong("has 9 tokens.", item=3, hint=Hint.TRUNCATE)
    assert orjson.loads(dialect.render_error(error)) == {"message": 'texts[3]: has 9 tokens. Pass truncate="END" to cut it.'}
    for ours, theirs in (("dimensions", "output_dimension"), ("outputs", "model"), ("max_tokens", "max_tokens")):
        told = orjson.loads(dialect.render_error(InvalidRequest("is wrong.", param=ours)))
        assert told == {"message": f"{theirs}: is wrong."}


# Rerank


def parse_rerank(body: dict[str, Any]) -> Request:
    return asked(dialect.parse_rerank(orjson.dumps({"query": "q", "documents": ["a"]} | body)))


def test_every_field_of_rerank() -> None:
    assert parse_rerank({}) == Request([("q", "a")], ("scores",), listwise=True)
    assert parse_rerank({"model": "m", "top_n": 3, "priority": 4}) == Request([("q", "a")], ("scores",), listwise=True)
    nulls = dict.fromkeys(dialect.CohereRerankRequest.__struct_fields__) | {"query": "q", "documents": ["a"]}
    assert parse_rerank(nulls) == parse_rerank({"relevant_spans": {"mode": "disabled"}}) == parse_rerank({})
    assert parse_rerank({"max_tokens_per_doc": 0}) == parse_rerank({})
    assert parse_rerank({"max_tokens_per_doc": 9}) == Request([("q", "a")], ("scores",), listwise=True, max_document_tokens=9)
    assert parse_rerank({"max_tokens_per_doc": 9, "truncate": "left"}).truncate == "left"


def test_every_field_of_version_1() -> None:
    def read(**more: Any) -> Request:
        return asked(dialect.parse_rerank_v1(orjson.dumps({"query": "q", "documents": [{"text": "a", "title": "t"}]} | more)))

    assert (
        read(rank_fields=["text"])
        == read(max_chunks_per_doc=10)
        == Request([("q", "a")], ("scores",), listwise=True, truncate="never")
    )
    assert read(max_chunks_per_doc=1) == Request([("q", "a")], ("scores",), listwise=True)
    with pytest.raises(InvalidRequest) as caught:
        read(rank_fields=["title", "text"])
    assert caught.value.param == "rank_fields"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": ""}, "query"), ({"documents": []}, "documents"), ({"documents": "a"}, "documents"), ({"top_n": -1}, "top_n"),
        ({"documents": ["a", 3]}, "documents[1]"), ({"relevant_spans": {"mode": "enabled"}}, "relevant_spans"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc"), ({"documents": ["a"] * 10_001}, "documents"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_rerank_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_rerank(body)
    assert orjson.loads(dialect.ROUTES[2].render_error(caught.value))["message"].startswith(f"{param}: ")


def test_the_best_come_first() -> None:
    body = dialect.parse_rerank(b'{"query": "q", "documents": ["a", "b", "c"], "top_n": 2}').body
    found = orjson.loads(dialect.render_rerank(body, ranked_result(0.5, 2, 0.5), fake_model()))
    assert found["results"] == [{"index": 1, "relevance_score": 2.0}, {"index": 0, "relevance_score": 0.5}]
    assert found["meta"] == {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    body = dialect.parse_rerank_v1(b'{"query": "q", "documents": ["a"], "return_documents": true}').body
    found = orjson.loads(dialect.render_rerank(body, ranked_result(1), fake_model(), version="1"))
    assert found["results"] == [{"index": 0, "relevance_score": 1.0, "document": {"text": "a"}}]
    assert found["meta"]["api_version"] == {"version": "1"}


def test_errors_name_the_documents() -> None:
    (route,) = (route for route in dialect.ROUTES if route.path == "/v2/rerank")
    for ours, theirs in (
        (Location("input", 3, 1), "documents[3]"),
        (Location("input", 3, 0), "query"),
        (Location("max_document_tokens"), "max_tokens_per_doc"),
    ):
        told = orjson.loads(route.render_error(InvalidRequest("is wrong.", location=ours)))
        assert told == {"message": f"{theirs}: is wrong."}


# A server


@pytest.fixture
def exchanges() -> Exchanges:
    return Exchanges()


@pytest.fixture
def http(exchanges: Exchanges) -> Iterator[httpx.Client]:
    """The HTTP client of the SDK, which notes each exchange."""
    with httpx.Client(event_hooks={"response": [exchanges.hook]}, timeout=60) as client:
        yield client


def check_types(found: Any, rows: np.ndarray) -> None:
    """Vectors in all types, bit for bit."""
    for kind in TYPES:
        numbers = getattr(found, "float_" if kind == "float" else kind)
        assert is_read_back(kind, as_floats(kind, numbers), rows)


def test_the_sdk_of_version_2(small: Small, http: httpx.Client, exchanges: Exchanges) -> None:
    client = cohere.ClientV2("any", base_url=small.url, httpx_client=http)
    engine = small.engines["dense"]
    ways: dict[Any, dict[str, Any]] = {
        "search_query": {"prompt": "query"},
        "search_document": {"prompt": "document"},
        "classification": {"prompt": "Classification"},
        "clustering": {},
    }
    for word, way in ways.items():
        answer = client.embed(model="dense", input_type=word, texts=TEXTS, embedding_types=cast(Any, TYPES))
        check_types(answer.embeddings, engine.embed(TEXTS, **way))
    assert (answer.texts, answer.response_type) == (TEXTS, "embeddings_by_type")
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert answer.meta.billed_units.input_tokens == engine.run(Request(TEXTS)).num_tokens
    answer = client.embed(model="dense", input_type="clustering", texts=TEXTS, output_dimension=16, max_tokens=4, priority=1)
    assert np.array_equal(as_floats("float", answer.embeddings.float_), engine.embed(TEXTS, dimensions=16, max_tokens=4))
    inputs = [cohere.EmbedInput(content=[cohere.TextEmbedContent(text=text)]) for text in TEXTS]
    answer = client.embed(model="dense", input_type="clustering", inputs=inputs)
    assert np.array_equal(as_floats("float", answer.embeddings.float_), engine.embed(TEXTS))
    for name in ("dense", "late", "ranker"):
        ranking = client.rerank(model=name, query=QUERY, documents=TEXTS, top_n=2, max_tokens_per_doc=4096, priority=2)
        assert [(each.index, np.float32(each.relevance_score)) for each in ranking.results] == [
            (each.index, each.score) for each in small.engines[name].rerank(QUERY, TEXTS)[:2]
        ]
    ranking = client.rerank(model="ranker", query=QUERY, documents=TEXTS, max_tokens_per_doc=2)
    assert [(each.index, np.float32(each.relevance_score)) for each in ranking.results] == [
        (each.index, each.score) for each in small.engines["ranker"].rerank(QUERY, TEXTS, max_document_tokens=2)
    ]
    long = "whimbrel " * 100
    cut = client.embed(model="dense", input_type="clustering", texts=[long], truncate="START")
    assert np.array_equal(as_floats("float", cut.embeddings.float_), engine.embed([long], truncate="left"))
    cut = client.embed(model="dense", input_type="clustering", texts=[long])
    assert np.array_equal(as_floats("float", cut.embeddings.float_), engine.embed([long], truncate="right"))
    for ask, error, words in (
        (lambda: client.embed(model="x", input_type="clustering", texts=TEXTS), cohere.NotFoundError, "no model 'x'"),
        (lambda: client.embed(model="dense", input_type="clustering", texts=[]), cohere.BadRequestError, "texts: "),
        (
            lambda: client.embed(model="dense", input_type="clustering", texts=["a", long], truncate="NONE"),
            cohere.BadRequestError,
            'the limit is 40. Pass truncate="END" to cut it.',
        ),
        (lambda: client.embed(model="dense", input_type="image", images=["data:"]), cohere.BadRequestError, "no images"),
        (lambda: client.embed(model="ranker", input_type="clustering", texts=["a"]), cohere.BadRequestError, "no 'dense'"),
        (lambda: client.rerank(model="classes", query="a", documents=["b"]), cohere.BadRequestError, "3 scores"),
        (lambda: client.rerank(model="ranker", query="", documents=["b"]), cohere.BadRequestError, "query: is empty"),
    ):
        refused(ask, error, words)
    exchanges.check("cohere/v2")


def refused(ask: Callable[[], Any], error: type[ApiError], words: str) -> None:
    with pytest.raises(error) as caught:
        ask()
    assert caught.value.body.keys() == {"message"}
    assert words in caught.value.body["message"]


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # the SDK's own
@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince211")
def test_the_sdk_of_version_1(small: Small, http: httpx.Client, exchanges: Exchanges) -> None:
    client = cohere.Client("any", base_url=small.url, httpx_client=http)
    engine = small.engines["dense"]
    answer = client.embed(model="dense", input_type="search_query", texts=TEXTS)
    assert np.array_equal(as_floats("float", answer.embeddings), engine.embed(TEXTS, prompt="query"))
    answer = client.embed(model="dense", input_type="search_query", texts=TEXTS, embedding_types=cast(Any, TYPES))
    check_types(answer.embeddings, engine.embed(TEXTS, prompt="query"))
    best = [(each.index, each.score) for each in engine.rerank(QUERY, TEXTS)]
    for more in ({}, {"return_documents": True}, {"max_chunks_per_doc": 1}, {"rank_fields": ["text"]}):
        found = client.rerank(model="dense", query=QUERY, documents=TEXTS, **more)
        assert [(each.index, np.float32(each.relevance_score)) for each in found.results] == best
    documents = [{"text": text} for text in TEXTS]
    found = client.rerank(model="dense", query=QUERY, documents=documents, return_documents=True)
    assert [each.document and each.document.text for each in found.results] == [TEXTS[index] for index, _ in best]
    refused(lambda: client.embed(model="x", texts=TEXTS), cohere.NotFoundError, "no model 'x'")
    refused(lambda: client.embed(model="dense", images=["data:"]), cohere.BadRequestError, "no images")
    more: Any = {"rank_fields": ["title"]}
    refused(lambda: client.rerank(model="dense", query="a", documents=["b"], **more), cohere.BadRequestError, "rank_fields")
    exchanges.check("cohere/v1")


def test_many_texts_through_the_sdk_s_threads(small: Small) -> None:
    """The SDK splits them and puts its answers together."""
    texts = [f"text {i} of birds" for i in range(300)]
    with cohere.Client("any", base_url=small.url) as client:
        found = client.embed(model="dense", input_type="classification", texts=texts)
    expected = small.engines["dense"].embed(texts, prompt="Classification")
    assert np.array_equal(as_floats("float", found.embeddings), expected)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "empty"), (b'{"texts": ["a"', 400, "not valid JSON"), (b"[]", 400, "Expected"), (b'{"texts": 3}', 400, "texts: "),
        (b'{"texts": ["a"]}', 400, "name one of"), (b'{"texts": [], "model": "dense"}', 400, "texts: is an empty list"),
        (b'{"texts": ["\\ud800"], "model": "dense"}', 400, "not valid"), (b'{"texts": [""], "model": "x"}', 404, "no model"),
        (orjson.dumps({"texts": ["a"] * 2049, "model": "dense"}), 413, "texts: 2,049 inputs"),
        (b'{"texts": ["a"], "model": "dense", "output_dimension": 99}', 400, "output_dimension: 99"),
        (b'{"texts": ["a"], "model": "late"}', 400, "model: this model gives no 'dense'"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_bad_bodies(small: Small, body: bytes, status: int, words: str) -> None:
    answer = httpx2.post(f"{small.url}/v2/embed", content=body, headers=JSON)
    assert answer.status_code == status
    assert answer.json().keys() == {"message"}
    assert words in answer.json()["message"]


@pytest.mark.parametrize("path", ["/v2/embed", "/v2/rerank"])
def test_errors_before_the_body(path: str) -> None:
    async def main() -> None:
        served = ModelRegistry(cast(AsyncEmbedder, FakeEmbedder()))
        app = create_app(served, guards=ServerLimits(api_keys=("key",)))
        key = {"authorization": "Bearer key"}
        for headers, status in (({}, 401), (key | {"content_type": "text/plain"}, 415)):
            told = await call(app, "POST", path, body=b"{}", headers=headers)
            assert (told.status, orjson.loads(told.body).keys()) == (status, {"message"})
        served.draining = True
        told = await call(app, "POST", path, body=b"{}", headers=key)
        assert (told.status, orjson.loads(told.body).keys()) == (503, {"message"})

    asyncio.run(main())


def test_a_body_of_our_own_is_none_of_cohere_s(small: Small) -> None:
    own = httpx2.post(f"{small.url}/v1/embed", json={"model": "dense", "input": "a"})
    assert own.json()["outputs"].keys() == {"dense"}
    assert "error" in httpx2.post(f"{small.url}/v1/embed", json={"model": "dense", "text": "a"}).json()
