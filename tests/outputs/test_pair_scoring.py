"""Scores of pairs by models that give vectors, against Sentence Transformers and the formulas of the models' authors."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.util import maxsim as reference_maxsim

import whimbrel.model.maxsim_scorer
from checkpoints.bge_m3 import m3_reference, write_m3
from checkpoints.encoders import write_bert
from checkpoints.files import edit_json
from checkpoints.late_interaction import write_jina
from checkpoints.late_references import CASES, DOCUMENTS, QUERIES, checkpoints_of, jina_vectors, late_reference
from checkpoints.sentence_layout import sentence_layout
from checkpoints.sparse import splade_layout, write_splade
from token_vectors import vectors_of
from whimbrel import AsyncEngine, Engine
from whimbrel.engine.engine_request import Job
from whimbrel.errors import InvalidRequest, NonFinite, OutOfMemory, TooLong, Unavailable
from whimbrel.model.maxsim_scorer import MaxSimScorer
from whimbrel.model.ops.maxsim import maxsim
from whimbrel.outputs.layout import build_outputs
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.rows import BatchOutput, DeviceRows
from whimbrel.types.arrays import Float32Array
from whimbrel.types.request import OutputName, Request
from whimbrel.types.result import Outputs, Ragged

TEXTS = ["far away", "the whimbrel flies", "a bird, a wader", "", "1, 2; 3!"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return checkpoints_of(tmp_path_factory)


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("m3")
    write_m3(folder)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


@pytest.mark.parametrize("case", CASES)
def test_late_interaction(case: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(case)
    model = late_reference(folder)
    queries, documents = model.encode_query(QUERIES), model.encode_document(DOCUMENTS)
    expected = reference_maxsim([torch.as_tensor(q) for q in queries], [torch.as_tensor(d) for d in documents]).numpy()
    scale = np.abs(np.where(expected > -1e8, expected, 0)).max()
    with Engine(str(folder), dtype="float32") as engine:
        for query, row in zip(QUERIES, expected, strict=True):
            found = engine.score(query, DOCUMENTS)
            assert np.abs(found - row).max() <= 1e-5 * scale
            assert [each.index for each in engine.rerank(query, DOCUMENTS)] == np.argsort(-found, kind="stable").tolist()
        pairs = engine.score(QUERIES[: len(DOCUMENTS)], DOCUMENTS)
        assert np.abs(pairs - expected.diagonal()).max() <= 1e-5 * scale


@pytest.mark.parametrize("width", [16, 8])
def test_jina_colbert(width: int, tmp_path: Path) -> None:
    """Its own formula, as its width is cut too."""
    weights = write_jina(tmp_path, "HF_ColBERT")
    with Engine(str(tmp_path), dtype="float32", matryoshka=True) as engine:
        for query in QUERIES:
            rows = jina_vectors(weights, tmp_path, query, "query", width)
            expected = [
                (rows @ jina_vectors(weights, tmp_path, text, "document", width).T).max(axis=1).sum() for text in DOCUMENTS
            ]
            np.testing.assert_allclose(engine.score(query, DOCUMENTS, dimensions=width), expected, rtol=1e-5)


def test_bge_m3(tmp_path: Path) -> None:
    """Scores follow FlagEmbedding's formulas over the model's own vectors, in all three ways."""
    heads = write_m3(tmp_path)
    dense, lexical, late = zip(*m3_reference(tmp_path, heads, TEXTS), strict=True)
    with Engine(str(tmp_path), dtype="float32") as engine:
        for i, query in enumerate(TEXTS):
            for name, expected in {
                "dense": [dense[i] @ each for each in dense],
                "sparse": [sum(weight * each.get(token, 0.0) for token, weight in lexical[i].items()) for each in lexical],
                "multi_vector": [(late[i] @ rows.T).max(axis=1).mean() for rows in late],
            }.items():
                found = engine.score(query, TEXTS, score_by=cast("OutputName", name))
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan", None])
def test_dense(similarity: str | None, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path, modes=("mean",), heads=(), prompts={"query": "far ", "document": "a "})
    if similarity:
        edit_json(tmp_path / "config_sentence_transformers.json", similarity_fn_name=similarity)
    model = SentenceTransformer(str(tmp_path), device="cpu")
    expected = model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS)).numpy()
    with Engine(str(tmp_path), dtype="float32") as engine:
        for query, row in zip(TEXTS, expected, strict=True):
            np.testing.assert_allclose(engine.score(query, TEXTS), row, atol=2e-5 * max(1.0, np.abs(expected).max()))
        assert np.array_equal(engine.score(TEXTS, TEXTS), [engine.score(text, text)[0] for text in TEXTS])


def test_sparse(tmp_path: Path) -> None:
    write_splade(tmp_path, "bert")
    splade_layout(tmp_path)
    model = SparseEncoder(str(tmp_path), device="cpu")
    expected = (model.encode_query(TEXTS).to_dense() @ model.encode_document(TEXTS).to_dense().T).numpy()
    with Engine(str(tmp_path), dtype="float32") as engine:
        for query, row in zip(TEXTS, expected, strict=True):
            np.testing.assert_allclose(engine.score(query, TEXTS), row, rtol=1e-4, atol=1e-4)


def test_the_three_scores_of_bge_m3(m3: Engine) -> None:
    """Scores are those of FlagEmbedding's compute_score: the late one is the mean over the query's tokens."""
    given = m3.encode(TEXTS, ("dense", "sparse", "multi_vector"))
    assert given.dense is not None
    assert given.sparse is not None
    assert given.multi_vector is not None
    for i, query in enumerate(TEXTS):
        dense = [given.dense[i] @ vector for vector in given.dense]
        weights = dict(zip(*map(np.ndarray.tolist, given.sparse[i]), strict=True))
        sparse = [sum(weights.get(id_, 0.0) * w for id_, w in zip(*each, strict=True)) for each in given.sparse]
        late = [(given.multi_vector[i] @ rows.T).max(axis=1).mean() for rows in given.multi_vector]
        for name, expected in (("dense", dense), ("sparse", sparse), ("multi_vector", late)):
            np.testing.assert_allclose(m3.score(query, TEXTS, score_by=name), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(m3.score(query, TEXTS), m3.score(query, TEXTS, score_by="dense"))


def test_scores_have_the_same_bits_alone_and_in_any_mix(checkpoint: Callable[[str], Path]) -> None:
    documents = [*DOCUMENTS * 3, *(f"text number {i} of birds" * (i % 9) for i in range(60))]
    with Engine(str(checkpoint("stanford")), dtype="float32", max_batch_tokens=128) as engine:
        alone = {(q, d): engine.score(q, d)[0] for q in QUERIES for d in set(documents)}
        with ThreadPoolExecutor(6) as pool:
            many = list(pool.map(lambda query: engine.score(query, documents), QUERIES))
        for query, scores in zip(QUERIES, many, strict=True):
            assert scores.tolist() == [alone[query, document] for document in documents]
        pairs = [(query, document) for document in documents for query in QUERIES]
        scores = engine.run(Request(pairs, ("scores",))).outputs.scores
        assert scores is not None
        assert scores[:, 0].tolist() == [alone[pair] for pair in pairs]


def test_each_text_is_encoded_once(checkpoint: Callable[[str], Path]) -> None:
    with Engine(str(checkpoint("stanford")), dtype="float32") as engine:
        prepared = engine.preprocessor.preprocess(Request([(q, d) for q in QUERIES * 2 for d in DOCUMENTS * 3], ("scores",)))
        assert len(prepared.seqs) == len(QUERIES) + len(DOCUMENTS)
        assert [seq.index for seq in prepared.seqs] == list(range(len(prepared.seqs)))
        assert [seq.is_query for seq in prepared.seqs] == [True] * len(QUERIES) + [False] * len(DOCUMENTS)


@pytest.mark.parametrize("seed", range(6))
def test_texts_may_be_computed_in_any_order(seed: int) -> None:
    """Scores do not depend on the order or on the size of batches."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, 30)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    rows = rng.standard_normal((offsets[-1], 16)).astype(np.float32)
    query_P, document_P = rng.integers(0, 10, 80).astype(np.int32), rng.integers(10, 30, 80).astype(np.int32)
    vectors = vectors_of(torch.from_numpy(rows), offsets)
    matcher = MaxSimScorer(PairScoring("multi_vector", "maxsim", query_P, document_P), 30, Outputs(), width=16)
    order = np.array([seq for seq in rng.permutation(30) if seq in query_P or seq in document_P])
    for seqs in np.array_split(order, rng.integers(1, 12)):
        matcher.add_rows(rows, seqs, offsets[seqs], offsets[seqs + 1])
    assert np.array_equal(matcher.scores, maxsim(vectors, vectors, query_P, document_P))
    assert not matcher._waiting


