"""Prompts that a user adds to those of a checkpoint: the vectors of Sentence Transformers with the same prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from checkpoints.encoders import write_bert
from checkpoints.files import edit_json
from checkpoints.gliner_golden import write_gliner
from checkpoints.jina_v5 import write as write_v5
from checkpoints.late_interaction import write_pylate
from checkpoints.rerankers import qwen, write_reranker
from checkpoints.router import write_router
from checkpoints.sentence_layout import sentence_layout
from checkpoints.sparse import splade_layout, write_splade
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import InvalidRequest, SetupError

TEXTS = ["", "bird", "The whimbrel flies.", "far far away in a year " * 20]
FILE = {"query": "far ", "title": "in a year: "}
OWN = {"query": "query: ", "document": "The "}


def _bert(folder: Path, *, include_prompt: bool) -> Path:
    write_bert(folder)
    sentence_layout(folder, prompts=FILE, default_prompt_name="title", include_prompt=include_prompt)
    return folder


def _router(folder: Path) -> Path:
    write_router(folder, "heads")
    edit_json(folder / "model/config_sentence_transformers.json", prompts=FILE, default_prompt_name="title")
    return folder / "model"


FORMS: dict[str, Callable[[Path], Path]] = {
    "bert": lambda folder: _bert(folder, include_prompt=True),
    "prompts are not pooled": lambda folder: _bert(folder, include_prompt=False),
    "router": _router,
}


@pytest.mark.parametrize("form", FORMS)
def test_prompts_replace_and_join_those_of_the_files(form: str, tmp_path: Path) -> None:
    folder = FORMS[form](tmp_path)
    reference = SentenceTransformer(str(folder), device="cpu", prompts=OWN)
    texts = TEXTS[1:] if "not pooled" in form else TEXTS
    with Engine(str(folder), dtype="float32", prompts=OWN) as engine:
        assert engine.card.prompts == FILE | OWN
        assert np.allclose(engine.embed(texts, input_type="query"), reference.encode_query(texts), atol=1e-5)
        assert np.allclose(engine.embed(texts, input_type="document"), reference.encode_document(texts), atol=1e-5)
        if form == "router":
            return
        assert np.allclose(engine.embed(texts), reference.encode(texts), atol=1e-5)
        for name in FILE | OWN:
            assert np.allclose(engine.embed(texts, prompt=name), reference.encode(texts, prompt_name=name), atol=1e-5)
        with pytest.raises(InvalidRequest, match="no prompt 'other'"):
            engine.embed(texts, prompt="other")
    with Engine(str(folder), dtype="float32") as engine:
        assert not np.allclose(engine.embed(texts, input_type="query"), reference.encode_query(texts), atol=1e-3)


def _sparse(folder: Path) -> None:
    write_splade(folder)
    splade_layout(folder)


@pytest.mark.parametrize("write", [_sparse, write_pylate], ids=["sparse", "late interaction"])
def test_added_prompts_are_those_of_files(write: Callable[[Path], object], tmp_path: Path) -> None:
    """The numbers of prompts in the files are compared with the reference elsewhere."""
    write(tmp_path)
    added = read_card(tmp_path, "m", prompts=OWN)
    edit_json(tmp_path / "config_sentence_transformers.json", prompts={**read_card(tmp_path, "m").prompts, **OWN})
    assert read_card(tmp_path, "m") == added


def test_prompts_without_a_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gliner").mkdir()
    write_gliner(tmp_path / "gliner")
    with pytest.raises(SetupError, match="this model's prompt is made of the labels"):
        read_card(tmp_path / "gliner", "m", prompts={"query": ""})
    write_v5(tmp_path / "v5", "nano")
    assert read_card(tmp_path / "v5", "m", prompts={"query": "find: "}).prompts["query"] == "find: "
    with pytest.raises(SetupError, match="'retrieval' is a task of the model"):
        read_card(tmp_path / "v5", "m", prompts={"retrieval": "x"})
    write_reranker(tmp_path / "reranker", "Qwen3", qwen())
    card = read_card(tmp_path / "reranker", "m", reranker="qwen3", prompts={"web": "Find facts."})
    assert card.prompts == {"web": "Find facts."}
    with pytest.raises(SetupError, match="the model's template has no place for them"):
        read_card(tmp_path / "reranker", "m", reranker="zerank", prompts={"web": "Find facts."})
    assert read_card(tmp_path / "reranker", "m", reranker="zerank", prompts={"web": ""}).prompts == {"web": ""}
