"""Shared prefixes and long texts in pieces, through the engine: which rows are computed, and that results do not depend on it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from checkpoints.classifiers import two_layers, write_classifier
from checkpoints.families import DECODER, write_model
from checkpoints.files import edit_json
from checkpoints.rerankers import qwen, write_reranker
from checkpoints.sentence_layout import sentence_layout
from comparisons import relative_error
from parity import difference
from shared_prefixes import DOCUMENTS, PROMPT, QUERY, scores_of_documents
from whimbrel import Engine
from whimbrel.checkpoint.locate import Checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.cli.console import print_card
from whimbrel.engine.prepare import Preprocessor
from whimbrel.errors import DeadlineExceeded, SetupError, TooLong
from whimbrel.telemetry.trace import CounterEvent, HistogramEvent, subscribe
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, make_plan
from whimbrel.types.request import OutputName, Request
from whimbrel.types.result import Result
from whimbrel.types.scheduling import Scheduling

TEXTS = ["a", "The whimbrel is a wader with a long curved bill.", "far away " * 30, "The", ""]
OUTPUTS: list[OutputName] = ["dense", "hidden", "token_dense"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reranker")
    write_reranker(folder, "Qwen3", qwen())
    return str(folder)


@pytest.fixture(scope="module", params=["lasttoken", "mean", "weightedmean", "max"])
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("embedder")
    write_model(folder, "Qwen3", DECODER | {"head_dim": 16, "max_position_embeddings": 600})
    sentence_layout(folder, modes=(request.param,), max_seq_length=600)
    return str(folder)


def load(folder: str, **options: Any) -> Engine:
    return Engine(folder, **({"reranker": "qwen3"} if "reranker" in folder else {}), dtype="float32", **options)


@contextmanager
def rows_of(engine: Engine) -> Iterator[list[int]]:
    """Record the number of real rows of each forward pass."""
    models: Any = engine._lanes._runner._models  # pyright: ignore
    recorded: list[int] = []
    model = models[0]

    def record(*args: Any) -> Any:
        recorded.append(args[3].num_tokens)
        return model(*args)

    models[0] = record
    try:
        yield recorded
    finally:
        models[0] = model


def test_a_rerank_computes_its_prefix_once(reranker: str) -> None:
    """The template and the query are computed once per engine; own tokens are all that later batches compute."""
    events: list[str] = []
    end = subscribe(CounterEvent, lambda event: events.append(event.name))
    with load(reranker, max_batch_tokens=4096) as engine:
        seqs = engine.preprocessor.preprocess(Request([(QUERY, each) for each in DOCUMENTS])).seqs
        prefix = seqs[0].prefix_tokens
        assert prefix > 60
        assert {seq.prefix_tokens for seq in seqs} == {prefix}
        own = sum(seq.ids.size - prefix for seq in seqs)
        with rows_of(engine) as rows:
            first = scores_of_documents(engine, DOCUMENTS)
            computed = sum(rows)
            again = scores_of_documents(engine, DOCUMENTS)
        lanes = engine.plan.num_lanes
        assert own + prefix <= computed <= own + lanes * prefix
        assert sum(rows) == computed + own
        assert np.array_equal(first, again)
    end()
    assert events.count("prefix_cache_hits") >= 1
    assert 1 <= events.count("prefix_cache_misses") <= lanes


@pytest.mark.parametrize("cache_bytes", [0, 60_000, 2**24])
def test_bits_depend_neither_on_company_nor_on_the_cache(cache_bytes: int, reranker: str) -> None:
    """A score is the same alone, together, with other queries between, from the cache, after eviction, and without a cache."""
    with load(reranker) as engine:
        expected = scores_of_documents(engine, DOCUMENTS)
    with load(reranker, prefix_cache_bytes=cache_bytes) as engine:
        assert [scores_of_documents(engine, [each])[0] for each in DOCUMENTS] == expected.tolist()
        for number in range(3):
            scores_of_documents(engine, DOCUMENTS[:3], query=f"{QUERY} {number}")  # pushes the first out of a small cache
        assert np.array_equal(scores_of_documents(engine, DOCUMENTS), expected)
        assert np.array_equal(scores_of_documents(engine, DOCUMENTS[::-1]), expected[::-1])
        pairs = [pair for each in DOCUMENTS for pair in ((QUERY, each), ("another query", each))]
        mixed = engine.run(Request(pairs, ("scores",), activate=False)).outputs.scores
        assert mixed is not None
        assert np.array_equal(mixed[::2, 0], expected)


def test_shared_scores_are_those_of_whole_pairs(reranker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relative error is 1e-6 in float32."""
    with load(reranker) as engine:
        shared = scores_of_documents(engine, DOCUMENTS)
    monkeypatch.setattr("whimbrel.tokenizer.template.max_prefix_tokens", lambda card, plan: 0)
    with load(reranker) as engine:
        assert not any(seq.prefix_tokens for seq in engine.preprocessor.preprocess(Request([(QUERY, "a")])).seqs)
        assert relative_error(shared, scores_of_documents(engine, DOCUMENTS)) <= 1e-6


