"""The document cache: the same scores, without computing documents again, within a number of bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import numpy as np
import pytest

from checkpoints.late_interaction import write_stanford
from checkpoints.late_references import DOCUMENTS, QUERIES
from serving import Server
from whimbrel import Engine
from whimbrel.engine.document_cache import ENTRY_BYTES, cache_key
from whimbrel.errors import SetupError
from whimbrel.model.byte_cache import ByteCache
from whimbrel.outputs.requested import OutputSpec
from whimbrel.telemetry.trace import HistogramEvent, subscribe
from whimbrel.types.options import text_request
from whimbrel.types.request import Request
from whimbrel.types.seq import Seq


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("late")
    write_stanford(path)
    return path


@pytest.fixture
def computed() -> Iterator[list[int]]:
    """The tokens of every batch that runs from now on."""
    tokens: list[int] = []

    def note(event: HistogramEvent) -> None:
        if event.name == "batch_tokens":
            tokens.append(int(event.value))

    end = subscribe(HistogramEvent, note)
    yield tokens
    end()


def test_documents_are_computed_once(folder: Path, computed: list[int]) -> None:
    documents = [*DOCUMENTS, *(f"{text} and far away" for text in DOCUMENTS)]
    with (
        Engine(str(folder), dtype="float32") as plain,
        Engine(str(folder), dtype="float32", document_cache_bytes=10**6) as engine,
    ):
        expected = {query: plain.score(query, documents) for query in QUERIES}
        assert engine.score(QUERIES[0], documents).tolist() == expected[QUERIES[0]].tolist()
        computed.clear()
        for query in QUERIES:
            assert engine.score(query, documents).tolist() == expected[query].tolist()
        queries = sum(len(seq.ids) for query in QUERIES for seq in engine.preprocessor.preprocess(_request(engine, query)).seqs)
        assert sum(computed) == queries
        mixed = [documents[0], "a new one", documents[1], engine.multi_vector(documents[2], input_type="document")[0]]
        plainly = plain.score(QUERIES[0], mixed)
        assert engine.score(QUERIES[0], mixed).tolist() == plainly.tolist()
        pairs = [*QUERIES[:2], *QUERIES[:2]], [documents[0], "newer", documents[1], documents[0]]
        assert engine.score(*pairs).tolist() == plain.score(*pairs).tolist()
        computed.clear()
        rows = engine.multi_vector(QUERIES[0], input_type="query")[0]
        computed.clear()
        assert engine.score(rows, documents).tolist() == expected[QUERIES[0]].tolist()
        assert computed == []


def _request(engine: Engine, query: str) -> Request:
    return text_request(engine.card, query, "multi_vector", input_type="query")


def test_what_changes_vectors_is_another_document(folder: Path) -> None:
    long = "far away " * 60
    with (
        Engine(str(folder), dtype="float32") as plain,
        Engine(str(folder), dtype="float32", document_cache_bytes=10**6) as engine,
    ):
        for truncate in ("right", "left", "right", "left"):
            found = engine.score(QUERIES[0], [long], truncate=truncate)
            assert found.tolist() == plain.score(QUERIES[0], [long], truncate=truncate).tolist()


def test_keys() -> None:
    """Each field that goes into vectors changes the key; where a document stands in its request does not."""
    seq, ask = Seq(np.array([1, 2, 3], np.int32), 0), OutputSpec("multi_vector", 16, True)
    others = {
        "ids": np.array([1, 2, 4], np.int32), "prompt_tokens": 1, "prefix_tokens": 1, "type_id": 1, "second_text_start": 2, "num_attended": 2, "is_query": True,
        "adapter": 0, "tower": 1,
    }  # fmt: skip
    keys = {cache_key(replace(seq, **{name: value}), ask) for name, value in others.items()}  # pyright: ignore[reportArgumentType]
    keys |= {cache_key(seq, replace(ask, width=8)), cache_key(seq, replace(ask, activated=False)), cache_key(seq, ask)}
    assert len(keys) == len(others) + 3
    assert cache_key(replace(seq, index=7, truncated=True), ask) == cache_key(seq, ask)
    known = {"index", "truncated", "spans_S2"}
    assert {*others, *known} == set(Seq.__slots__), "a new field of Seq: does it change a document's vectors?"


def test_the_least_used_goes_first() -> None:
    rows = [np.full((4, 25), i, np.float32) for i in range(5)]
    cache = ByteCache[bytes, np.ndarray](3 * 800, entry_bytes=ENTRY_BYTES)
    for i in range(3):
        cache.add(b"%d" % i, rows[i])
    assert [found is not None for found in cache.find([b"0", b"1", b"2"])] == [True] * 3
    cache.find([b"0"])
    cache.add(b"3", rows[3])
    assert [found is not None for found in cache.find([b"0", b"1", b"2", b"3"])] == [True, False, True, True]
    assert cache.num_bytes == 3 * 800
    cache.add(b"3", rows[4])
    assert cache.find([b"3"])[0] is rows[3]
    cache.add(b"huge", np.zeros((100, 25), np.float32))
    assert cache.num_bytes == 3 * 800
    cache.add(b"empty", rows[0][:0])
    assert cache.num_bytes <= 3 * 800


def test_a_cache_too_small_changes_nothing(folder: Path) -> None:
    with (
        Engine(str(folder), dtype="float32") as plain,
        Engine(str(folder), dtype="float32", document_cache_bytes=2000) as engine,
    ):
        for _ in range(3):
            assert engine.score(QUERIES[0], DOCUMENTS).tolist() == plain.score(QUERIES[0], DOCUMENTS).tolist()
    with pytest.raises(SetupError, match="document_cache_bytes is -1"):
        Engine(str(folder), document_cache_bytes=-1)


def test_through_a_server(folder: Path) -> None:
    with Server(str(folder), "--dtype", "float32", "--document-cache-bytes", "1000000") as server:
        body = {"query": QUERIES[0], "documents": DOCUMENTS, "truncate": True}
        cold, warm = (httpx2.post(f"{server.url}/v1/rerank", json=body, timeout=60).json() for _ in range(2))
        assert warm | {"id": ""} == cold | {"id": ""}
        page = httpx2.get(f"{server.url}/metrics").text
        for what in ("hits", "misses"):
            count = re.search(rf"^whimbrel_document_cache_{what}_total{{.*}} (.+)$", page, re.MULTILINE)
            assert count is not None
            assert float(count[1]) == len(set(DOCUMENTS))
