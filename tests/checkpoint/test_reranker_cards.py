"""Files of rerankers that are language models: supported settings, and refusals with file and key."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from checkpoints.files import edit_json, write_json
from checkpoints.rerankers import CHAT, JSON, LONG_QUERY, gemma, mxbai_recipe, qwen, write_reranker, write_sentence_layout
from command import error, run
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.checkpoint.scores.conventions import CONVENTIONS
from whimbrel.engine.prepare import Preprocessor
from whimbrel.errors import CheckpointError
from whimbrel.model.runner import probe
from whimbrel.types.plan import Options, make_plan
from whimbrel.types.request import Request


def test_a_convention_is_known_by_id_or_stated(tmp_path: Path) -> None:
    write_reranker(tmp_path, "Qwen3", qwen())
    stated = read_card(tmp_path, "m", reranker="qwen3")
    assert read_card(tmp_path, "Qwen/Qwen3-Reranker-0.6B") == replace(stated, name="Qwen/Qwen3-Reranker-0.6B")
    assert read_card(tmp_path, "m", pooling="lasttoken").template is None
    assert read_card(tmp_path, "Qwen/Qwen3-Reranker-0.6B", pooling="lasttoken").template is None
    for name in ("Qwen3-Reranker-0.6B", "Qwen/Qwen3-Reranker-0.6B-copy"):
        with pytest.raises(CheckpointError, match=r"modules\.json: not found"):
            read_card(tmp_path, name)
    with pytest.raises(CheckpointError, match="leave out --pooling or --reranker"):
        read_card(tmp_path, "m", pooling="mean", reranker="qwen3")


def test_the_longest_text_of_a_convention(tmp_path: Path) -> None:
    write_reranker(tmp_path, "Qwen3", qwen(), max_position_embeddings=40_000)
    assert read_card(tmp_path, "m", reranker="qwen3").max_length == 8192
    write_reranker(tmp_path, "Qwen2", qwen(), max_position_embeddings=40_000)
    card = read_card(tmp_path, "m", reranker="mxbai-v2")
    assert 8192 < card.max_length < 9000
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    frontend = Preprocessor(tmp_path, card, make_plan(Options(), card, probe()))
    pair = (LONG_QUERY * 10, "Asia and Europe. " * 4000)
    assert frontend.preprocess(Request([pair])).seqs[0].ids.tolist() == mxbai_recipe(tokenizer, *pair, None, 8192)


BAD: list[tuple[str, JSON, str]] = [
    ("qwen3", {"architectures": ["Qwen3Model"]}, "config.json: architectures: 'Qwen3Model' has neither logits nor scores"),
    ("bge-gemma", {}, "config.json: architectures: 'Qwen3' is not what rerankers of the kind 'bge-gemma' are made of"),
    ("nemotron", {}, "config.json: architectures"),
    ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "config.json: id2label: 2 labels"),
    ("qwen3", {"architectures": ["CostWiseGemmaForCausalLM"]}, "config.json: architectures"),
    ("qwen3", {"tie_word_embeddings": False}, "model.safetensors: lm_head.weight: this tensor is missing"),
    ("qwen3", {"final_logit_softcapping": 30.0}, "config.json: "),
]


@pytest.mark.parametrize(("kind", "changes", "message"), BAD)
def test_checkpoints_that_do_not_follow_a_convention(kind: Any, changes: JSON, message: str, tmp_path: Path) -> None:
    write_reranker(tmp_path, "Qwen3", qwen(), tie_word_embeddings=True)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}"):
        Engine(str(tmp_path), reranker=kind)


def test_tokenizers_that_do_not_suit_a_template(tmp_path: Path) -> None:
    content, stated = copy.deepcopy(gemma())
    write_reranker(tmp_path, "Gemma", (content | {"post_processor": None}, stated))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: post_processor: puts no special token"):
        Engine(str(tmp_path), reranker="bge-gemma", tokenizer="transformers")
    del content["model"]["vocab"]["Yes"]
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if pair != ["Ye", "s"]]
    write_reranker(tmp_path, "Gemma", (content, stated))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: model: has no token 'Yes'"):
        Engine(str(tmp_path), reranker="bge-gemma")
    write_reranker(tmp_path, "Gemma", gemma())
    with pytest.raises(CheckpointError, match="leaves no room in the template"):
        Engine(str(tmp_path), reranker="bge-gemma", max_length=20)


LAYOUT_CHANGES: list[tuple[str, JSON, str]] = [
    ("sentence_bert_config.json", {"modality_config": None}, "sentence_bert_config.json: modality_config: is missing"),
    ("sentence_bert_config.json", {"modality_config": {"text": {}}}, "sentence_bert_config.json: modality_config: "),
    ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "sentence_bert_config.json: text: "),
    (
        "sentence_bert_config.json",
        {"processing_kwargs": {"chat_template": {"max_length": 3}}},
        "sentence_bert_config.json: processing_kwargs",
    ),
    ("sentence_bert_config.json", {"query_length": 3}, "sentence_bert_config.json: query_length: "),
    (
        "config_sentence_transformers.json",
        {"activation_fn": "torch.nn.modules.activation.Tanh"},
        "config_sentence_transformers.json: activation_fn: ",
    ),
    (
        "config_sentence_transformers.json",
        {"keep_in_fp32_modules": ["x"]},
        "config_sentence_transformers.json: keep_in_fp32_modules: ",
    ),
    (
        "config_sentence_transformers.json",
        {"default_prompt_name": "x"},
        "config_sentence_transformers.json: default_prompt_name: ",
    ),
    ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "config_sentence_transformers.json: prompts: "),
    ("1_LogitScore/config.json", {"true_token_id": 5000}, "1_LogitScore/config.json: true_token_id: 5000 is outside"),
    ("1_LogitScore/config.json", {"module_input_name": "x"}, "1_LogitScore/config.json: module_input_name: "),
    ("tokenizer_config.json", {"truncation_side": "left"}, "tokenizer_config.json: truncation_side: "),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    write_sentence_layout(folder, CHAT, form="ForCausalLM")
    return folder / "saved"


@pytest.mark.parametrize(("file", "changes", "message"), LAYOUT_CHANGES)
def test_what_is_refused_of_the_layout(file: str, changes: JSON, message: str, saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    read_card(folder, "m")
    edit_json(folder / file, **changes)
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}"):
        read_card(folder, "m")


def test_modules_of_the_layout(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    with pytest.raises(CheckpointError, match="leave out --reranker"):
        read_card(folder, "m", reranker="qwen3")
    rows = json.loads((folder / "modules.json").read_text())
    for changed, message in (
        ([rows[0]], "LogitScore if and only if"),
        ([rows[0], rows[1] | {"path": "../1_LogitScore"}], "leads out"),
        ([rows[0], rows[1] | {"type": "sentence_transformers.base.modules.dense.Dense"}], "LogitScore if and only if"),
        ([rows[0], rows[1] | {"type": "sentence_transformers.models.CNN"}], "type: "),
        ([rows[1], rows[0]], "must begin with one Transformer"),
        ([rows[0], rows[0]], "must begin with one Transformer"),
    ):
        write_json(folder / "modules.json", changed)
        with pytest.raises(CheckpointError, match=message):
            read_card(folder, "m")


TEMPLATES: list[tuple[str, str]] = [
    ("{{ messages[0].content }}", "has no place for the document"),
    ("{{ messages[0].content | upper }} {{ messages[1].content }}", "has no place for the query"),
    ("{{ messages[0].content }}{{ messages[1].content | replace('a', 'b') }}", "does more with query and document"),
    (
        "{% if messages[1].content %}{{ messages[0].content }}{{ messages[1].content }}{% endif %}",
        "does more with query and document",
    ),
    ("{{ messages[0].content[:40] }}{{ messages[-2].content }}{{ messages[-1].content }}", "does more with query and document"),
    ("{{ messages[0].content ", "does not render"),
    ("{{ messages[7].content.x }}", "does not render"),
    ("{{ raise_exception('no') }}", "does not render"),
    ("{{ messages.append(1) }}{{ messages[0].content }}{{ messages[1].content }}", "does not render"),
    ("{{ ''.__class__.__mro__ }}{{ messages[0].content }}{{ messages[1].content }}", "does not render"),
    ("{{ 1 // 0 }}", "does not render"),
    ("x" * 70_000, "has 70,000 characters"),
]


@pytest.mark.parametrize(("chat", "message"), TEMPLATES)
def test_chat_templates_that_are_refused(chat: str, message: str, saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(chat)
    with pytest.raises(CheckpointError, match=f"^chat_template.jinja: chat_template: .*{re.escape(message)}"):
        read_card(folder, "m")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match=r"^tokenizer_config\.json: chat_template: is missing"):
        read_card(folder, "m")


def test_templates_are_data(saved: Path) -> None:
    template = read_card(saved, "m").template
    assert template is not None
    conventional = CONVENTIONS["qwen3"].template
    assert (template.texts, template.texts_with_instruction) == (conventional.texts, conventional.texts_with_instruction)
    assert template.parts(" a ", "b") == (" a ", "b")


def test_the_command_takes_a_convention(tmp_path: Path) -> None:
    write_reranker(tmp_path, "Qwen3", qwen())
    card = json.loads(run("show", str(tmp_path), "--reranker", "qwen3", "--json").stdout)["card"]
    assert list(card["outputs"]) == ["scores"]
    assert "it takes one of qwen3, mxbai-v2" in error("show", str(tmp_path), "--reranker", "qwen4")
