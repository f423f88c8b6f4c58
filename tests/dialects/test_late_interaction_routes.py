"""Late interaction on vLLM's and TEI's routes: the side that is not said, and the lengths at which texts are cut.

The library's own verbs, which other tests compare with PyLate, are the reference.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from asgi import call
from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.late_interaction import write_stanford
from whimbrel import AsyncEngine, Engine
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.types.request import Request

LONG = "the whimbrel is a wader with a long curved bill " * 20
SHORT = "a wader"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    root = tmp_path_factory.mktemp("models")
    with ExitStack() as stack:
        found: dict[str, Engine] = {}
        for name, write in {"colbert": write_stanford, "m3": write_m3}.items():
            torch.manual_seed(7)
            write(root / name)
            found[name] = stack.enter_context(Engine(str(root / name), dtype="float32"))
        yield found


def post(engine: Engine, path: str, **body: Any) -> tuple[int, Any, int]:
    """Status, answer and the number of texts that were cut."""
    app = create_app(ModelRegistry(AsyncEngine(engine)))
    answer = asyncio.run(call(app, "POST", path, body=orjson.dumps(body), headers={"content_type": "application/json"}))
    return answer.status, orjson.loads(answer.body), int(answer.headers.get("x-whimbrel-truncated", -1))


@pytest.mark.parametrize(("path", "field"), [("/pooling", "input"), ("/embed_all", "inputs"), ("/", "inputs")])
def test_texts_whose_side_is_not_said_are_documents(path: str, field: str, engines: dict[str, Engine]) -> None:
    """Token vectors without a side are those of documents, which are cut to the model's length of documents."""
    engine, texts = engines["colbert"], [SHORT, LONG]
    expected = engine.multi_vector(texts, input_type="document")
    more = {"task": "token_embed"} if path == "/pooling" else {}
    status, found, num_cut = post(engine, path, **{field: texts}, **more)
    rows = [each["data"] for each in found["data"]] if path == "/pooling" else found
    assert (status, num_cut) == (200, 1)
    for index, row in enumerate(rows):
        np.testing.assert_array_equal(np.array(row, np.float32), expected[index])
    status, found, num_cut = post(engine, path, **{field: texts}, **more, input_type="query")
    rows = [each["data"] for each in found["data"]] if path == "/pooling" else found
    np.testing.assert_array_equal(np.array(rows[0], np.float32), engine.multi_vector([SHORT], input_type="query")[0])
    assert (status, num_cut) == (200, 1)


@pytest.mark.parametrize("path", ["/pooling", "/embed_all"])
def test_a_model_that_treats_both_sides_alike_needs_none(path: str, engines: dict[str, Engine]) -> None:
    """A model without formats gives the same token vectors whatever the side."""
    engine = engines["m3"]
    more = {"task": "token_embed", "input": [SHORT]} if path == "/pooling" else {"inputs": [SHORT]}
    status, found, _ = post(engine, path, **more)
    row = found["data"][0]["data"] if path == "/pooling" else found[0]
    np.testing.assert_array_equal(np.array(row, np.float32), engine.multi_vector([SHORT])[0])
    assert status == 200


@pytest.mark.parametrize("path", ["/rerank", "/score", "/v1/rerank", "/v1/score", "/v2/rerank", "tei"])
def test_long_queries_and_documents_are_cut_to_their_lengths(path: str, engines: dict[str, Engine]) -> None:
    """Pairs of a ColBERT are cut as its library cuts them, and the header says how many texts were."""
    engine, documents = engines["colbert"], [SHORT, LONG, "a sandwich"]
    expected = engine.score(LONG, documents)
    if path == "tei":
        status, found, num_cut = post(engine, "/rerank", query=LONG, texts=documents)
        scores = {each["index"]: each["score"] for each in found}
    elif "score" in path:
        status, found, num_cut = post(engine, path, queries=LONG, documents=documents)
        scores = {each["index"]: each["score"] for each in found["data"]}
    else:
        status, found, num_cut = post(engine, path, query=LONG, documents=documents)
        scores = {each["index"]: each["relevance_score"] for each in found["results"]}
    assert (status, num_cut) == (200, 2)
    np.testing.assert_array_equal(np.array([scores[i] for i in range(3)], np.float32), expected)


def test_limits_of_a_request(engines: dict[str, Engine]) -> None:
    """A limit of tokens is one of documents where queries have a fixed length; texts may still be kept from being cut."""
    engine, documents = engines["colbert"], [SHORT, LONG]
    status, found, num_cut = post(engine, "/score", queries=SHORT, documents=documents, truncate_prompt_tokens=11)
    assert (status, num_cut) == (200, 1)
    _, pooled, _ = post(engine, "/pooling", task="token_embed", input=documents, truncate_prompt_tokens=11)
    query_TD = engine.multi_vector([SHORT], input_type="query")[0]
    expected = [(query_TD @ np.array(each["data"], np.float32).T).max(axis=1).sum() for each in pooled["data"]]
    np.testing.assert_allclose([each["score"] for each in found["data"]], expected, rtol=1e-5)
    for body in ({"truncate": False}, {"truncate": "never"}):
        status, found, _ = post(engine, "/score", queries=SHORT, documents=documents, **body)
        assert (status, "limit is" in found["error"]["message"]) == (400, True)
    status, found, _ = post(engine, "/score", queries=LONG, documents=[SHORT], truncation_side="left")
    assert status == 200
    assert found["data"][0]["score"] == np.float32(engine.score(LONG, [SHORT], truncate="left")[0])


def test_texts_that_limits_of_a_side_cut_are_counted(engines: dict[str, Engine], tmp_path: Path) -> None:
    """Each query or document that its own limit cuts counts once, also if the pair is cut again, and so in the library."""
    torch.manual_seed(7)
    write_classifier(tmp_path, "bert", num_labels=1)
    documents = [LONG, SHORT, LONG + "a", LONG]
    with Engine(str(tmp_path), dtype="float32") as ranker:
        for engine, more, expected in (
            (ranker, {"max_tokens_per_doc": 3}, 2),
            (ranker, {"max_tokens_per_doc": 3, "max_tokens_per_query": 3}, 3),
            (ranker, {"max_tokens_per_doc": 60, "truncate": True}, 2),
            (ranker, {"max_tokens_per_query": 3, "truncate": True}, 3),
            (ranker, {"max_tokens_per_doc": 500}, 0),
            (engines["colbert"], {"max_tokens_per_query": 5}, 3),
            (engines["colbert"], {"max_tokens_per_doc": 5}, 3),
            (engines["colbert"], {"max_tokens_per_doc": 100}, 3),
            (engines["m3"], {"max_tokens_per_doc": 20, "max_tokens_per_query": 20}, 3),
        ):
            asked = documents if expected else [SHORT]
            query = LONG if engine is not ranker or "max_tokens_per_query" in more else SHORT
            status, _, num_cut = post(engine, "/score", queries=query, documents=asked, **more)
            assert (status, num_cut) == (200, expected), more
        result = ranker.run(Request([(SHORT, text) for text in documents], ("scores",), max_document_tokens=3))
        assert result.num_truncated == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ranker.score(SHORT, documents, max_document_tokens=3)  # the call asks for it
        status, _, num_cut = post(ranker, "/v2/rerank", query=SHORT, documents=documents, max_tokens_per_doc=3)
        assert (status, num_cut) == (200, 2)
