"""Texts in pieces and shared prefixes under attack: every pooler, adapters, odd texts, and whatever order requests come in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.bge_m3 import write_m3
from checkpoints.families import DECODER, write_model
from checkpoints.files import edit_json
from checkpoints.lora import write_adapter
from checkpoints.rerankers import qwen, write_reranker
from checkpoints.sentence_layout import sentence_layout
from checkpoints.sparse import write_code
from checkpoints.step_rewards import write_shepherd
from comparisons import relative_error
from serving import Server
from shared_prefixes import DOCUMENTS, PROMPT, QUERY, scores_of_documents
from whimbrel import Engine
from whimbrel.errors import CheckpointError, NonFinite, TooLong
from whimbrel.model.layer import Layer
from whimbrel.types.request import OutputName, Request
from whimbrel.types.result import Sparse

LONG = "The whimbrel is a wader that flies far away in a year, and rests on the way. " * 12
OUTPUTS: tuple[OutputName, ...] = ("dense", "sparse", "multi_vector", "hidden")


def write_everything(folder: Path, **config: Any) -> Any:
    """A causal model with the modules of a dense model and the heads of BGE-M3: sparse vectors, and a ragged projector."""
    write_m3(folder)
    for file in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "modules.json"):
        (folder / file).unlink()
    model = write_model(folder, "Qwen3", DECODER | {"head_dim": 16, "max_position_embeddings": 1000} | config)
    edit_json(folder / "tokenizer_config.json", model_max_length=1000)
    sentence_layout(folder, modes=("lasttoken",), max_seq_length=1000)
    return model


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("everything")
    model = write_everything(folder)
    for seed, name in enumerate(("one", "two"), start=1):
        write_adapter(folder / name, model, seed=seed)
    return str(folder)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reranker")
    write_reranker(folder, "Qwen3", qwen())
    return str(folder)


def load(folder: str, **options: Any) -> Engine:
    return Engine(folder, dtype="float32", **options)


def rows_of(value: Any) -> list[np.ndarray]:
    """Return the rows of an output, of a sparse one the weights and the ids that they are of."""
    if isinstance(value, Sparse):
        return [row for i in range(len(value)) for row in value[i]]
    return list(value)


def run(engine: Engine, texts: list[Any], outputs: tuple[OutputName, ...] = OUTPUTS, **options: Any) -> list[np.ndarray]:
    found = engine.run(Request(texts, outputs, **options)).outputs
    return [row for name in outputs for row in rows_of(getattr(found, name))]


def assert_one_pass(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """The rows of all texts together are those of one pass to 1e-6, in norms. A vector may have four times that.

    So far is one pass itself from the result in float64, as `test_pieces_are_as_near_to_float64_as_one_pass` shows.
    """
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert relative_error(*(np.concatenate([each.ravel() for each in rows]) for rows in (found, expected))) <= 1e-6
    for one, other in zip(found, expected, strict=True):
        assert other.size == 0 or relative_error(one, other) <= 4e-6


# Poolers


@pytest.mark.parametrize("kept_keys", [0, 1024], ids=["joined", "masked"])
@pytest.mark.parametrize("piece_tokens", [1, 7, 64])
def test_every_output_over_pieces(piece_tokens: int, kept_keys: int, everything: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last token, weights of tokens, vectors through the projector and hidden states are those of one pass."""
    texts = [LONG, "a", LONG[:300], ""]
    with load(everything) as whole:
        assert whole.plan.max_batch_tokens > len(LONG.split())
        expected = run(whole, texts)
    monkeypatch.setattr("whimbrel.model.ops.attention.MAX_MASKED_KEYS", kept_keys)
    with load(everything, max_batch_tokens=piece_tokens) as split:
        assert_one_pass(run(split, texts), expected)
        assert all(np.array_equal(a, b) for a, b in zip(run(split, texts[:1]), run(split, texts[:1]), strict=True))


@pytest.mark.parametrize("piece_tokens", [1, 7, 64])
def test_a_sparse_autoencoder_over_pieces(piece_tokens: int, tmp_path: Path) -> None:
    """The code of a pooled vector (CSR) has the entries of one pass."""
    write_code(tmp_path)
    for file in ("model.safetensors", "config.json"):
        (tmp_path / file).unlink()
    write_model(tmp_path, "Qwen3", DECODER | {"head_dim": 16, "max_position_embeddings": 1000})
    edit_json(tmp_path / "sentence_bert_config.json", max_seq_length=1000)
    with load(str(tmp_path), chunked_prefill=False) as whole, load(str(tmp_path), max_batch_tokens=piece_tokens) as split:
        assert split.plan.chunked_prefill
        found, expected = (run(engine, [LONG, "a"], ("sparse",)) for engine in (split, whole))
        assert_one_pass(found, expected)
        assert np.array_equal(found[0], expected[0])
        assert found[0].size == 16


