"""Random models: libraries load them too, and give the same vectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from whimbrel import Engine
from whimbrel_bench import random_models
from whimbrel_bench.random_models import Size

SMALL = Size(64, 128, 2, 4, 2, 16)
TEXTS = ["the of and to", "attention is all you need", "Zwölf Boxkämpfer! 3.14", "without a system"]


@pytest.mark.parametrize("write", [random_models.write_qwen3, random_models.write_bert])
def test_a_random_model_is_the_same_in_sentence_transformers(write: Callable[[Path, Size], None], tmp_path: Path) -> None:
    write(tmp_path, SMALL)
    expected = SentenceTransformer(str(tmp_path), device="cpu", model_kwargs={"dtype": "float32"}).encode(TEXTS)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert np.abs(engine.embed(TEXTS) - expected).max() < 1e-5


def test_queries_of_a_random_colbert_are_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    query = "the of and to in is that for it as"
    random_models.write_colbert(tmp_path, SMALL, query_tokens=len(query.split()) + 3, document_tokens=512)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert len(engine.multi_vector(query, input_type="query")[0]) == len(query.split()) + 3
        assert engine.rerank(query, TEXTS)[0].score != 0