class Together:
    """A batch of three requests whose rows stay on the device: a query and documents of each, and documents of the next."""

    def __init__(self, widths: Sequence[int] = (16, 16, 16), dtype: torch.dtype = torch.float32) -> None:
        rng = np.random.default_rng(5)
        lengths = rng.integers(1, 9, 12)
        self.offsets = np.concatenate(([0], np.cumsum(lengths)))
        rows = torch.from_numpy(rng.standard_normal((self.offsets[-1], 16)).astype(np.float32)).to(dtype)
        selection: Any = SimpleNamespace(offsets_B1=self.offsets)
        self.batch = BatchOutput({"multi_vector": selection}, {"multi_vector": DeviceRows(rows, np.ones(len(rows), np.bool_))})
        pairs = PairScoring("multi_vector", "maxsim", np.zeros(3, np.int32), np.arange(1, 4, dtype=np.int32))
        self.scorers = [MaxSimScorer(pairs, 4, Outputs(), width=width) for width in widths]
        self.additions = [(each, np.arange(4) * 3 + i, np.arange(4)) for i, each in enumerate(self.scorers)]
        self.rows = rows

    def add(self) -> Sequence[Any]:
        (function,) = {scorer.together(self.batch) for scorer in self.scorers}
        assert function is not None
        return function(self.batch, self.additions)

    def expected(self, scorer: int) -> list[float]:
        (finisher, seqs_B, _) = self.additions[scorer]
        vectors = vectors_of(self.rows[:, : finisher._width], self.offsets)
        return maxsim(vectors, vectors, seqs_B[:1].repeat(3), seqs_B[1:]).tolist()