def test_a_vocabulary_over_a_causal_model_is_refused(tmp_path: Path) -> None:
    """SPLADE's head over tokens that do not look ahead is not known, split or not."""
    write_everything(tmp_path)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(CheckpointError, match="language-modelling head of this architecture is not supported"):
        load(str(tmp_path), pooling="splade")


@pytest.mark.parametrize("piece_tokens", [1, 7, 64])
def test_rewards_of_steps_over_pieces(piece_tokens: int, tmp_path: Path) -> None:
    write_shepherd(tmp_path)
    text = "birds fly ки\n" * 3 + "some fly far, far away in a year. The answer is: 18 ки"
    options: dict[str, Any] = {"pooling": "math-shepherd"}
    with load(str(tmp_path), **options) as whole, load(str(tmp_path), max_batch_tokens=piece_tokens, **options) as split:
        found, expected = (run(engine, [text, "a ки"], ("token_scores",)) for engine in (split, whole))
        assert expected[0].shape == (4, 1)
        assert_one_pass(found, expected)


def test_the_projector_runs_once_per_batch(everything: str) -> None:
    """Whatever is split: once for a long text in pieces, and once for the short ones of a batch."""
    with load(everything, max_batch_tokens=64, num_replicas=999) as engine:
        poolings: Any = engine._lanes._runner._poolings[0]  # pyright: ignore
        projector, calls = poolings["multi_vector"], list[int]()

        def count(*batch: Any) -> Any:
            found = projector(*batch)
            calls.append(len(found))
            return found

        poolings["multi_vector"] = count
        long = run(engine, [LONG], ("multi_vector",))
        assert calls == [len(long[0])]
        assert calls[0] > 3 * 64
        calls.clear()
        short = run(engine, ["birds fly", "a", "far away"], ("multi_vector",))
        assert calls == [sum(map(len, short))]


# Odd texts and prefixes


