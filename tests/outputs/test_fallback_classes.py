"""Classifiers of architectures that transformers runs, against transformers' own classes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from checkpoints.classifiers import TEXTS, logits_of
from checkpoints.encoders import bert_tokenizer
from checkpoints.fallback import CASES
from checkpoints.families import DECODER, write_model
from checkpoints.files import edit_json
from checkpoints.weights import is_norm, randomise
from comparisons import assert_close
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError
from whimbrel.types.request import Request

FEW = ("phi3", "gpt2", "smollm3", "ministral", "olmo2")


def write_classes(folder: Path, name: str, form: str, config: dict[str, Any]) -> Any:
    """A random checkpoint of a class, with a tokenizer; transformers' own model."""
    tokenizer = bert_tokenizer()
    wanted = config | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = getattr(transformers, name + form)(getattr(transformers, f"{name}Config")(**wanted)).eval()
    randomise(model, near_one=lambda key: is_norm(key) or re.search(r"ln_.*weight$", key) is not None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", model_max_length=40)
    return model


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.sample(3)
def test_scores_of_texts(case: str, num_labels: int, tmp_path: Path) -> None:
    """Scores of texts are those of transformers' class, whose head takes the last token, alone and in a batch."""
    name, config = CASES[case]
    model = write_classes(tmp_path, name, "ForSequenceClassification", config | {"num_labels": num_labels})
    with Engine(str(tmp_path), dtype="float32") as engine:
        found = engine.classify(TEXTS, activate=False).scores_NC
        expected = logits_of(tmp_path, model, TEXTS)
        assert_close(found, expected)
        alone = np.concatenate([engine.classify([text], activate=False).scores_NC for text in TEXTS])
        np.testing.assert_array_equal(found, alone)
        activated = engine.classify(TEXTS).scores_NC
        softmax = np.exp(expected - expected.max(axis=1, keepdims=True))
        wanted = expected if num_labels == 1 else softmax / softmax.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(activated, wanted, atol=1e-5)


@pytest.mark.parametrize("case", ["phi3", "smollm3", "ministral"])
@pytest.mark.sample(1)
def test_scores_of_tokens(case: str, tmp_path: Path) -> None:
    """Scores of tokens are those of transformers' class."""
    name, config = CASES[case]
    labels = dict(enumerate(["O", "B-PER", "B-LOC"]))
    model = write_classes(tmp_path, name, "ForTokenClassification", config | {"id2label": labels})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        result = engine.run(Request(TEXTS, ("token_scores",), activate=False)).outputs.token_scores
        assert result is not None
        for index, text in enumerate(TEXTS):
            with torch.no_grad():
                expected = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0].numpy()
            assert_close(result[index], expected)


ROUGH = {"mobilebert": 4e-4, "roberta prelayernorm": 1e-4}
"""Cases whose reference differs by more than 1e-5 from its own result in float64."""
OWN = ("albert", "data2vec", "ernie", "mobilebert", "roberta prelayernorm", "xmod")


@pytest.mark.parametrize("case", OWN)
@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.sample(4)
def test_scores_of_texts_of_encoders(case: str, num_labels: int, tmp_path: Path) -> None:
    """Scores of texts are those of transformers' class, whose head takes the first token, alone and in a batch."""
    name, config = CASES[case]
    model = write_classes(tmp_path, name, "ForSequenceClassification", config | {"num_labels": num_labels})
    with Engine(str(tmp_path), dtype="float32") as engine:
        found = engine.classify(TEXTS, activate=False).scores_NC
        expected = logits_of(tmp_path, model, TEXTS)
        assert_close(found, expected, ROUGH.get(case, 1e-5))
        alone = np.concatenate([engine.classify([text], activate=False).scores_NC for text in TEXTS])
        np.testing.assert_array_equal(found, alone)
        wanted = 1 / (1 + np.exp(-expected)) if num_labels == 1 else np.exp(expected) / np.exp(expected).sum(1, keepdims=True)
        np.testing.assert_allclose(engine.classify(TEXTS).scores_NC, wanted, atol=ROUGH.get(case, 1e-5))


@pytest.mark.parametrize("case", ["gpt2", *OWN])
@pytest.mark.sample(3)
def test_scores_of_tokens_of_encoders(case: str, tmp_path: Path) -> None:
    """Scores of tokens are those of transformers' class."""
    name, config = CASES[case]
    labels = dict(enumerate(["O", "B-PER", "B-LOC"]))
    model = write_classes(tmp_path, name, "ForTokenClassification", config | {"id2label": labels})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        result = engine.run(Request(TEXTS, ("token_scores",), activate=False)).outputs.token_scores
        for index, text in enumerate(TEXTS):
            with torch.no_grad():
                expected = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0].numpy()
            assert_close(result[index], expected, ROUGH.get(case, 1e-5))


def test_heads_of_another_kind_are_refused(tmp_path: Path) -> None:
    """A class of transformers with a head of its own is refused with the kind that is supported."""
    write_model(tmp_path, "Phi3", DECODER)
    edit_json(tmp_path / "config.json", architectures=["ConvBertForSequenceClassification"], model_type="convbert")
    with pytest.raises(
        CheckpointError, match=r"config.json: architectures: ConvBertForSequenceClassification has a head of its own"
    ):
        read_card(tmp_path, "m")
