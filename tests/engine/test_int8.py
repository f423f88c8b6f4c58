"""int8: near float32, measured at each load, and the same bits in any batch."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints.classifiers import write_classifier
from checkpoints.late_interaction import write_stanford
from checkpoints.sparse import splade_layout, write_splade
from texts import TEXTS
from whimbrel import Engine
from whimbrel.engine import quantize
from whimbrel.errors import CheckpointError, SetupError
from whimbrel.model.cpu import cpu
from whimbrel.model.ops import quantization
from whimbrel.types.request import Request
from whimbrel_bench.random_models import Size, write_qwen3

promise = "In int8 a text has the same bits in any batch, and the distance to float32 is measured and told."

pytestmark = pytest.mark.skipif(not cpu().vnni, reason="this processor has no VNNI")


@pytest.fixture(scope="module")
def engine8() -> Iterator[Engine]:
    with Engine(dtype="int8") as engine:
        yield engine


def test_vectors_are_near_those_of_float32(engine8: Engine, engine32: Engine) -> None:
    """Long texts, empty ones, other languages: none is far off."""
    texts = TEXTS[::3]
    cosines = (engine32.embed(texts) * engine8.embed(texts)).sum(axis=1)
    assert cosines.min() >= 0.994
    assert cosines.mean() >= 0.998


def test_the_ten_best_of_1000_sentences_are_mostly_those_of_float32(engine8: Engine, engine32: Engine) -> None:
    sentences = _sentences()
    assert len(sentences) >= 1100
    documents, queries = sentences[:1000], [" ".join(each.split()[:10]) for each in sentences[1000:1100]]
    best = [np.argsort(-(engine.embed(queries) @ engine.embed(documents).T), axis=1)[:, :10] for engine in (engine32, engine8)]
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(*best, strict=True)]) >= 0.95


def _sentences() -> list[str]:
    """Return sentences of the docs in a random order."""
    text = " ".join(path.read_text() for path in sorted((Path(__file__).parents[2] / "docs").rglob("*.md")))
    found = sorted({each.strip() for each in re.split(r"[.!?]\s+|\n\s*\n|\|", text) if 40 < len(each.strip()) < 400})
    random.Random(0).shuffle(found)
    return found


def test_the_quality_is_measured_and_told(engine8: Engine, engine32: Engine) -> None:
    quality = engine8.plan.int8
    assert quality is not None
    assert quality.num_texts == len(quantize.SAMPLE_TEXTS)
    assert 0.997 <= quality.least <= quality.mean < 1
    texts = list(quantize.SAMPLE_TEXTS)
    cosines = (engine32.embed(texts) * engine8.embed(texts)).sum(axis=1)
    assert quality.mean == pytest.approx(cosines.mean(), abs=1e-5)
    assert quality.least == pytest.approx(cosines.min(), abs=1e-5)
    assert "cosine to float32" in str(quality)
    assert "low" not in str(quality)
    assert "low" in str(quantize.Int8Quality(0.97, 0.9, 24))
    assert engine32.plan.int8 is None


def test_a_text_has_the_same_bits_alone_and_in_any_batch(engine8: Engine) -> None:
    texts = TEXTS[::15]
    together = engine8.embed(texts)
    assert all(np.array_equal(engine8.embed([text])[0], row) for text, row in zip(texts, together, strict=True))
    assert engine8.plan.same_bits


def test_two_loads_have_the_same_bits(engine8: Engine) -> None:
    with Engine(dtype="int8") as again:
        assert np.array_equal(again.embed(TEXTS[:20]), engine8.embed(TEXTS[:20]))
        assert again.plan.int8 == engine8.plan.int8


def _qwen3(folder: Path) -> None:
    write_qwen3(folder, Size(128, 384, 2, 4, 2, 32))


def _classifier(folder: Path) -> None:
    write_classifier(folder, "bert")


def _splade(folder: Path) -> None:
    write_splade(folder)
    splade_layout(folder)


def test_a_decoder_over_the_vocabulary_is_in_int8_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _splade(tmp_path)
    widths: list[int] = []
    begin = quantization.Quantization.begin
    monkeypatch.setattr(
        quantization.Quantization,
        "begin",
        lambda self, weight, *rest: (widths.append(len(weight)), begin(self, weight, *rest))[1],
    )
    request = Request(TEXTS[:9], ("sparse",))
    with Engine(str(tmp_path), dtype="int8") as engine:
        together = engine.run(request).outputs.sparse
        alone = [engine.run(Request([text], ("sparse",))).outputs.sparse for text in TEXTS[:9]]
    assert together is not None
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] in widths
    for i, each in enumerate(alone):
        assert each is not None
        part = slice(*together.offsets_N1[i : i + 2])
        assert np.array_equal(together.ids_X[part], each.ids_X)
        assert np.array_equal(together.weights_X[part], each.weights_X)


@pytest.mark.parametrize("write", [write_stanford, _classifier, _qwen3, _splade])
def test_other_models_and_outputs(write: Callable[[Path], Any], tmp_path: Path) -> None:
    write(tmp_path)
    with Engine(str(tmp_path), dtype="int8") as engine:
        assert engine.plan.int8 is not None
        assert engine.plan.int8.mean >= 0.98


def test_a_model_that_int8_changes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "smoothing", lambda largest_I, _: torch.logspace(-4, 4, len(largest_I)))
    with pytest.raises(SetupError, match=r"in int8 this model's results have a mean cosine of -?0\.") as caught:
        Engine(dtype="int8")
    assert "float32" in (caught.value.hint or "")


def test_sample_texts_that_give_nan_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_layer = quantization.QuantizedLinear.quantize

    def spoil(layer: Any) -> None:
        layer._largest_I[0] = torch.nan
        quantize_layer(layer)

    monkeypatch.setattr(quantization.QuantizedLinear, "quantize", spoil)
    with pytest.raises(CheckpointError, match="NaN or infinity for the sample texts"):
        Engine(dtype="int8")
