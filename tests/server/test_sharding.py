"""Long lists of pairs that several engines share: the same scores, each error at its place, each document where it is kept."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.late_interaction import write_stanford
from checkpoints.late_references import DOCUMENTS, QUERIES
from serving import Server
from whimbrel import Engine
from whimbrel.engine.engine_request import EngineRequest
from whimbrel.errors import ComputeError
from whimbrel.outputs.merge import Deduplication
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.server.processes.sharding import merge_shards, split_into_shards
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs

TEXTS = [f"{text} {'far away ' * (i % 7)}{i}" for i, text in enumerate(DOCUMENTS * 20)]


@pytest.fixture(scope="module", params=["late", "m3", "cross"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp(request.param)
    write: dict[str, Callable[[Path], Any]] = {
        "late": write_stanford,
        "m3": write_m3,
        "cross": lambda path: write_classifier(path, "bert", num_labels=1),
    }
    write[request.param](folder)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


def run(engine: Engine, prepared: EngineRequest) -> Outputs:
    return engine.submit_tokenized(prepared).result().outputs


def pairs(engine: Engine) -> list[tuple[Any, Any]]:
    """Several queries and many documents, some of them twice, in no order; and vectors where they can be compared."""
    rng = np.random.default_rng(0)
    queries: list[Any] = [*QUERIES[:3]]
    documents: list[Any] = [*TEXTS]
    if "multi_vector" in engine.card.outputs and "dense" not in engine.card.outputs:
        documents += list(engine.multi_vector(TEXTS[:9], input_type="document"))
        documents += [np.packbits(rows > 0, axis=1) for rows in engine.multi_vector(TEXTS[9:14], input_type="document")]
        queries += list(engine.multi_vector(QUERIES[3:4], input_type="query"))
    return [(queries[rng.integers(len(queries))], documents[i]) for i in rng.integers(len(documents), size=150)]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("num_engines", [2, 3, 7])
def test_shares_make_the_whole(num_engines: int, fixed: bool, engine: Engine) -> None:
    explain = "scores" not in engine.card.outputs and "dense" not in engine.card.outputs
    prepared = engine.preprocessor.preprocess(Request(pairs(engine), ("scores",), explain=explain))
    found = split_into_shards(prepared, engine.card, num_engines, least_tokens=10, sticky=fixed)
    late = isinstance(prepared.finish, PairScoring) and prepared.finish.output == "multi_vector"
    assert len(found) == num_engines
    if not fixed:
        tokens = [share.request.num_tokens for share in found]
        assert max(tokens) < 2.5 * min(tokens)
    assert [share.engine for share in found] == (list(range(num_engines)) if fixed and late else [None] * num_engines)
    expected = run(engine, prepared)
    outputs = merge_shards([run(engine, share.request) for share in found], found)
    if isinstance(prepared.finish, Deduplication):
        outputs = prepared.finish.apply(outputs)
    np.testing.assert_array_equal(outputs.scores, expected.scores)
    assert (outputs.token_matches is None) == (expected.token_matches is None)
    if outputs.token_matches is not None and expected.token_matches is not None:
        np.testing.assert_array_equal(outputs.token_matches.rows_XD, expected.token_matches.rows_XD)
        np.testing.assert_array_equal(outputs.token_matches.offsets_N1, expected.token_matches.offsets_N1)
    for share in found:
        assert [seq.index for seq in share.request.seqs] == list(range(len(share.request.seqs)))
        pair = int(share.pairs_S[-1])
        error = share.locate_error(ComputeError("broke.", item=share.pairs_S.size - 1, part=1))
        assert error.param == f"input[{pair}][1]"


def test_what_is_not_shared(engine: Engine) -> None:
    def count(request: Request, num_engines: int = 4, *, least_tokens: int = 10, fixed: bool = False) -> int:
        prepared = engine.preprocessor.preprocess(request)
        return len(split_into_shards(prepared, engine.card, num_engines, least_tokens=least_tokens, sticky=fixed))

    many = Request([(QUERIES[0], text) for text in TEXTS], ("scores",))
    assert count(many) == 4
    assert count(many, 1) == 0
    assert count(many, least_tokens=10**6) == 0
    total = engine.preprocessor.preprocess(many).num_tokens
    assert count(many, least_tokens=total // 2 - total // 10) == 2
    assert count(replace(many, texts=[])) == 0
    if "dense" in engine.card.outputs:
        assert count(Request(TEXTS, ("dense",))) == 0


def test_a_document_always_has_the_same_engine(tmp_path: Path) -> None:
    write_stanford(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        homes: dict[str, int | None] = {}
        for some in (TEXTS, TEXTS[::-1], TEXTS[40:60], TEXTS[:1]):
            prepared = engine.preprocessor.preprocess(Request([(QUERIES[0], text) for text in some], ("scores",)))
            for share in split_into_shards(prepared, engine.card, 3, least_tokens=10**9, sticky=True):
                for pair in share.pairs_S.tolist():
                    assert homes.setdefault(some[pair], share.engine) == share.engine
        assert set(homes.values()) == {0, 1, 2}


@pytest.mark.parametrize("options", [[], ["--document-cache-bytes", "10000000"]])
@pytest.mark.sample(1)
def test_two_engines(options: list[str], tmp_path: Path) -> None:
    """Both compute; scores have the bits of one engine; kept documents are found again."""
    write_stanford(tmp_path)
    arguments = ["--dtype", "float32", "--replicas", "2", "--max-batch-tokens", "128", *options]
    with (
        Engine(str(tmp_path), dtype="float32") as plain,
        Server(str(tmp_path), *arguments) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        expected = plain.score(QUERIES[0], TEXTS)
        before = [_seconds(pid) for pid in server.children("engine")]
        for _ in range(3):
            body = {"query": QUERIES[0], "documents": TEXTS, "truncate": True, "explain": True}
            found = client.post("/v1/rerank", json=body).raise_for_status().json()["results"]
            assert [each["index"] for each in found] == np.argsort(-expected, kind="stable").tolist()
            scores = {each["index"]: np.float32(each["relevance_score"]) for each in found}
            assert [scores[i] for i in range(len(TEXTS))] == expected.tolist()
            assert len(found[0]["explanation"]["maxima"]) == len(found[0]["explanation"]["query_tokens"])
        assert all(after > start for start, after in zip(before, map(_seconds, server.children("engine")), strict=True))
        if options:
            page = client.get("/metrics").text
            hits, misses = (
                float(re.search(rf"document_cache_{what}_total{{.*}} (.+)", page)[1]) for what in ("hits", "misses")
            )  # pyright: ignore[reportOptionalSubscript]
            assert (hits, misses) == (2 * len(TEXTS), len(TEXTS))


@pytest.mark.extended
def test_an_engine_that_is_killed_meanwhile(tmp_path: Path) -> None:
    """Its share goes to the other, or waits for the next life."""
    write_stanford(tmp_path)
    documents = [f"{text} {'far away ' * 9}" for text in TEXTS * 20]
    arguments = ["--dtype", "float32", "--replicas", "2", "--max-batch-tokens", "128"]
    with Engine(str(tmp_path), dtype="float32") as plain, Server(str(tmp_path), *arguments) as server:
        expected = plain.score(QUERIES[0], documents)

        def ask(_: int) -> list[float]:
            body = {"queries": QUERIES[0], "documents": documents, "truncate": True}
            answer = httpx2.post(f"{server.url}/v1/score", json=body, timeout=120).raise_for_status().json()
            return np.array([each["score"] for each in answer["data"]], np.float32).tolist()

        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(ask, i) for i in range(8)]
            time.sleep(0.3)
            os.kill(server.children("engine")[0], signal.SIGKILL)
            for each in found:
                assert each.result() == expected.tolist()


def _seconds(pid: int) -> int:
    """Ticks of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_pairs_that_are_alike_run_once(tmp_path: Path) -> None:
    write_classifier(tmp_path, "bert", num_labels=1)
    with Engine(str(tmp_path), dtype="float32") as engine:
        documents = [*DOCUMENTS, *DOCUMENTS[::-1], DOCUMENTS[0]]
        prepared = engine.preprocessor.preprocess(Request([(QUERIES[0], text) for text in documents], ("scores",)))
        assert len(prepared.seqs) == len(set(documents))
        expected = [engine.score(QUERIES[0], text)[0] for text in documents]
        assert engine.score(QUERIES[0], documents).tolist() == expected
        found = split_into_shards(prepared, engine.card, 2, least_tokens=10, sticky=False)
        assert len(found) == 2
        with pytest.raises(ValueError, match=r"documents\[3\]: .*string"):
            engine.score(QUERIES[0], ["a", "b", "a", 7])  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=r"documents\[3\]: .*tokens"):
            engine.score(QUERIES[0], ["a", "b", "a", "far away " * 50], truncate=False)
