"""Cards: the files that are read, and refusal, with file and key, of every setting that is unknown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from checkpoints.encoders import write_bert, write_roberta
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import sentence_layout
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError
from whimbrel.types.heads import Normalize


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    write_bert(folder)
    sentence_layout(folder, heads=(("Dense", 20, "torch.nn.modules.activation.Tanh", {}), "LayerNorm", "Normalize"))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    import shutil

    return shutil.copytree(saved, tmp_path / "model")


def test_the_card_of_minilm(minilm: Path) -> None:
    card = read_card(minilm, "minilm")
    assert (card.dense.width, card.max_length, card.dense.activated, card.dense.head) == (384, 256, True, ())
    assert card.dense.modes == ("mean",)
    assert (card.encoder.max_positions, card.encoder.position_offset) == (512, 0)
    assert (card.prompts, card.default_prompt_name, card.matryoshka) == ({}, None, False)


@pytest.mark.parametrize("new", [False, True])
def test_both_layouts_say_the_same(new: bool, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path, modes=("cls", "mean"), new=new, heads=("Normalize",), prompts={"query": "q: "})
    card = read_card(tmp_path, "m")
    assert card.dense.modes == ("cls", "mean")
    assert (card.dense.width, card.max_length, card.dense.activated, card.dense.head) == (96, 40, True, ())
    assert card.prompts == {"query": "q: "}


def test_a_normalize_before_the_end_is_part_of_the_head(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path, heads=("Normalize", "LayerNorm"))
    card = read_card(tmp_path, "m")
    assert card.dense.head[0] == Normalize()
    assert not card.dense.activated


@pytest.mark.parametrize(
    ("stated", "model_max", "expected"), [(40, None, 40), (64, 10, 64), (500, None, 64), (None, 30, 30), (None, int(1e30), 64), (None, None, 64)]
)  # fmt: skip
def test_max_length(stated: int | None, model_max: int | None, expected: int, tmp_path: Path) -> None:
    """Sentence Transformers' rule, but never more than there are positions: 66 rows less 2 in the RoBERTa family."""
    write_roberta(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "sentence_bert_config.json", max_seq_length=stated)
    edit_json(tmp_path / "tokenizer_config.json", model_max_length=model_max)
    assert read_card(tmp_path, "m").max_length == expected


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("config.json", "attention_window", {"attention_window": 8}),
    ("config.json", "auto_map", {"auto_map": {"AutoModel": "modeling_x.X"}}),
    ("config.json", "architectures", {"architectures": ["UMT5EncoderModel"]}),
    ("config.json", "architectures", {"architectures": ["BertForMine"]}),
    ("config.json", "architectures", {"architectures": [None]}),
    ("config.json", "architectures", {"architectures": "BertModel"}),
    ("config.json", "model_type", {"model_type": "roberta"}),
    ("config.json", "hidden_act", {"hidden_act": "os.abort"}),
    ("config.json", "position_embedding_type", {"position_embedding_type": "relative_key"}),
    ("config.json", "is_decoder", {"is_decoder": True}),
    ("config.json", "hidden_size", {"hidden_size": "48"}),
    ("config.json", "hidden_size", {"hidden_size": None}),
    ("config.json", "num_attention_heads", {"num_attention_heads": 5}),
    ("config.json", "num_hidden_layers", {"num_hidden_layers": 0}),
    ("config.json", "num_hidden_layers", {"num_hidden_layers": 10**9}),
    ("config.json", "vocab_size", {"vocab_size": True}),
    ("config.json", "pad_token_id", {"pad_token_id": 10**6}),
    ("config.json", "quantization_config", {"quantization_config": {"bits": 4}}),
    ("1_Pooling/config.json", "pooling_mode_attention", {"pooling_mode_attention": True}),
    ("1_Pooling/config.json", "pooling_mode", {"pooling_mode": "attention"}),
    ("1_Pooling/config.json", "pooling_mode", {"pooling_mode_mean_tokens": False}),
    ("1_Pooling/config.json", "pooling_mode_cls_token", {"pooling_mode_cls_token": "yes"}),
    ("1_Pooling/config.json", "word_embedding_dimension", {"word_embedding_dimension": 47}),
    ("2_Dense/config.json", "activation_function", {"activation_function": "os.abort"}),
    ("2_Dense/config.json", "in_features", {"in_features": 47}),
    ("2_Dense/config.json", "gate", {"gate": True}),
    ("2_Dense/config.json", "module_input_name", {"module_input_name": "all_layer_embeddings"}),
    ("3_LayerNorm/config.json", "dimension", {"dimension": 21}),
    ("sentence_bert_config.json", "transformer_task", {"transformer_task": "fill-mask"}),
    ("sentence_bert_config.json", "query_length", {"query_length": 32}),
    ("sentence_bert_config.json", "chunking", {"chunking": True}),
    ("sentence_bert_config.json", "max_seq_length", {"max_seq_length": -1}),
    ("sentence_bert_config.json", "max_seq_length", {"max_seq_length": 0}),
    ("sentence_bert_config.json", "do_lower_case", {"do_lower_case": "no"}),
    ("config_sentence_transformers.json", "model_type", {"model_type": "SparseEncoder"}),
    ("config_sentence_transformers.json", "default_prompt_name", {"default_prompt_name": "query"}),
    ("config_sentence_transformers.json", "prompts", {"prompts": {"query": 1}}),
    ("config_sentence_transformers.json", "similarity_fn_name", {"similarity_fn_name": "hamming"}),
    ("config_sentence_transformers.json", "quantize", {"quantize": True}),
    ("config.json", "is_matryoshka", {"is_matryoshka": "no"}),
    ("config.json", "matryoshka_dimensions", {"matryoshka_dimensions": ["8"]}),
    ("config.json", "matryoshka_dimensions", {"matryoshka_dimensions": [99999]}),
    ("config.json", "is_decoder", {"is_decoder": 1}),
    ("config_sentence_transformers.json", "truncate_dim", {"truncate_dim": 0}),
    ("tokenizer_config.json", "split_special_tokens", {"split_special_tokens": True}),
    ("tokenizer_config.json", "cls_token", {"cls_token": 7}),
    ("tokenizer_config.json", "added_tokens_decoder", {"added_tokens_decoder": {"x": {"content": "y"}}}),
    ("tokenizer_config.json", "truncation_side", {"truncation_side": "middle"}),
    ("tokenizer_config.json", "spell_check", {"spell_check": True}),
    ("tokenizer_config.json", "init_inputs", {"init_inputs": ["vocab.txt"]}),
    ("tokenizer_config.json", "auto_map", {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}),
    ("config.json", "adapters", {"adapters": {"adapters": {"a": "pfeiffer"}}}),
    ("tokenizer_config.json", "model_max_length", {"model_max_length": "long"}),
    ("tokenizer_config.json", "model_max_length", {"model_max_length": 0}),
    ("tokenizer_config.json", "model_max_length", {"model_max_length": 0.5}),
    ("config.json", "max_position_embeddings", {"max_position_embeddings": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("file", "key", "changes"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_known_is_refused(file: str, key: str, changes: dict[str, Any], folder: Path) -> None:
    if key == "model_max_length":
        edit_json(folder / "sentence_bert_config.json", max_seq_length=None)
    edit_json(folder / file, **changes)
    with pytest.raises(CheckpointError) as caught:
        read_card(folder, "m")
    assert (caught.value.file, caught.value.key) == (file, key)
    assert file in str(caught.value)
    assert key in str(caught.value)


def test_what_transformers_is_to_load_a_model_with(folder: Path) -> None:
    """Options for loading that jina-embeddings-v2 states change no vector."""
    edit_json(folder / "sentence_bert_config.json", model_args={"trust_remote_code": True, "torch_dtype": "bfloat16"})
    read_card(folder, "m")
    edit_json(folder / "sentence_bert_config.json", model_args={"trust_remote_code": True, "add_pooling_layer": True})
    with pytest.raises(CheckpointError, match=r"sentence_bert_config\.json: model_args: add_pooling_layer"):
        read_card(folder, "m")


@pytest.mark.parametrize("kind", ["sentence_transformers.models.CNN", "custom_module.Custom", "os.abort", None])
def test_module_types_come_from_a_list(kind: str | None, folder: Path) -> None:
    write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": kind}])
    with pytest.raises(CheckpointError, match=r"modules\.json: type"):
        read_card(folder, "m")


def test_a_pipe_is_refused_and_not_waited_for(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json: is not a regular file"):
        read_card(folder, "m")


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "a/../../b"])
def test_modules_stay_in_the_folder(path: str, folder: Path) -> None:
    rows = [("", "Transformer"), (path, "Pooling")]
    write_json(
        folder / "modules.json",
        [{"idx": i, "name": "", "path": p, "type": f"sentence_transformers.models.{k}"} for i, (p, k) in enumerate(rows)],
    )
    with pytest.raises(CheckpointError, match="leads out"):
        read_card(folder, "m")


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', "\x00", "[" * 100_000, '{"a": 1} x'])
@pytest.mark.parametrize(
    "file", ["config.json", "modules.json", "1_Pooling/config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_broken_json_names_the_file(content: str, file: str, folder: Path) -> None:
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read_card(folder, "m")
    assert caught.value.file == file


def test_without_modules_the_pooling_must_be_said(folder: Path) -> None:
    (folder / "modules.json").unlink()
    with pytest.raises(CheckpointError, match="--pooling"):
        read_card(folder, "m")
    assert read_card(folder, "m", pooling="cls").dense.modes == ("cls",)


def test_stated_pooling_is_not_overruled(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="leave out --pooling"):
        read_card(folder, "m", pooling="cls")