@pytest.mark.parametrize(("widths", "num_launches"), [((16, 16, 16), 1), ((16, 8, 16), 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_requests_of_a_batch_share_a_launch(
    widths: Sequence[int], num_launches: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are launched before any is waited for. A width of its own takes a launch of its own."""
    happened: list[str] = []
    start = whimbrel.model.maxsim_scorer.start_maxsim

    def counted(*args: Any, **options: Any) -> Any:
        happened.append("launch")
        wait = start(*args, **options)
        return lambda: (happened.append("wait"), wait())[1]

    monkeypatch.setattr(whimbrel.model.maxsim_scorer, "start_maxsim", counted)
    together = Together(widths, dtype)
    assert together.add() == [[], [], []]
    assert happened == ["launch"] * num_launches + ["wait"] * num_launches
    for i, scorer in enumerate(together.scorers):
        assert scorer.scores.tolist() == together.expected(i)


def test_a_launch_that_fails_is_repeated_request_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def first_fails(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(whimbrel.model.maxsim_scorer, "maxsim", maxsim)
        raise RuntimeError("scripted")

    together = Together()
    monkeypatch.setattr(whimbrel.model.maxsim_scorer, "start_maxsim", full)
    monkeypatch.setattr(whimbrel.model.maxsim_scorer, "maxsim", first_fails)
    first, *others = together.add()
    assert repr(first) == "RuntimeError('scripted')"
    assert others == [[], []]
    for i in (1, 2):
        assert together.scorers[i].scores.tolist() == together.expected(i)


def test_F7_a_device_that_is_lost_in_a_launch_is_told_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise Unavailable("lost")

    monkeypatch.setattr(whimbrel.model.maxsim_scorer, "start_maxsim", lost)
    with pytest.raises(Unavailable, match=r"^lost$"):
        Together().add()


def test_vectors_of_a_model_in_half_precision_stay_in_float16(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of length 1, as scores need no more; the scores differ by less than the rounding of the model does."""
    with Engine(str(checkpoint("stanford")), dtype="float32", document_cache_bytes=10**6) as engine:
        expected = engine.score(QUERIES[0], DOCUMENTS)
        runner: Any = engine._lanes._runner
        monkeypatch.setattr(runner, "_keeps_vectors", True)
        monkeypatch.setattr(runner, "_halves_vectors", True)
        collect, seen = runner.collect, set[torch.dtype]()

        def collected(pending: Any) -> Any:
            found = collect(pending)
            seen.update(rows.rows_PD.dtype for rows in found.values() if isinstance(rows, DeviceRows))
            return found

        monkeypatch.setattr(runner, "collect", collected)
        for _ in range(2):  # the second time out of the cache, to which the first documents went in float32
            np.testing.assert_allclose(engine.score(QUERIES[0], DOCUMENTS), expected, rtol=1e-3)
        assert seen == {torch.float16}
        assert engine.multi_vector([QUERIES[0]], input_type="query").rows_XD.dtype == np.float32


def test_what_is_wrong_names_what_was_given(m3: Engine, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidRequest, match=r"documents\[1\]: .*surrogate"):
        m3.score("a", ["a", "\ud800"])
    with pytest.raises(TooLong, match=r"documents\[2\]: the text has"):
        m3.score("a", ["a", "b", "far " * 5000], truncate=False)
    with pytest.raises(InvalidRequest, match=r"queries\[1\]: must be a string"):
        m3.score(["a", 3], ["a", "b"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="score_by: 'scores' is not known; it takes dense, sparse, multi_vector"):
        m3.run(Request([("a", "b")], ("scores",), score_by="scores"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match=r"activate: .*similarities"):
        m3.score("a", ["b"], activate=False)
    assert m3.score("a", []).tolist() == []


def test_late_interaction_sets_no_memory_aside(checkpoint: Callable[[str], Path]) -> None:
    """Its vectors are compared as batches end: the rows of 10,000 documents need not exist at one time."""
    with Engine(str(checkpoint("stanford")), dtype="float32") as engine:
        assert _finisher(engine, DOCUMENTS).num_bytes == 0


def test_a_score_that_is_not_finite_is_an_error(checkpoint: Callable[[str], Path]) -> None:
    """The product of finite vectors may not be; JSON would say null."""
    with Engine(str(checkpoint("stanford")), dtype="float32") as engine:
        finisher = _finisher(engine, DOCUMENTS)
    finisher.scores[:] = (*np.zeros(len(DOCUMENTS) - 1), np.inf)
    with pytest.raises(NonFinite, match=rf"input\[{len(DOCUMENTS) - 1}\]\[1\]: a score is NaN or infinite"):
        finisher.result()


def _finisher(engine: Engine, documents: Sequence[str]) -> MaxSimScorer:
    request = engine.preprocessor.preprocess(Request([("far", text) for text in documents], ("scores",)))
    assert isinstance(request.finish, PairScoring)
    response = build_outputs(request.response, np.empty(request.response.num_bytes, np.uint8), None)
    return MaxSimScorer(request.finish, len(request.seqs), response, width=request.layout.by_name["multi_vector"].spec.width)


def test_rows_that_stay_on_the_device(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Token vectors that are only compared are not copied to the host; here it is the device too. A text whose vectors are
    asked for in the same batch gets them."""
    folder = str(checkpoint("stanford"))
    with Engine(folder, dtype="float32") as plain:
        expected = plain.score(QUERIES[0], DOCUMENTS)
        pairs = plain.score(QUERIES[: len(DOCUMENTS)], DOCUMENTS)
        vectors = plain.multi_vector(DOCUMENTS, input_type="document")
    with Engine(folder, dtype="float32", document_cache_bytes=10**6) as engine:
        runner: Any = engine._lanes._runner
        monkeypatch.setattr(runner, "_keeps_vectors", True)
        collect, seen = runner.collect, list[type]()

        def collected(pending: Any) -> Any:
            found = collect(pending)
            seen.extend(map(type, found.values()))
            return found

        monkeypatch.setattr(runner, "collect", collected)
        for _ in range(2):  # the second time out of the cache
            assert engine.score(QUERIES[0], DOCUMENTS).tolist() == expected.tolist()
        assert engine.score(QUERIES[: len(DOCUMENTS)], DOCUMENTS).tolist() == pairs.tolist()
        assert set(seen) == {DeviceRows}
        assert engine.score(QUERIES[0], [DOCUMENTS[0], vectors[1]]).tolist() == expected[:2].tolist()
        assert engine.score(vectors[0], DOCUMENTS).tolist() == plain_scores(vectors[0], vectors)
        seen.clear()
        with ThreadPoolExecutor(8) as pool:
            scores = [pool.submit(engine.score, QUERIES[0], DOCUMENTS) for _ in range(20)]
            found = [pool.submit(engine.multi_vector, DOCUMENTS, input_type="document") for _ in range(20)]
            assert all(each.result().tolist() == expected.tolist() for each in scores)
            assert all(np.array_equal(each.result().rows_XD, vectors.rows_XD) for each in found)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: you tried to allocate 1 byte")], ids=repr)
def test_no_memory_to_compare(error: Exception, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch calls it. Documents that do not fit are not kept, and no request loses scores."""

    def full(*_: Any, **__: Any) -> Any:
        raise error

    with Engine(str(checkpoint("stanford")), dtype="float32", document_cache_bytes=10**6) as engine:
        expected = engine.score(QUERIES[0], DOCUMENTS)
        with monkeypatch.context() as patched:
            patched.setattr(whimbrel.model.maxsim_scorer, "maxsim", full)
            with pytest.raises(OutOfMemory, match="no memory to compare"):
                engine.score(QUERIES[0], DOCUMENTS)
        assert engine.score(QUERIES[0], DOCUMENTS).tolist() == expected.tolist()
    with Engine(str(checkpoint("stanford")), dtype="float32", document_cache_bytes=10**6) as engine:
        monkeypatch.setattr(engine._document_cache, "add", full)
        assert engine.score(QUERIES[0], DOCUMENTS).tolist() == expected.tolist()


def test_vectors_do_not_pile_up(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes wait if comparing takes longer than computing."""
    documents = [f"{text} {i}" for i, text in enumerate(DOCUMENTS * 100)]
    gate, launched = threading.Event(), list[int]()

    def slowly(*args: Any, **options: Any) -> Any:
        assert gate.wait(30)
        return maxsim(*args, **options)

    with Engine(str(checkpoint("stanford")), dtype="float32", max_batch_tokens=64) as engine:
        expected = engine.score(QUERIES[0], documents)
        runner: Any = engine._lanes._runner
        launch = runner.launch
        monkeypatch.setattr(runner, "launch", lambda *args: (launched.append(1), launch(*args))[1])
        monkeypatch.setattr(whimbrel.model.maxsim_scorer, "maxsim", slowly)
        future = engine.submit(Request([(QUERIES[0], text) for text in documents], ("scores",)))
        seen = -1
        while seen < len(launched):
            seen = len(launched)
            time.sleep(0.3)
        assert seen <= 16 * engine.plan.num_lanes
        gate.set()
        found = future.result(60).outputs.scores
        assert found is not None
        assert found[:, 0].tolist() == expected.tolist()
        assert len(launched) > 2 * seen


def plain_scores(query: Float32Array, documents: Ragged) -> list[float]:
    of_query = vectors_of(torch.from_numpy(query), np.array([0, len(query)]))
    of_documents = vectors_of(torch.from_numpy(documents.rows_XD), documents.offsets_N1)
    numbers = np.arange(len(documents))
    return maxsim(of_query, of_documents, np.zeros_like(numbers), numbers).tolist()


def test_a_caller_that_leaves_while_much_is_submitted(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [f"{text} {i}" for i, text in enumerate(DOCUMENTS * 100)]

    async def leave(engine: AsyncEngine, inner: Engine) -> None:
        submit, futures = inner.submit_tokenized, list[Future[Any]]()
        began, left = threading.Event(), threading.Event()

        def slow(prepared: Any) -> Future[Any]:
            began.set()
            assert left.wait(60)
            futures.append(submit(prepared))
            return futures[-1]

        monkeypatch.setattr(inner, "submit_tokenized", slow)
        call = asyncio.ensure_future(engine.score(QUERIES[0], documents))
        assert await asyncio.to_thread(began.wait, 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        left.set()
        while not futures or not futures[0].done():
            await asyncio.sleep(0.01)
        assert [future.cancelled() for future in futures] == [True]
        monkeypatch.setattr(inner, "submit_tokenized", submit)
        assert (await engine.score(QUERIES[0], documents[:300])).shape == (300,)

    with Engine(str(checkpoint("stanford")), dtype="float32") as inner:
        asyncio.run(leave(AsyncEngine(inner), inner))


def test_the_memory_of_a_comparison_is_free_once_it_is_answered(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting references frees the memory of texts, of vectors and of kept documents, without the garbage collector."""
    jobs: list[weakref.ref[Any]] = []

    def made(*args: Any) -> Job:
        job = Job(*args)
        jobs.extend((weakref.ref(job), weakref.ref(cast(Any, job.finisher))))
        return job

    with Engine(str(checkpoint("stanford")), dtype="float32", document_cache_bytes=10**6) as engine:
        rows = engine.multi_vector(DOCUMENTS, input_type="document")
        query = engine.multi_vector(QUERIES[0], input_type="query")[0]
        monkeypatch.setattr("whimbrel.engine.engine.Job", made)
        gc.collect()
        gc.disable()
        try:
            for q, documents in ((QUERIES[0], DOCUMENTS), (QUERIES[0], DOCUMENTS), (QUERIES[1], rows), (query, rows)):
                engine.score(q, documents)
                give_up = time.perf_counter() + 20
                while any(each() is not None for each in jobs) and time.perf_counter() < give_up:
                    time.sleep(0.01)
                assert [each() for each in jobs] == [None] * len(jobs)
        finally:
            gc.enable()
        assert len(jobs) == 8
