"""NaN and infinity stay visible between the model and the answer: activations and norms do not hide them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.sparse import splade_layout, write_splade
from needs import skip_without_bfloat16
from whimbrel import Engine
from whimbrel.errors import NonFinite
from whimbrel.model.head_functions import load_head
from whimbrel.model.pooling import ACTIVATIONS, normalize
from whimbrel.model.weights import Weights
from whimbrel.types.heads import Activation, Dense
from whimbrel.types.request import OutputName, Request

BAD = (np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("finish", ["sigmoid", "softmax"])
def test_an_activation_of_scores_shows_what_is_not_finite(finish: Any) -> None:
    scores = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    plain = {"sigmoid": torch.sigmoid, "softmax": lambda x: x.softmax(-1)}[finish](scores)
    for bad in BAD:
        spoilt = scores.clone()
        spoilt[2, 1] = bad
        found = ACTIVATIONS[finish](spoilt)
        assert not found[2].isfinite().all()
        assert torch.equal(found[[0, 1, 3, 4]], plain[[0, 1, 3, 4]])


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "gelu", "gelu_tanh", "silu", "identity"])
def test_an_activation_within_a_head_shows_it_too(activation: Activation, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    weights = {"a.weight": torch.randn(8, 32, generator=generator), "a.bias": torch.randn(8, generator=generator)}
    save_file(weights, tmp_path / "model.safetensors")
    with Weights(tmp_path) as stored:
        head = load_head(
            Dense(None, "a", 32, 8, True, activation), tmp_path, stored, torch.device("cpu"), torch.float32, quantization=None
        )
    x_RI = torch.randn(16, 32, generator=generator)
    plain = head(x_RI)
    for bad in BAD:
        spoilt = x_RI.clone()
        spoilt[3, 7] = bad
        found = head(spoilt)
        assert not found[3].isfinite().any()
        assert torch.equal(found[4:], plain[4:])


def test_a_norm_that_overflows_gives_no_zeros() -> None:
    rows = torch.randn(6, 48, generator=torch.Generator().manual_seed(3))
    rows[1] = 0
    assert torch.allclose(normalize(rows), F.normalize(rows, dim=-1), atol=1e-7, rtol=1e-6)
    rows[4] = 1e30
    assert normalize(rows)[4].isnan().all()


WORDS = ["bird", "wader", "bill", "far", "long", "year", "query", "fly", "Europe", "Asia", "a", "curved", "passage", "some"]


def test_a_logit_that_overflows_fails_its_text_alone(tmp_path: Path) -> None:
    """The sigmoid of infinity would be 1."""
    model = write_classifier(tmp_path, "distilbert", num_labels=1)
    with Engine(str(tmp_path), dtype="float32") as engine:
        ids = [seq.ids for seq in engine.preprocessor.preprocess(Request(WORDS)).seqs]
    rows = [*ids, *(np.zeros(size, np.int32) for size in (1, 16, 40))]  # these it is warmed up with
    with torch.no_grad():
        hidden = torch.stack([model.distilbert(torch.from_numpy(row[None].astype(np.int64)))[0][0, 0] for row in rows])
        pooled = model.pre_classifier(hidden).relu().numpy()
    order = np.sort(pooled, axis=0)
    middle = (order[-1] + order[-2]) / 2
    gaps = np.where((pooled.argmax(axis=0) < len(WORDS)) & (middle > 1), order[-1] - order[-2], 0.0)
    column = int(gaps.argmax())  # where one of the words is furthest from the others
    culprit = int(pooled[:, column].argmax())
    limit = middle[column]
    assert gaps[column] > 0
    weights = load_file(tmp_path / "model.safetensors")
    weights["classifier.weight"] = torch.zeros(1, 48)
    weights["classifier.weight"][0, column] = float(np.finfo(np.float32).max / limit)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    others = [word for index, word in enumerate(WORDS) if index != culprit]
    with Engine(str(tmp_path), dtype="float32") as engine:
        futures = [engine.submit(Request([word])) for word in others]
        for activate in (None, False):
            with pytest.raises(NonFinite, match="NaN or infinity") as caught:
                engine.run(Request([others[0], WORDS[culprit], *others[1:]], activate=activate))
            assert caught.value.param == "input[1]"
        for future in futures:
            assert np.isfinite(future.result(60).outputs.scores).all()


def splade(folder: Path) -> None:
    write_splade(folder)
    splade_layout(folder)


def classifier(folder: Path) -> None:
    write_classifier(folder, "roberta", num_labels=3)


def tagger(folder: Path) -> None:
    write_classifier(folder, "roberta", "ForTokenClassification", num_labels=3)


MODELS: list[tuple[Callable[[Path], Any], OutputName]] = [
    (write_m3, "dense"), (write_m3, "sparse"), (write_m3, "multi_vector"), (splade, "sparse"), (classifier, "scores"),
    (tagger, "token_scores"),
]  # fmt: skip


@pytest.fixture(params=MODELS, ids=lambda model: f"{model[0].__name__} {model[1]}")
def faulty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Engine, Engine, OutputName]]:
    """An engine in bfloat16 that obeys, one in float32 that does not, and an output."""
    skip_without_bfloat16()
    make, output = request.param
    make(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHIMBREL_RUNNER", "fault_injection:FaultyRunner")
        obeying = Engine(str(tmp_path), dtype="bfloat16")
    with obeying, Engine(str(tmp_path), dtype="float32") as exact:
        yield obeying, exact, output


def test_a_row_of_any_output_that_is_not_finite_is_an_error(faulty: tuple[Engine, Engine, OutputName]) -> None:
    obeying, exact, output = faulty
    good = obeying.submit(Request(["a bird"], (output,)))
    for word in ("nan-low", "nan"):
        with pytest.raises(NonFinite, match="--dtype float32") as caught:
            obeying.run(Request(["a bird", f"birds @@{word}"], (output,)))
        assert caught.value.param == "input[1]"
    assert good.result(60).num_tokens
    assert np.isfinite(np.array(getattr(exact.run(Request(["birds @@nan-low"], (output,))).outputs, output)[0])).all()
