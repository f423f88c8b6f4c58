"""Presets: random models that libraries load too, the workloads' sizes, and a run of each."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel_bench import presets, random_models
from whimbrel_bench.cosines import cosines
from whimbrel_bench.random_models import Size
from whimbrel_bench.results import Result, Setting, make_result
from whimbrel_bench.seeds import SEEDS
from whimbrel_bench.words import CANDIDATES

SMALL = Size(64, 128, 2, 4, 2, 16)
TEXTS = ["the of and to", "attention is all you need", "Zwölf Boxkämpfer! 3.14", "without a system"]


def test_a_random_qwen3_is_the_same_in_sentence_transformers(tmp_path: Path) -> None:
    random_models.write_qwen3(tmp_path, SMALL, CANDIDATES)
    expected = SentenceTransformer(str(tmp_path), device="cpu", model_kwargs={"dtype": "float32"}).encode(TEXTS)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert np.abs(engine.embed(TEXTS) - expected).max() < 1e-5


def test_a_random_table_is_the_same_in_sentence_transformers(tmp_path: Path) -> None:
    random_models.write_table(tmp_path, 64, CANDIDATES)
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    with Engine(str(tmp_path), dtype="float32") as engine:
        found = engine.embed(TEXTS)
    assert cosines(list(found), list(np.asarray(expected, np.float32))).min() > 0.9999  # they sum in the table's bfloat16


def test_random_tokenizers_are_read_by_transformers(tmp_path: Path) -> None:
    """Ids are those of transformers, and words of the workload are one token each."""
    for name, write in (
        ("gritlm", lambda folder: random_models.write_gritlm(folder, SMALL, CANDIDATES)),
        (
            "jina",
            lambda folder: random_models.write_jina_colbert(folder, SMALL, CANDIDATES, query_tokens=20, document_tokens=99),
        ),
    ):
        folder = tmp_path / name
        folder.mkdir()
        write(folder)
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        assert len(theirs(" ".join(CANDIDATES[:100]), add_special_tokens=False)["input_ids"]) == 100
        for text in TEXTS:
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert ids
            assert max(ids) < read_card(folder, "m").encoder.vocab_size


def test_a_random_mistral_has_the_config_of_mistral(tmp_path: Path) -> None:
    random_models.write_gritlm(tmp_path, SMALL, CANDIDATES)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.hidden_size, config.num_key_value_heads) == ("mistral", 64, 2)
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size == config.vocab_size
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert np.linalg.norm(engine.embed(TEXTS), axis=1) == pytest.approx(1.0, abs=1e-5)


def test_queries_of_the_rerank_preset_are_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    preset = presets.PRESETS["rerank"](small=True)
    preset.write(tmp_path)
    query, document = preset.samples[0].query, preset.samples[0].texts[0]
    assert query is not None
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert len(engine.multi_vector(query, input_type="query")[0]) == len(query.split()) + 3
        assert engine.rerank(query, [document])[0].score != 0


def test_workloads_have_the_sizes_of_their_sources() -> None:
    grit = presets.PRESETS["gritlm"](small=False)
    assert (len(grit.samples), grit.load.num_warmups, grit.load.concurrency) == (2000, 20, None)
    assert grit.samples[8].texts[0].endswith(" (8)")
    vectors = presets.PRESETS["token-vectors"](small=False)
    ((texts, *_),) = vectors.samples
    assert len(texts) == 16
    assert (texts[0].count("retrieval"), texts[-1].count("retrieval")) == (8, 192)
    assert not vectors.serve  # batches are as large as the device wants them
    assert (vectors.load.concurrency, vectors.load.duration, vectors.load.new_connections) == (4, 120.0, True)
    rerank = presets.PRESETS["rerank"](small=False)
    assert (len(rerank.samples), rerank.load.concurrency) == (2000, 64)
    tokens = sum(sample.num_tokens or 0 for sample in rerank.samples)
    assert tokens == pytest.approx(2000 * 2048, rel=0.3)
    runs = presets.article_runs(presets.PRESETS["article"](small=True))
    assert [title for title, _ in runs] == [
        f"{count} texts, {mode}" for count in (32, 256) for mode in ("json", "orjson", "raw")
    ]
    assert all(len(run.samples) == 100 for _, run in runs)


def test_figures_of_the_article_stand_beside_ours() -> None:
    """Runs that were stopped or failed in part give no figure."""
    runs = [title for title, _ in presets.article_runs(presets.PRESETS["article"](small=True))]

    def result(duration: float, *, interrupted: bool = False) -> Result:
        setting = Setting("openai-embeddings", "m", "m", 1, float("inf"), None)
        return replace(make_result(setting, [], []), duration=duration, interrupted=interrupted)

    found = {title: result(2.0**number) for number, title in enumerate(runs)}
    ours = presets.article_figures(found)
    assert set(SEEDS["article"].rows) <= set(ours)
    assert (ours["32 texts, json / orjson"], ours["256 texts, orjson / raw"]) == ("0.50", "0.50")
    found["256 texts, raw"] = result(1.0, interrupted=True)
    assert {"256 texts, raw, s", "256 texts, orjson / raw"}.isdisjoint(presets.article_figures(found))


def test_published_figures_are_marked_as_not_from_this_run() -> None:
    for name, seed in SEEDS.items():
        text = presets.beside_seed(name, {"requests/s": "1.00"}, hardware="here", model="a model")
        assert "Not from this run" in text
        assert seed.hardware in text
        assert all(figure in text for figures in seed.rows.values() for figure in figures)
        assert "| here" in text or " here |" in text
    assert set(SEEDS) == set(presets.PRESETS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.extended if name == "gritlm" else pytest.mark.slow) for name in presets.PRESETS],
)
def test_a_preset_runs_with_a_model_and_a_server_of_its_own(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whimbrel", "bench", "serve", "--preset", name, "--scale", "small"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Not from this run" in done.stdout
    assert "wrote a random model" in done.stderr
    assert list(tmp_path.iterdir()) == []
