"""Fields of a request: each has an effect or is rejected by name, and later requests are answered as before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.bge_m3 import M3_OUTPUTS, write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.rerankers import qwen, write_reranker
from comparisons import assert_same_outputs
from process_boundary import run_over_a_channel
from whimbrel import AsyncEngine, Engine
from whimbrel.errors import InvalidRequest
from whimbrel.types.request import Request

TEXTS = ["The whimbrel flies.", "", "far away"]


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("m3")
    write_m3(folder)
    with Engine(str(folder), dtype="float32", matryoshka=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("classifier")
    write_classifier(folder, "bert", num_labels=3)
    with Engine(str(folder), dtype="float32") as engine:
        yield engine


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"outputs": (["dense"],)}, "outputs"),
    ({"outputs": (None,)}, "outputs"),
    ({"outputs": ("dense", "scores")}, "outputs"),
    ({"input_type": "passage"}, "input_type"),
    ({"input_type": ["query"]}, "input_type"),
    ({"truncate": "middle"}, "truncate"),
    ({"prompt": 3}, "prompt"),
    ({"prompt_name": ["query"]}, "prompt_name"),
    ({"prompt_name": ""}, "prompt_name"),
    ({"prompt": "a ", "prompt_name": "b"}, "prompt"),
    ({"normalize": "no"}, "normalize"),
    ({"normalize": np.array([1, 0])}, "normalize"),
    ({"max_tokens": 12.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "12"}, "max_tokens"),
    ({"late_chunking": "no"}, "late_chunking"),
    ({"split_long": True, "truncate": "left"}, "truncate"),
    ({"instruction": "judge"}, "instruction"),
    ({"return_offsets": True}, "return_offsets"),
    ({"activate": False}, "activate"),
    ({"max_active_dims": 3}, "max_active_dims"),
    ({"outputs": ("sparse",), "dimensions": 8}, "dimensions"),
    ({"outputs": ("sparse",), "normalize": False}, "normalize"),
    ({"outputs": ("dense", "multi_vector"), "max_active_dims": 3}, "max_active_dims"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=str)
def test_what_would_not_count_is_refused(fields: dict[str, Any], param: str, m3: Engine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        m3.run(Request(TEXTS, **fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields", [{"dimensions": 2}, {"normalize": True}, {"max_active_dims": 2}, {"instruction": "judge"}], ids=str
)
@pytest.mark.parametrize("texts", [["a"], [("a", "b")], [np.array([5, 6])]], ids=str)
def test_scores_have_no_width(texts: Any, fields: dict[str, Any], classifier: Engine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        classifier.run(Request(texts, **fields))
    assert caught.value.param == next(iter(fields))
    assert classifier.run(Request(texts, activate=False)).outputs.scores is not None


def test_outputs_together_take_what_counts_for_one(m3: Engine) -> None:
    cut = m3.run(Request(TEXTS, M3_OUTPUTS, dimensions=8, max_active_dims=2)).outputs
    assert cut.dense is not None
    assert cut.dense.shape == (3, 8)
    assert_same_outputs(cut, m3.run(Request(TEXTS, ("sparse",), max_active_dims=2)).outputs, ("sparse",))


@pytest.mark.parametrize(
    "text", [("a",), (), ("a", "b", "c"), ("a", None), (1, 2), None, 3, ["a", "b"], b"a", np.array(5), np.array([[5]])], ids=str
)
def test_inputs_that_are_none_are_refused_by_engines_of_every_kind(text: Any, m3: Engine, classifier: Engine) -> None:
    """Wrong inputs are rejected also where the size of a text is read before it is validated."""
    for engine in (m3, classifier):
        before = engine.run(Request(TEXTS)).outputs
        with pytest.raises(InvalidRequest, match=r"input\[0\]"):
            engine.run(Request([text]))
        with pytest.raises(InvalidRequest, match=r"input\[0\]"):
            asyncio.run(AsyncEngine(engine).run(Request([text])))
        with pytest.raises(InvalidRequest, match=r"input\[0\]"):
            asyncio.run(run_over_a_channel(engine, [Request([text])]))
        assert_same_outputs(engine.run(Request(TEXTS)).outputs, before, ("dense",))


def test_a_prompt_that_is_no_string(m3: Engine) -> None:
    with pytest.raises(InvalidRequest, match="prompt: must be a string"):
        m3.embed("a", prompt=["query"])  # pyright: ignore[reportArgumentType]


def test_token_ids_have_no_instruction(tmp_path: Path) -> None:
    write_reranker(tmp_path, "Qwen3", qwen(), tie_word_embeddings=True)
    with Engine(str(tmp_path), reranker="qwen3", dtype="float32", max_length=300) as engine:
        with pytest.raises(InvalidRequest, match="instruction"):
            engine.run(Request([np.array([5, 6])], instruction="judge"))
        assert engine.run(Request([np.array([5, 6])])).outputs.scores is not None
