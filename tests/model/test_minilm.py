"""Parity of the packaged model with Sentence Transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from parity import Parity
from texts import AWKWARD, TEXTS
from whimbrel import Engine
from whimbrel.types.request import Request


@pytest.mark.extended
def test_float32_is_sentence_transformers_to_1e5(engine32: Engine, reference: np.ndarray, parity: Parity) -> None:
    assert len(TEXTS) >= 1000
    vectors = engine32.embed(TEXTS)
    assert np.abs(vectors - reference).max() <= 1e-5
    parity(vectors, reference, "sentence-transformers/all-MiniLM-L6-v2", family="bert", tasks=["dense"], verified="weights")


def test_few_texts_have_sentence_transformers_vectors(engine: Engine, engine32: Engine, minilm: Path) -> None:
    """Test float32 and the plan's dtype; `make test-cpus` runs this on every processor."""
    texts = TEXTS[::40]
    expected = SentenceTransformer(str(minilm), device="cpu").encode(texts)
    assert np.abs(engine32.embed(texts) - expected).max() <= 1e-5
    assert (engine.embed(texts) * expected).sum(axis=1).min() >= 0.999


@pytest.mark.bfloat16
@pytest.mark.extended
def test_bfloat16_has_the_same_direction(reference: np.ndarray) -> None:
    with Engine(dtype="bfloat16") as engine:
        cosines = (engine.embed(TEXTS) * reference).sum(axis=1)
    assert cosines.min() >= 0.999


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.sample(1)
def test_a_text_has_the_same_bits_alone_and_in_any_batch(dtype: str) -> None:
    texts = [*AWKWARD, *TEXTS[20:120:7], *TEXTS[320:345]]
    with Engine(dtype=dtype) as small, Engine(dtype=dtype, max_batch_tokens=4096) as large:
        alone = np.stack([small.embed(text) for text in texts])
        assert np.array_equal(alone, small.embed(texts))
        assert np.array_equal(alone, small.embed(texts[::-1])[::-1])
        assert np.array_equal(alone, large.embed(texts))
        assert np.array_equal(alone[3:8], large.embed(texts[3:8]))


def test_token_ids_with_special_tokens_give_the_text_s_vector(engine: Engine, minilm: object) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(minilm))
    texts = ["a whimbrel", "", "word " * 400]
    ids = [np.array(tokenizer(text, truncation=False)["input_ids"], np.int64) for text in texts]
    assert np.array_equal(engine.run(Request(ids)).dense, engine.embed(texts))


def test_vectors_are_unit_length_float32(engine: Engine) -> None:
    vectors = engine.embed(["a", "b c"])
    assert vectors.dtype == np.float32
    assert vectors.shape == (2, 384)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert engine.embed("a").shape == (384,)
    assert engine.embed([]).shape == (0, 384)