def test_odd_documents(reranker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty document, one token, the query itself, and the text of the whole prefix, against whole pairs."""
    documents = ["", "a", QUERY, " ", f"<Query>: {QUERY}\n<Document>: {QUERY}", LONG, "\n\n", "yes", "<|im_end|>"]
    with load(reranker, reranker="qwen3", max_batch_tokens=256) as engine:
        shared = scores_of_documents(engine, documents)
        assert [scores_of_documents(engine, [each])[0] for each in documents] == shared.tolist()
        for query in ("", " ", "a"):
            assert [scores_of_documents(engine, [each], query)[0] for each in documents] == scores_of_documents(
                engine, documents, query
            ).tolist()
    monkeypatch.setattr("whimbrel.tokenizer.template.max_prefix_tokens", lambda card, plan: 0)
    with load(reranker, reranker="qwen3", max_batch_tokens=4096) as whole:
        expected = scores_of_documents(whole, documents)
    for one, other in zip(shared, expected, strict=True):
        assert abs(one - other) <= 3e-6 * max(1, abs(other))


@pytest.mark.parametrize("max_length", [17, 60, 120])
@pytest.mark.parametrize("side", ["left", "right"])
def test_cut_texts(side: Any, max_length: int, everything: str) -> None:
    """A text that is cut within its prompt, or right behind it, has the same bits in company, and one pass's vector."""
    texts = [LONG, "a", "far " * 30, ""]
    with (
        load(everything, max_length=max_length) as engine,
        load(everything, max_length=max_length, max_batch_tokens=8) as split,
    ):
        together = run(engine, texts, ("dense",), prompt=PROMPT, truncate=side)
        for text, row in zip(texts, together, strict=True):
            assert np.array_equal(run(engine, [text], ("dense",), prompt=PROMPT, truncate=side)[0], row)
        assert_one_pass(run(split, texts, ("dense",), prompt=PROMPT, truncate=side), together)
        with pytest.raises(TooLong):
            run(engine, [LONG], prompt=PROMPT, truncate="never")


def test_adapters_share_no_prefixes(everything: str) -> None:
    """The same prompt through two adapters and none, at once and through one cache: each has its own vectors."""
    adapters: dict[str, Any] = {"adapters": {name: str(Path(everything) / name) for name in ("one", "two")}}
    names = (None, "one", "two")
    with load(everything, prefix_cache_bytes=0, **adapters) as alone, load(everything, **adapters) as engine:
        expected = {name: run(alone, ["a", LONG], prompt=PROMPT, adapter=name) for name in names}
        for name, other in (("one", None), ("two", None), ("one", "two")):
            assert relative_error(expected[name][0], expected[other][0]) > 1e-3
        for _ in range(3):
            futures = [(name, engine.submit(Request(["a", LONG], OUTPUTS, prompt=PROMPT, adapter=name))) for name in names * 2]
            for name, future in futures:
                outputs = future.result(60).outputs
                found = [row for output in OUTPUTS for row in rows_of(getattr(outputs, output))]
                assert all(np.array_equal(a, b) for a, b in zip(found, expected[name], strict=True))


def test_a_prefix_that_is_not_finite_fails_only_its_own_texts(everything: str) -> None:
    """A prompt with a token that gives NaN, before and after it is in the cache; others go on as if it were not there."""
    with load(everything) as engine, torch.inference_mode():
        ids = [set(engine.preprocessor.preprocess(Request([word])).seqs[0].ids.tolist()) for word in ("bird", "far")]
        expected = run(engine, ["far", "a"], ("dense",), prompt=PROMPT)
        words: Any = engine._lanes._runner._models[0]._words  # pyright: ignore
        words[list(ids[0] - ids[1])] = torch.nan
        for _ in range(2):
            bad = engine.submit(Request(["far", "a"], prompt=f"bird {PROMPT}"))
            good = engine.submit(Request(["far", "a"], prompt=PROMPT))
            assert np.array_equal(np.stack(rows_of(good.result(60).outputs.dense)), np.stack(expected))
            with pytest.raises(NonFinite):
                bad.result(60)
        with pytest.raises(NonFinite):
            run(engine, [f"far {LONG} bird " * 3], ("dense",))


def test_want_of_memory_in_the_middle_of_a_text(everything: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that finds no memory ends its launch; the text runs again from its beginning, with the same bits."""
    with load(everything, max_batch_tokens=32, num_replicas=999) as engine:
        expected = run(engine, [LONG], prompt=PROMPT)
        run_layer, calls = Layer.__call__, list[None]()

        def fail(*args: Any) -> Any:
            calls.append(None)
            if len(calls) == 9:
                raise MemoryError
            return run_layer(*args)

        monkeypatch.setattr(Layer, "__call__", fail)
        assert all(np.array_equal(a, b) for a, b in zip(run(engine, [LONG], prompt=PROMPT), expected, strict=True))
        assert len(calls) > 20


# Orders of arrival

WORDS = ["a", "far", "The whimbrel flies.", "far away " * 9, LONG[:200], LONG, ""]
PROMPTS = [None, PROMPT, "Instruct: Retrieve what the birds eat, and where they find it in the winter.\nQuery: ", "short: "]


@pytest.fixture(scope="module")
def engines(everything: str) -> Iterator[Callable[[int, int | None], Engine]]:
    """Engines by size of a piece and bytes of the cache; None: no text is split and nothing is kept."""
    loaded: dict[tuple[int, int | None], Engine] = {}

    def engine(piece_tokens: int, cache_bytes: int | None) -> Engine:
        if (key := (piece_tokens, cache_bytes)) not in loaded:
            adapters = {name: str(Path(everything) / name) for name in ("one", "two")}
            options: dict[str, Any] = {} if cache_bytes is None else {"prefix_cache_bytes": cache_bytes}
            loaded[key] = load(everything, max_batch_tokens=piece_tokens, adapters=adapters, **options)
        return loaded[key]

    yield engine
    for each in loaded.values():
        each.close()


_expected: dict[tuple[Any, ...], np.ndarray] = {}
TEXT = st.tuples(
    st.sampled_from(range(len(WORDS))), st.sampled_from(range(len(PROMPTS))), st.sampled_from([None, "one", "two"])
)


@settings(max_examples=20)
@given(
    data=st.data(),
    piece_tokens=st.sampled_from([16, 40, 512]),
    cache_bytes=st.sampled_from([0, 30_000, 2**24]),
    arrivals=st.lists(st.tuples(TEXT, st.integers(1, 3), st.booleans()), min_size=1, max_size=12),
)
def test_any_arrival_has_the_bits_that_it_has_alone(
    engines: Callable[[int, int | None], Engine],
    data: st.DataObject,
    piece_tokens: int,
    cache_bytes: int,
    arrivals: list[tuple[tuple[int, int, str | None], int, bool]],
) -> None:
    """Requests of any texts, prompts and adapters, some cancelled meanwhile, through caches that hold much, little or nothing.

    Each answer has the bits of its text alone without a cache, and is one pass's to 1e-6.
    """
    engine = engines(piece_tokens, cache_bytes)

    def request(text: tuple[int, int, str | None], count: int) -> Request:
        word, prompt, adapter = text
        return Request([WORDS[word]] * count, ("dense", "multi_vector"), prompt=PROMPTS[prompt], adapter=adapter)

    def alone(text: tuple[int, int, str | None], piece: int, cache: int | None) -> np.ndarray:
        if (key := (text, piece, cache)) not in _expected:
            outputs = engines(piece, cache).run(request(text, 1)).outputs
            _expected[key] = np.concatenate([rows_of(outputs.dense)[0], rows_of(outputs.multi_vector)[0].ravel()])
        return _expected[key]

    futures: list[tuple[Future[Any], tuple[int, int, str | None]]] = []
    for text, count, is_cancelled in arrivals:
        future = engine.submit(request(text, count))
        if not is_cancelled:
            futures.append((future, text))
        elif data.draw(st.booleans()):
            future.cancel()  # else it runs to its end unseen
    for future, text in futures:
        outputs = future.result(60).outputs
        for dense, vectors in zip(rows_of(outputs.dense), rows_of(outputs.multi_vector), strict=True):
            found = np.concatenate([dense, vectors.ravel()])
            assert np.array_equal(found, alone(text, piece_tokens, 0))
            assert_one_pass([found], [alone(text, 4096, 0)])
    assert_at_rest(engine, cache_bytes)


def assert_at_rest(engine: Engine, cache_bytes: int) -> None:
    """Nothing is left of requests, and the cache holds what it says, within its limit."""
    dispatcher: Any = engine._dispatcher  # pyright: ignore
    deadline = time.perf_counter() + 30
    while dispatcher._in_flight or dispatcher._jobs:
        assert time.perf_counter() < deadline
        time.sleep(0.001)
    cache: Any = engine._lanes._runner.prefix_cache  # pyright: ignore
    assert cache.num_bytes <= cache_bytes
    assert cache.num_bytes == sum(each.nbytes for each in cache._values.values())


def test_threads_that_cancel_while_others_ask(engines: Callable[[int, int | None], Engine]) -> None:
    """Long texts come and go in four threads; a fifth asks short ones, whose bits stay what they are."""
    engine, stopped = engines(16, 30_000), threading.Event()
    expected = run(engine, ["a"], ("dense",), prompt=PROMPT)[0]

    def bother(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stopped.is_set():
            future = engine.submit(Request([LONG], ("dense",), prompt=f"{seed} {rng.integers(5)} {PROMPT}"))
            stopped.wait(float(rng.random()) / 50)
            future.cancel()

    threads = [threading.Thread(target=partial(bother, seed)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            assert np.array_equal(run(engine, ["a"], ("dense",), prompt=PROMPT)[0], expected)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


# Over HTTP


def test_hits_are_in_the_metrics(reranker: str) -> None:
    """/metrics counts prefixes that were found and those that were not, and the bytes that are kept."""

    def value(page: str, name: str) -> float:
        (line,) = [line for line in page.splitlines() if line.startswith(f"whimbrel_{name}{{")]
        return float(line.rsplit(" ", 1)[1])

    arguments = ["--dtype", "float32", "--reranker", "qwen3"]
    with Server(reranker, *arguments) as server, httpx2.Client(base_url=server.url, timeout=60) as client:

        def ask(query: str) -> list[float]:
            body = {"query": query, "documents": DOCUMENTS[:3]}
            results = client.post("/v1/rerank", json=body).raise_for_status().json()["results"]
            return [each["relevance_score"] for each in results]

        first = ask(QUERY)
        before = client.get("/metrics").text
        assert value(before, "prefix_cache_misses_total") >= 1
        assert ask(QUERY) == first
        after = client.get("/metrics").text
        assert value(after, "prefix_cache_hits_total") > 0
        assert value(after, "prefix_cache_misses_total") == value(before, "prefix_cache_misses_total")
        assert value(after, "prefix_cache_bytes") > 1000
