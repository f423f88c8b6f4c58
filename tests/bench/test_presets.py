"""Presets: random models that libraries load too, the workloads' sizes, and a run of each."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig

from whimbrel import Engine
from whimbrel_bench import presets, random_models
from whimbrel_bench.backends import Sample
from whimbrel_bench.load import Outcome, Report
from whimbrel_bench.random_models import Size
from whimbrel_bench.results import Setting, make_result

SMALL = Size(64, 128, 2, 4, 2, 16)
TEXTS = ["the of and to", "attention is all you need", "Zwölf Boxkämpfer! 3.14", "without a system"]


@pytest.mark.parametrize("write", [random_models.write_qwen3, random_models.write_bert])
def test_a_random_model_is_the_same_in_sentence_transformers(write: Callable[[Path, Size], None], tmp_path: Path) -> None:
    write(tmp_path, SMALL)
    expected = SentenceTransformer(str(tmp_path), device="cpu", model_kwargs={"dtype": "float32"}).encode(TEXTS)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert np.abs(engine.embed(TEXTS) - expected).max() < 1e-5


def test_a_random_gritlm_has_the_config_of_mistral(tmp_path: Path) -> None:
    random_models.write_gritlm(tmp_path, SMALL)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.hidden_size, config.num_key_value_heads) == ("mistral", 64, 2)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert engine.card.instruction is not None
        assert np.linalg.norm(engine.embed(TEXTS), axis=1) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("scale", ["small", "full"])
def test_random_queries_have_the_length_that_the_model_is_written_for(scale: str) -> None:
    preset = presets.read_preset("rerank", scale)
    query = preset.samples()[0].query
    assert query is not None
    assert preset.writer_options["query_tokens"] == len(query.split()) + 3  # [CLS], [SEP] and the marker of a query


def test_queries_of_the_rerank_preset_are_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    preset = presets.read_preset("rerank", "small")
    preset.write(tmp_path)
    sample = preset.samples()[0]
    query, document = sample.query, sample.texts[0]
    assert query is not None
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert len(engine.multi_vector(query, input_type="query")[0]) == len(query.split()) + 3
        assert engine.rerank(query, [document])[0].score != 0


def test_workloads_have_the_sizes_of_their_sources() -> None:
    grit = presets.read_preset("gritlm", "full")
    samples = grit.samples()
    assert (len(samples), grit.load.num_warmups, grit.load.concurrency) == (2000, 20, None)
    assert samples[8].texts[0].endswith(" (8)")
    vectors = presets.read_preset("token-vectors", "full")
    ((texts, *_),) = vectors.samples()
    assert len(texts) == 16
    assert (texts[0].count("retrieval"), texts[-1].count("retrieval")) == (8, 192)
    assert not vectors.serve  # batches are as large as the device wants them
    assert (vectors.load.concurrency, vectors.load.duration, vectors.load.new_connections) == (4, 120.0, True)
    rerank = presets.read_preset("rerank", "full")
    samples = rerank.samples()
    assert (len(samples), rerank.load.concurrency) == (2000, 64)
    tokens = sum(sample.num_tokens or 0 for sample in samples)
    assert tokens == pytest.approx(2000 * 2048, rel=0.3)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_published_figures_are_marked_as_not_from_this_run(name: str) -> None:
    preset = presets.read_preset(name, "small")
    report = Report([Outcome(0, 0.0, 0.0, 0.5, status=200, tokens=8)])
    setting = Setting("ours", preset.target.backend, "m/x", "m/x", 1, preset.load)
    result = make_result(setting, [Sample(("a",))], [report])
    text = presets.beside_published(preset, result, hardware="here", model="a model")
    assert "Not from this run" in text
    assert text.count(preset.hardware) == 2
    assert all(figure in text for figures in preset.published.values() for figure in figures)
    assert re.search(r"\| hardware +\| +here ", text)
    assert re.search(r"\| requests/s +\| +2.00 ", text)
    assert re.search(r"\| p99 ms +\| +500 ", text)


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