def run(engine: Engine, texts: list[str], **options: Any) -> list[np.ndarray]:
    """Return the rows of all outputs."""
    result: Result = engine.run(Request(texts, tuple(OUTPUTS), **options))
    dense, hidden, tokens = (getattr(result.outputs, name) for name in OUTPUTS)
    return [dense, *hidden, *tokens]


@pytest.mark.filterwarnings("ignore")
def test_a_prompt_s_tokens_are_shared_whatever_the_pooling(embedder: str) -> None:
    expected = SentenceTransformer(embedder, device="cpu").encode(TEXTS, prompt=PROMPT)
    with load(embedder) as engine, load(embedder, prefix_cache_bytes=0) as uncached:
        seqs = engine.preprocessor.preprocess(Request(TEXTS, prompt=PROMPT)).seqs
        assert min(seq.prefix_tokens for seq in seqs[:4]) >= 16
        assert not any(seq.prefix_tokens for seq in engine.preprocessor.preprocess(Request(TEXTS)).seqs)
        assert difference(engine.embed(TEXTS, prompt=PROMPT), expected) <= 1e-5
        together = run(engine, TEXTS, prompt=PROMPT)
        for other in (engine, uncached):
            again = run(other, TEXTS, prompt=PROMPT)
            assert all(np.array_equal(a, b) for a, b in zip(together, again, strict=True))
        alone = [run(uncached, [text], prompt=PROMPT)[0][0] for text in TEXTS]
        assert np.array_equal(np.stack(alone), together[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gpu_gives_the_same(dtype: str, reranker: str, embedder: str) -> None:
    """Behind a shared prefix, from its cache, and in the pieces of a long text."""
    texts = [*TEXTS, "far away " * 200]
    with Engine(reranker, reranker="qwen3", device="cpu", dtype="float32") as exact:
        expected = scores_of_documents(exact, DOCUMENTS)
    with Engine(reranker, reranker="qwen3", device="cuda", dtype=dtype) as engine:
        for _ in range(2):
            assert relative_error(scores_of_documents(engine, DOCUMENTS), expected) < (1e-4 if dtype == "float32" else 0.05)
    with Engine(embedder, device="cpu", dtype="float32") as exact:
        vectors = exact.embed(texts, prompt=PROMPT)
    with Engine(embedder, device="cuda", dtype=dtype, max_batch_tokens=64, chunked_prefill=True) as engine:
        for _ in range(2):
            assert relative_error(engine.embed(texts, prompt=PROMPT), vectors) < (1e-4 if dtype == "float32" else 0.05)


def test_a_prefix_is_the_text_s_own(embedder: str) -> None:
    """Its length depends on nothing but the text and its prompt; cut texts, ids, and short prompts are no exception."""
    with load(embedder, max_length=40) as engine:

        def prefixes(texts: Any, **options: Any) -> list[int]:
            return [seq.prefix_tokens for seq in engine.preprocessor.preprocess(Request(texts, **options)).seqs]

        together = prefixes(TEXTS, prompt=PROMPT)
        assert together == [prefixes([text], prompt=PROMPT)[0] for text in TEXTS]
        sizes = [seq.ids.size for seq in engine.preprocessor.preprocess(Request(TEXTS, prompt=PROMPT)).seqs]
        assert all(prefix < size for prefix, size in zip(together, sizes, strict=True))
        assert prefixes(["a"], prompt="short: ") == [0]
        assert prefixes([np.arange(5, 35, dtype=np.int32)]) == [0]
        left = engine.preprocessor.preprocess(Request(["far " * 60], prompt=PROMPT, truncate="left")).seqs[0]
        assert left.prefix_tokens < 16


@pytest.mark.parametrize("piece_tokens", [16, 50])
def test_pieces_give_the_vectors_of_one_pass(piece_tokens: int, embedder: str) -> None:
    """Every pooler, to a relative error of 1e-6 in float32, with and without a prefix; and short texts beside have the same bits."""
    texts = ["The whimbrel is a wader. " * 12, "a", "far away " * 40]
    options: list[dict[str, Any]] = [{}, {"prompt": PROMPT}]
    with (
        load(embedder, max_batch_tokens=piece_tokens, chunked_prefill=True) as split,
        load(embedder, max_batch_tokens=piece_tokens, chunked_prefill=False) as whole,
    ):
        for each in options:
            found, expected = run(split, texts, **each), run(whole, texts, **each)
            for one, other in zip(found, expected, strict=True):
                assert relative_error(one, other) <= 1e-6
            assert np.array_equal(found[0][1], expected[0][1])
            alone = run(split, texts[:1], **each)
            assert np.array_equal(alone[0][0], found[0][0])


@pytest.fixture
def long_text(tmp_path: Path) -> Iterator[tuple[Engine, Request]]:
    """An engine of one lane, and a text of 8,000 tokens that runs in 250 pieces."""
    write_model(tmp_path, "Qwen3", DECODER | {"head_dim": 16, "max_position_embeddings": 8192})
    sentence_layout(tmp_path, modes=("mean",))
    with Engine(str(tmp_path), dtype="float32", max_batch_tokens=32, max_length=8192, num_replicas=999) as engine:
        assert engine.plan.num_lanes == 1
        yield engine, Request([np.full(8000, 7, np.int32)], ("dense",))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + 60
    while not condition():
        assert time.perf_counter() < deadline
        time.sleep(0.005)


def test_short_texts_run_between_the_pieces(long_text: tuple[Engine, Request]) -> None:
    engine, request = long_text
    expected = engine.embed(["a"])
    long = engine.submit(request)
    until(lambda: engine._dispatcher._in_flight == 1)  # pyright: ignore
    for _ in range(5):
        assert np.array_equal(engine.embed(["a"]), expected)
    assert not long.done()
    long.cancel()


@pytest.mark.parametrize("count", [20, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_text_that_is_cancelled_half_way_frees_everything(count: int, long_text: tuple[Engine, Request]) -> None:
    engine, request = long_text
    dispatcher: Any = engine._dispatcher

    def cancelled() -> None:
        future: Future[Any] = engine.submit(request)
        until(lambda: dispatcher._in_flight == 1)
        future.cancel()
        until(lambda: dispatcher._in_flight == 0)

    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    cancelled()
    before = num_tensors()
    started = time.perf_counter()
    for _ in range(count):
        cancelled()
    until(lambda: num_tensors() <= before)  # the lane may still leave the last one
    assert time.perf_counter() - started < count * 2  # it does not run to its end
    assert len(dispatcher._jobs) == dispatcher._num_bytes == 0
    assert np.isfinite(engine.embed(["a"])).all()


def test_a_text_whose_deadline_passes_half_way_is_dropped(long_text: tuple[Engine, Request]) -> None:
    engine, request = long_text
    dropped: list[str] = []
    sizes: list[float] = []
    ends = [
        subscribe(CounterEvent, lambda event: dropped.append(event.name)),
        subscribe(HistogramEvent, lambda event: sizes.append(event.value) if event.name == "batch_tokens" else None),
    ]
    with pytest.raises(DeadlineExceeded):
        engine.run(request, Scheduling(deadline=time.perf_counter() + 0.1))
    until(lambda: engine._dispatcher._in_flight == 0)  # pyright: ignore
    for end in ends:
        end()
    assert "dropped" in dropped
    assert 8000 not in sizes


def test_an_engine_that_closes_finishes_a_split_text(long_text: tuple[Engine, Request]) -> None:
    engine, _ = long_text
    future = engine.submit(Request([np.full(500, 7, np.int32)], ("dense",)))
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert future.result(60).outputs.dense is not None
    closing.join(60)
    assert not closing.is_alive()


def plan_of(folder: Any, *, memory: int = 0, **options: Any) -> Any:
    return make_plan(Options(**options), read_card(Path(folder), "m"), Hardware(num_cores=2, memory=memory))


def test_the_plan_of_causal_models(embedder: str) -> None:
    assert plan_of(embedder).chunked_prefill
    assert plan_of(embedder).prefix_cache_bytes == 2**28
    assert plan_of(embedder, memory=2**30).prefix_cache_bytes == 2**27
    assert plan_of(embedder, prefix_cache_bytes=0).prefix_cache_bytes == 0
    assert not plan_of(embedder, chunked_prefill=False).chunked_prefill
    with pytest.raises(SetupError, match="1,073,741,825; the device has 1,073,741,824 bytes"):
        plan_of(embedder, memory=2**30, prefix_cache_bytes=2**30 + 1)
    with pytest.raises(SetupError, match="prefix_cache_bytes is -1"):
        plan_of(embedder, prefix_cache_bytes=-1)
    with pytest.raises(SetupError, match="max_batch_tokens is 0"):
        plan_of(embedder, max_batch_tokens=0)


def test_models_that_look_both_ways_are_not_split(minilm: Path) -> None:
    plan = plan_of(minilm)
    assert (plan.chunked_prefill, plan.prefix_cache_bytes) == (False, 0)
    assert plan_of(minilm, prefix_cache_bytes=0).prefix_cache_bytes == 0
    for option in ({"chunked_prefill": True}, {"prefix_cache_bytes": 2**20}):
        with pytest.raises(SetupError, match="attend to those after them"):
            plan_of(minilm, **option)


def test_convolutions_are_not_split(tmp_path: Path) -> None:
    layers = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}
    write_model(tmp_path, "Lfm2", DECODER | layers)
    sentence_layout(tmp_path, modes=("lasttoken",))
    assert not plan_of(tmp_path).chunked_prefill
    with pytest.raises(SetupError, match="short convolutions"):
        plan_of(tmp_path, chunked_prefill=True)
    with Engine(str(tmp_path), dtype="float32", max_batch_tokens=32) as engine:
        seqs = engine.preprocessor.preprocess(Request(TEXTS, prompt=PROMPT)).seqs
        assert not any(seq.prefix_tokens for seq in seqs)


def test_a_text_longer_than_the_positions_is_refused_or_cut(embedder: str) -> None:
    with load(embedder, max_batch_tokens=32) as engine:
        with pytest.raises(TooLong):
            engine.embed(["far " * 700], truncate="never")
        assert engine.embed(["far " * 700], truncate="right").shape == (1, 48)


def test_preprocessors_of_other_processes_find_the_same_prefixes(reranker: str) -> None:
    with load(reranker) as engine:
        other = Preprocessor(Path(reranker), engine.card, engine.plan)
        request = Request([(QUERY, each) for each in DOCUMENTS])
        found, expected = (each.preprocess(request).seqs for each in (other, engine.preprocessor))
        assert [seq.prefix_tokens for seq in found] == [seq.prefix_tokens for seq in expected]


def test_the_plan_is_shown(embedder: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan, card = plan_of(embedder), read_card(Path(embedder), "m")
    print_card(card, plan, Checkpoint(Path(embedder), "m"), as_json=False)
    shown = capsys.readouterr().out
    assert "512 tokens; longer texts run in pieces" in shown
    assert "268,435,456 bytes" in shown


HEADS: dict[str, tuple[Callable[[Path], Any], OutputName]] = {
    "classes of texts": (lambda folder: write_classifier(folder, "qwen3", num_labels=3, pad_token_id=7), "scores"),
    "classes of tokens": (lambda folder: write_classifier(folder, "qwen2", "ForTokenClassification"), "token_scores"),
    "rewards of tokens": (lambda folder: write_reward(folder, "Qwen2ForRewardModel", 1), "token_scores"),
}


def write_reward(folder: Path, architecture: str, num_labels: int) -> None:
    write_classifier(folder, "qwen2", num_labels=num_labels, pad_token_id=None)
    two_layers(folder, num_labels)
    edit_json(folder / "config.json", architectures=[architecture], id2label=None, label2id=None, pad_token_id=None)


@pytest.mark.parametrize("case", HEADS)
def test_heads_over_pieces(case: str, tmp_path: Path) -> None:
    """Scores and scores of tokens of a text in pieces are those of one pass, to 1e-6 in float32."""
    write, name = HEADS[case]
    torch.manual_seed(0)  # scores near zero, as other weights may give, have no relative error that means anything
    write(tmp_path)
    request = Request(["The whimbrel is a wader that flies far, far away to the south.", "a"], (name,), activate=False)
    found: list[Any] = []
    for chunked in (True, False):
        with Engine(str(tmp_path), dtype="float32", max_batch_tokens=5, chunked_prefill=chunked) as engine:
            assert engine.plan.chunked_prefill == chunked
            seqs = engine.preprocessor.preprocess(request).seqs
            assert seqs[0].ids.size > 15
            found.append(getattr(engine.run(request).outputs, name))
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) <= 1e-6
