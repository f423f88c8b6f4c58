"""Queries and documents that are each cut to a number of tokens of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from checkpoints.classifiers import write_classifier
from checkpoints.late_interaction import write_stanford
from serving import Server
from whimbrel import Client, Engine
from whimbrel.errors import InvalidRequest, TooLarge
from whimbrel.types.request import Request

QUERY = "where do whimbrels spend the winter months, and why?"
DOCUMENTS = [
    "",
    "Whimbrels",
    "Curlews winter in West-Africa; çà et là, unbelievably naïve 東京 birds.",
    "one two three four five " * 9,
]


@pytest.fixture(scope="module", params=["pairs", "dense", "late"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> Path:
    """A cross-encoder, and models whose vectors are compared."""
    if request.param == "dense":
        return minilm
    made = tmp_path_factory.mktemp(request.param)
    if request.param == "pairs":
        write_classifier(made, "bert", num_labels=1)
    else:
        write_stanford(made)
    return made


@pytest.fixture(scope="module")
def engine32(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


def cut(folder: Path, text: str, limit: int) -> str:
    """Cut a text after `limit` tokens of transformers' tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text if len(ends) <= limit else text[: ends[limit - 1][1]]


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_scores_are_those_of_the_texts_that_are_left(limit: int, folder: Path, engine32: Engine) -> None:
    query, documents = cut(folder, QUERY, limit), [cut(folder, text, limit) for text in DOCUMENTS]
    assert documents != DOCUMENTS
    for options, expected in (
        ({"max_document_tokens": limit}, engine32.score(QUERY, documents)),
        ({"max_query_tokens": limit}, engine32.score(query, DOCUMENTS)),
        ({"max_query_tokens": limit, "max_document_tokens": limit}, engine32.score(query, documents)),
        ({"max_query_tokens": 999, "max_document_tokens": None}, engine32.score(QUERY, DOCUMENTS)),
    ):
        assert np.array_equal(engine32.score(QUERY, DOCUMENTS, **options), expected), options
    assert not np.array_equal(engine32.score(QUERY, documents), engine32.score(QUERY, DOCUMENTS))


@pytest.mark.sample(1)
def test_over_http_and_in_other_dialects(folder: Path, engine32: Engine) -> None:
    expected = engine32.rerank(QUERY, DOCUMENTS, max_query_tokens=3, max_document_tokens=4)
    documents_cut = engine32.rerank(QUERY, DOCUMENTS, max_document_tokens=4)
    with Server(str(folder), "--dtype", "float32") as server:
        with Client(server.url) as client:
            assert client.rerank(QUERY, DOCUMENTS, max_query_tokens=3, max_document_tokens=4) == expected
            assert client.score(QUERY, DOCUMENTS, max_document_tokens=4).tolist() == [
                each.score for each in sorted(documents_cut, key=lambda each: each.index)
            ]
        with Client(server.url, dialect="cohere") as client:
            assert client.rerank(QUERY, DOCUMENTS, max_document_tokens=4) == documents_cut


def test_vectors_that_stand_for_texts_stay(engine: Engine) -> None:
    vectors = engine.embed(DOCUMENTS)
    assert np.array_equal(engine.score(QUERY, vectors, max_document_tokens=1), engine.score(QUERY, vectors))


@pytest.mark.parametrize(
    ("texts", "fields", "param"),
    [
        (["a"], {"max_document_tokens": 3}, "max_document_tokens"),
        ([("a", "b"), ("a",)], {"max_query_tokens": 3}, "max_query_tokens"),
        ([("a", "b"), ("c", "\ud800")], {"max_document_tokens": 3}, "input[1][1]"),
        ([("\ud800", "b")], {"max_query_tokens": 3, "max_document_tokens": 3}, "input[0][0]"),
        ([("a", "b"), ("c", 5)], {"max_document_tokens": 3}, "input[1]"),
    ],
)
def test_what_cannot_be_cut(texts: Any, fields: Any, param: str, engine: Engine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.run(Request(texts, ("scores",), **fields))
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


def test_a_text_that_is_too_long_to_be_cut(engine: Engine) -> None:
    with pytest.raises(TooLarge, match=r"documents\[1\]"):
        engine.score("a", ["b", "c " * 2**20], max_document_tokens=3)


@pytest.mark.parametrize("given", [0, -1, True, 2.5, "3"])
def test_limits_that_are_none(given: Any) -> None:
    for name in ("max_query_tokens", "max_document_tokens"):
        with pytest.raises(InvalidRequest) as caught:
            Request([("a", "b")], ("scores",), **{name: given})
        assert caught.value.param == name
        for dialect in ("whimbrel", "cohere"):  # which are not asked: a server would take 0 for none
            with pytest.raises(InvalidRequest) as caught:
                Client("http://127.0.0.1:9", dialect=dialect, max_retries=0).rerank("a", ["b"], **{name: given})
            assert caught.value.param == name
