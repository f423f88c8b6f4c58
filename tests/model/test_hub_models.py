"""Checkpoints that came with code of their own: hidden states against the formula that their code computes.

transformers cannot load these layouts offline, so each formula is written out here, for one text, over weights under the names
that they have on the hub. Where transformers has the model too, it is asked as well.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.families import DECODER, ROBERTA, SIZES, write_model
from checkpoints.files import edit_json, write_json
from checkpoints.published.blocks import Config, W
from checkpoints.published.cases import AROUND, CASES, published_states, save_tokenizer, write_llama_bidirec, write_published
from checkpoints.published.gte import ARCTIC
from checkpoints.published.jina import JINA_ROBERTA
from checkpoints.published.nomic import NOMIC
from comparisons import assert_close
from hidden_states import hidden_states, loaded, random_ids, reference_states
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError
from whimbrel.model import experts
from whimbrel.model.load import load_model


@pytest.mark.parametrize("case", [case for case in CASES if case != "jina colbert"])  # its code for vectors is another class
def test_the_class_of_the_models_own_code_is_architecture_enough(case: str, tmp_path: Path) -> None:
    """Without `architectures` the class that `auto_map` names for vectors is read, or that of the model_type."""
    config, _ = write_published(tmp_path, case)
    expected = read_card(tmp_path, "m", pooling="mean")
    write_json(tmp_path / "config.json", {key: value for key, value in config.items() if key != "architectures"})
    code = config.get("auto_map", {})
    if "AutoModel" in code or not code:
        assert read_card(tmp_path, "m", pooling="mean") == expected
        return
    with pytest.raises(CheckpointError, match="auto_map: this checkpoint needs code of its own"):
        read_card(tmp_path, "m", pooling="mean")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(11)
def test_hidden_states(case: str, tmp_path: Path) -> None:
    """Hidden states are equal bit for bit in a batch and alone, and close to the formula."""
    config, weights = write_published(tmp_path, case)
    together = hidden_states(tmp_path, random_ids())
    assert_close(together, published_states(case, config, weights))
    for row, expected in zip(random_ids(), together, strict=True):
        assert np.array_equal(hidden_states(tmp_path, [row])[0], expected)


@pytest.mark.bfloat16
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(6)
def test_half_precision_is_near(case: str, tmp_path: Path) -> None:
    config, weights = write_published(tmp_path, case)
    together = hidden_states(tmp_path, random_ids(), torch.bfloat16)
    for row, found in zip(random_ids()[::3], together[::3], strict=True):
        assert np.array_equal(hidden_states(tmp_path, [row], torch.bfloat16)[0], found)
    for found, expected in zip(together, published_states(case, config, weights), strict=True):
        one, other = found.mean(0), expected.mean(0)
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > 0.995


def test_all_experts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped products, which a GPU uses, give the formula's hidden states too."""
    monkeypatch.setattr(experts, "multiplies_in_groups", lambda *_: True)
    config, weights = write_published(tmp_path, "nomic with experts")
    expected = published_states("nomic with experts", config, weights)
    found = hidden_states(tmp_path, random_ids())
    loaded.cache_clear()
    assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_same(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, weights = write_published(tmp_path, case)
    for found, expected in zip(
        hidden_states(tmp_path, random_ids(), dtype, "cuda"), published_states(case, config, weights), strict=True
    ):
        one, other = found.mean(0), expected.mean(0)
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > (0.9999 if dtype == torch.float32 else 0.995)


@pytest.mark.parametrize(
    ("case", "change"),
    [("nomic", {"rotary_emb_base": 10000}), ("nomic", {"rotary_emb_interleaved": True}), ("nomic", {"rotary_emb_fraction": 0.5}),
     ("nomic", {"activation_function": "geglu"}), ("nomic", {"layer_norm_epsilon": 0.1}), ("nomic with experts", {"moe_top_k": 1}), ("arctic", {"rope_theta": 10000}),
     ("gte multilingual", {"rope_scaling": None}), ("gte multilingual", {"rope_scaling": {"type": "ntk", "factor": 2.0}}),
     ("gte multilingual", {"hidden_act": "relu"}), ("jina v2", {"feed_forward_type": "reglu"}), ("jina v2", {"num_attention_heads": 6}),
     ("jina v2 for code", {"feed_forward_type": "reglu"}), ("jina v2 ungated", {"hidden_act": "relu"}),
     ("jina colbert", {"rotary_emb_base": 20000.0}), ("jina colbert", {"hidden_act": "gelu"})],
)  # fmt: skip
def test_what_the_config_says_matters(case: str, change: Config, tmp_path: Path) -> None:
    """Guard: the comparison with the formula would notice each of these."""
    write_published(tmp_path, case)
    before = hidden_states(tmp_path, random_ids())[-1]
    edit_json(tmp_path / "config.json", **change)
    assert np.abs(hidden_states(tmp_path, random_ids())[-1] - before).max() > 1e-4


@pytest.mark.parametrize(
    ("name", "config", "hub"),
    [
        ("NomicBert", SIZES | {"intermediate_size": 256}, NOMIC),
        ("Gte", SIZES | {"type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 160000.0}}, ARCTIC),
        ("JinaEmbeddingsV3", ROBERTA, JINA_ROBERTA),
    ],
)
def test_transformers_agrees_with_the_formula(name: str, config: Config, hub: Config, tmp_path: Path) -> None:
    """A checkpoint that transformers saves, with the Hub's config of the same model, gives the formula's hidden states."""
    model = write_model(tmp_path, name, config)
    write_json(tmp_path / "config.json", hub)
    assert_close(hidden_states(tmp_path, random_ids()), reference_states(model, random_ids()))


def test_llama_bidirec(tmp_path: Path) -> None:
    model = write_model(tmp_path, "Llama", DECODER | {"is_causal": False})
    write_llama_bidirec(tmp_path)
    assert_close(hidden_states(tmp_path, random_ids(), pooling=None), reference_states(model, random_ids()))


@pytest.mark.parametrize(("stated", "mode"), [("avg", "mean"), ("cls", "cls"), ("last", "lasttoken"), (None, "mean")])
def test_llama_bidirec_says_how_it_is_pooled(stated: str | None, mode: str, tmp_path: Path) -> None:
    write_model(tmp_path, "Llama", DECODER)
    write_llama_bidirec(tmp_path, pooling=stated)
    assert read_card(tmp_path, "m").dense.modes == (mode,)
    with pytest.raises(CheckpointError, match=r"config\.json: pooling"):
        read_card(tmp_path, "m", pooling="mean")


def test_gte_qwen2_sees_both_ways(tmp_path: Path) -> None:
    model = write_model(tmp_path, "Qwen2", DECODER | {"is_causal": False})
    edit_json(tmp_path / "config.json", auto_map={"AutoModel": "modeling_qwen.Qwen2Model"})
    assert_close(hidden_states(tmp_path, random_ids()), reference_states(model, random_ids()))


def test_gte_qwen2_says_whether_it_sees_both_ways(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen2", DECODER)
    edit_json(tmp_path / "config.json", auto_map={"AutoModel": "Alibaba-NLP/gte-Qwen2-7B-instruct--modeling_qwen.Qwen2Model"})
    with pytest.raises(CheckpointError, match=r"config\.json: is_causal: is missing"):
        read_card(tmp_path, "m", pooling="lasttoken")
    for stated in (True, False):
        edit_json(tmp_path / "config.json", is_causal=stated)
        assert read_card(tmp_path, "m", pooling="lasttoken").encoder.causal is stated


@pytest.mark.parametrize(
    ("stated", "longest"),
    [
        ({"rotary_scaling_factor": None}, 8192),
        ({"rotary_scaling_factor": 2.0}, 2048),
        ({"rotary_scaling_factor": 2, "max_trained_positions": 9000}, 8192),
        ({}, 2048),
    ],
)
def test_nomic_takes_no_texts_whose_frequencies_would_change(stated: Config, longest: int, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = {key: value for key, value in NOMIC.items() if key != "rotary_scaling_factor"}
    write_json(tmp_path / "config.json", config | stated)
    assert read_card(tmp_path, "m", pooling="mean").encoder.max_positions == longest


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_every_tensor_is_asked_for(case: str, tmp_path: Path) -> None:
    """A checkpoint with a missing or an extra tensor is rejected with its name."""
    write_published(tmp_path, case)
    card = read_card(tmp_path, "m", pooling="mean")
    weights = load_file(tmp_path / "model.safetensors")

    def load(left: W) -> None:
        save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
        load_model(tmp_path, card, device=torch.device("cpu"), dtype=torch.float32)

    beside = AROUND.get(case, ("", {}))[1]
    for name in weights:
        left = {key: value for key, value in weights.items() if key != name}
        if name in beside:
            load(left)
            continue
        with pytest.raises(CheckpointError, match="missing"):
            load(left)
    with pytest.raises(CheckpointError, match=r"extra\.weight"):
        load(weights | {"extra.weight": torch.zeros(2)})


# Refusals

WRONG: list[tuple[str, Config, str]] = [
    ("nomic", {"num_experts": 8, "moe_every_n_layers": 2, "moe_top_k": 2}, "activation_function: a mixture of gated experts"),
    ("nomic", {"moe_every_n_layers": 2}, "moe_every_n_layers: is 2, with 1 of 0 experts"),
    ("nomic with experts", {"moe_every_n_layers": 1}, "moe_every_n_layers: is 1"),
    ("nomic with experts", {"moe_every_n_layers": 0}, "moe_every_n_layers: is 0"),
    ("nomic with experts", {"moe_top_k": 9}, "moe_every_n_layers: is 2, with 9 of 8 experts"),
    ("nomic with experts", {"num_shared_experts": 1}, "num_shared_experts"),
    ("nomic with experts", {"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights"),
    ("nomic with experts", {"expert_choice_router": True}, "expert_choice_router"),
    ("nomic with experts", {"ffn_div": 2}, "ffn_div"),
    ("nomic", {"activation_function": "relu"}, "activation_function"),
    ("nomic", {"prenorm": True}, "prenorm"),
    ("nomic", {"use_rms_norm": True}, "use_rms_norm"),
    ("nomic", {"causal": True}, "causal"),
    ("nomic", {"parallel_block": True}, "parallel_block"),
    ("nomic", {"norm_mlp": True}, "norm_mlp"),
    ("nomic", {"num_heads_kv": 2}, "num_heads_kv"),
    ("nomic", {"rotary_head_dim": True}, "rotary_head_dim"),
    ("nomic", {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base"),
    ("nomic", {"rotary_emb_fraction": 0.0}, "rotary_emb_fraction"),
    ("nomic", {"rotary_emb_fraction": 1.5}, "rotary_emb_fraction"),
    ("nomic", {"rotary_emb_base": 0}, "rotary_emb_base"),
    ("nomic", {"rotary_scaling_factor": "2"}, "rotary_scaling_factor"),
    ("nomic", {"n_head": 5}, "n_head"),
    ("nomic", {"n_inner": -1}, "n_inner"),
    ("nomic", {"n_positions": 0}, "n_positions"),
    ("nomic", {"type_vocab_size": -1}, "type_vocab_size"),
    ("nomic", {"qkv_proj_bias": "no"}, "qkv_proj_bias"),
    ("nomic in both dialects", {"hidden_size": 96}, "hidden_size"),
    ("nomic in both dialects", {"intermediate_size": 3072}, "intermediate_size"),
    ("nomic in both dialects", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_parameters"),
    ("gte multilingual", {"logn_attention_scale": True}, "logn_attention_scale"),
    ("gte multilingual", {"logn_attention_clip1": True}, "logn_attention_clip1"),
    ("gte multilingual", {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
    ("gte multilingual", {"pack_qkv": False}, "pack_qkv"),
    ("gte multilingual", {"position_embedding_type": "absolute"}, "position_embedding_type"),
    ("gte multilingual", {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}}, "mixed_b"),
    ("gte multilingual", {"rope_scaling": {"type": "ntk"}}, "factor"),
    ("gte multilingual", {"unpad_inputs": "yes"}, "unpad_inputs"),
    ("gte multilingual", {"architectures": ["NewModel", "BertModel"]}, "architectures"),
    ("gte multilingual", {"architectures": [["NewModel"]]}, "auto_map: this checkpoint needs code of its own; custom code is not run"),
    ("gte multilingual", {"architectures": ["NewForMine"]}, "auto_map"),
    ("gte multilingual", {"model_type": "gte"}, "model_type"),
    ("jina v2", {"position_embedding_type": "absolute"}, "position_embedding_type"),
    ("jina v2", {"feed_forward_type": "swiglu"}, "feed_forward_type"),
    ("jina v2", {"type_vocab_size": 0}, "type_vocab_size"),
    ("jina v3 without adapters", {"lora_adaptations": ["retrieval.query"]}, "load_trained_adapters"),
    ("jina v3 without adapters", {"load_trained_adapters": True}, "load_trained_adapters"),
    ("jina v3 without adapters", {"task_instructions": {"retrieval.query": "Represent: "}}, "task_instructions"),
    ("jina v3 without adapters", {"truncate_dim": 512}, "truncate_dim"),
    ("jina v3 without adapters", {"hidden_act": "relu"}, "hidden_act"),
    ("jina v3 without adapters", {"rotary_emb_base": -1.0}, "rotary_emb_base"),
    ("jina v3 without adapters", {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base"),
    ("jina v3 without adapters", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ("jina colbert", {"position_embedding_type": "absolute"}, "position_embedding_type"),
    *((case, {"auto_map": {"AutoModel": ["modeling.Model", None]}}, "auto_map: AutoModel must be") for case in CASES),
    *((case, {"auto_map": "modeling.Model"}, "auto_map: must be dict") for case in CASES),
]  # fmt: skip


@pytest.mark.parametrize(("case", "change", "says"), WRONG, ids=[f"{case}: {says}" for case, _, says in WRONG])
def test_what_is_not_supported_is_refused(case: str, change: Config, says: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", CASES[case][0] | change)
    save_tokenizer(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_card(tmp_path, "m", pooling="mean")
    assert f"config.json: {says}" in str(caught.value) or (
        says in str(caught.value) and "config.json: rope" in str(caught.value)
    )


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Bert", SIZES),
        ("XLMRoberta", ROBERTA),
        ("NomicBert", SIZES),
        ("ModernBert", SIZES),
        ("Llama", DECODER),
        ("Qwen2", DECODER),
        ("Qwen3", DECODER | {"head_dim": 16, "is_causal": False}),
        ("Gemma3Text", DECODER | {"head_dim": 16}),
    ],
)
def test_other_checkpoints_with_code_of_their_own_are_refused(name: str, config: Config, tmp_path: Path) -> None:
    write_model(tmp_path, name, config)
    edit_json(tmp_path / "config.json", auto_map={"AutoModel": "modeling_mine.Model"})
    with pytest.raises(CheckpointError, match=r"config\.json: auto_map: .*custom code is not run"):
        read_card(tmp_path, "m", pooling="mean")


@pytest.mark.parametrize("case", ["jina v3 without adapters"])
def test_adapters_in_the_weights_are_refused(case: str, tmp_path: Path) -> None:
    """Tensors of adapters are rejected for every config."""
    _, weights = write_published(tmp_path, case)
    layer = "encoder.layers.0.mixer.Wqkv"
    weights[f"{layer}.parametrizations.weight.original"] = weights.pop(f"{layer}.weight")
    weights[f"{layer}.parametrizations.weight.0.lora_A"] = torch.zeros(2, 4, 48)
    weights[f"{layer}.parametrizations.weight.0.lora_B"] = torch.zeros(2, 144, 4)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    card = read_card(tmp_path, "m", pooling="mean")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {layer}\.parametrizations\.weight\.0"):
        load_model(tmp_path, card, device=torch.device("cpu"), dtype=torch.float32)
