"""Explanations: the best match of each token of a query, in the library, over HTTP and through processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import whimbrel.model.maxsim_scorer
from checkpoints.bge_m3 import write_m3
from checkpoints.encoders import write_bert
from checkpoints.late_interaction import write_stanford
from checkpoints.late_references import DOCUMENTS, QUERIES
from checkpoints.sentence_layout import sentence_layout
from exchanges import Small
from whimbrel import Engine
from whimbrel.errors import InvalidRequest
from whimbrel.model.ops.maxsim import best_matches
from whimbrel.model.ops.token_vectors import EMPTY
from whimbrel.types.request import Request

QUERY = QUERIES[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("late")
    write_stanford(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


def test_maxima_and_where_they_are(engine: Engine) -> None:
    query = engine.multi_vector(QUERY, input_type="query")[0]
    documents = engine.multi_vector(DOCUMENTS, input_type="document")
    scores = engine.score(QUERY, DOCUMENTS)
    found = engine.explain(QUERY, DOCUMENTS)
    assert len(found) == len(DOCUMENTS)
    for i, each in enumerate(found):
        similarities = query @ documents[i].T
        np.testing.assert_allclose(each.maxima_Q, similarities.max(axis=1), rtol=1e-5)
        np.testing.assert_array_equal(each.places_Q, similarities.argmax(axis=1))
        assert each.score == scores[i] == pytest.approx(each.maxima_Q.sum(), rel=1e-5)
        assert each.query_tokens is not None
        assert each.document_tokens is not None
        assert (len(each.query_tokens), len(each.document_tokens)) == (len(query), len(documents[i]))
    assert found[0].query_tokens is not None
    assert found[0].query_tokens[:2] == ("[CLS]", "[unused0]")
    assert found[0].query_tokens[-1] == "[MASK]"
    assert found[0].document_tokens is not None
    assert found[0].document_tokens[:2] == ("[CLS]", "[unused1]")
    assert not set("!?.,;") & set(found[2].document_tokens or ()), "skipped tokens have no vector"


def test_of_vectors(engine: Engine) -> None:
    """They have no tokens, and few bits mean the vectors that they stand for."""
    query = engine.multi_vector(QUERY, input_type="query")[0]
    rows = engine.multi_vector(DOCUMENTS[1], input_type="document")[0]
    bits = np.packbits(rows > 0, axis=1)
    given, packed, empty = engine.explain(query, [rows, bits, rows[:0]])
    assert (given.query_tokens, given.document_tokens) == (None, None)
    np.testing.assert_allclose(given.maxima_Q, (query @ rows.T).max(axis=1), rtol=1e-5)
    signs = np.where(rows > 0, 1, -1) / np.sqrt(rows.shape[1])
    np.testing.assert_allclose(packed.maxima_Q, (query @ signs.T).max(axis=1), rtol=1e-5)
    assert empty.score == EMPTY
    assert empty.maxima_Q.tolist() == [0.0] * len(query)
    assert empty.places_Q.tolist() == [-1] * len(query)
    assert engine.explain(QUERY, []) == []


def test_nothing_is_written_once_a_caller_has_left(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory may be another answer's then."""
    entered, left, over = threading.Event(), threading.Event(), threading.Event()

    def slowly(*args: Any) -> Any:
        entered.set()
        assert left.wait(10)
        found = best_matches(*args)
        over.set()
        return found

    monkeypatch.setattr(whimbrel.model.maxsim_scorer, "best_matches", slowly)
    prepared = engine.preprocessor.preprocess(Request([(QUERY, DOCUMENTS[0])], ("scores",), explain=True))
    memory = np.full(prepared.response.num_bytes, 7, np.uint8)
    future = engine.submit_tokenized(prepared, out=memory)
    assert entered.wait(10)
    assert future.cancel()
    left.set()
    assert over.wait(10)
    assert engine.explain(QUERY, DOCUMENTS[:1]), "what ran before has ended"
    assert (memory == 7).all()


def test_over_http(small: Small) -> None:
    with httpx2.Client(base_url=small.url, timeout=60) as client:
        body: dict[str, Any] = {"model": "late", "truncate": True, "explain": True}
        expected = small.engines["late"].explain(QUERY, DOCUMENTS)
        reranked = client.post("/v1/rerank", json=body | {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json()["results"]
        assert len(reranked) == 2
        scored = client.post("/v1/score", json=body | {"queries": QUERY, "documents": DOCUMENTS}).json()["data"]
        for each in (*reranked, *scored):
            told, meant = each["explanation"], expected[each["index"]]
            assert tuple(told["query_tokens"]) == meant.query_tokens
            assert tuple(told["document_tokens"]) == meant.document_tokens
            np.testing.assert_array_equal(np.array(told["maxima"], np.float32), meant.maxima_Q)
            assert told["places"] == meant.places_Q.tolist()
        plain = client.post("/v1/rerank", json={"model": "late", "query": QUERY, "documents": ["a"]}).json()["results"][0]
        assert "explanation" not in plain


def test_what_has_no_explanation(tmp_path: Path) -> None:
    (tmp_path / "dense").mkdir()
    write_bert(tmp_path / "dense")
    sentence_layout(tmp_path / "dense", modes=("mean",), heads=())
    with Engine(str(tmp_path / "dense")) as dense, pytest.raises(InvalidRequest, match=r"explain: .* these are by dense"):
        dense.explain("a", ["b"])
    (tmp_path / "m3").mkdir()
    write_m3(tmp_path / "m3")
    with Engine(str(tmp_path / "m3"), dtype="float32") as m3:
        with pytest.raises(InvalidRequest, match=r"explain: .* these are by sparse"):
            m3.explain("a", ["b"], score_by="sparse")
        found = m3.explain("far away", ["a", "far"], score_by="multi_vector")
        np.testing.assert_allclose([each.maxima_Q.mean() for each in found], [each.score for each in found], rtol=1e-5)


def test_a_request_for_vectors_has_no_pairs() -> None:
    with Engine() as engine, pytest.raises(InvalidRequest, match="explain: is for pairs"):
        engine.run(Request(["a"], ("dense",), explain=True))
