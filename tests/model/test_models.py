"""Hidden states of every family against transformers, on random checkpoints that transformers has saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.families import CASES, DEBERTA, DECODER, LLAMA3, SIZES, VOCABULARY, YARN, write_model
from checkpoints.files import edit_json, write_json
from comparisons import assert_close
from hidden_states import hidden_states, least_cosine, loaded, random_ids, reference_states
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError
from whimbrel.model import experts
from whimbrel.model.kernels.library import kernels
from whimbrel.model.layer import Layer, LayerCall
from whimbrel.model.load import load_model
from whimbrel.model.ops.quantization import Quantization


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(16)
def test_hidden_states(case: str, tmp_path: Path) -> None:
    """Hidden states are equal bit for bit in a batch and alone, and close to transformers'."""
    model = write_model(tmp_path, *CASES[case])
    ids = random_ids()
    together = hidden_states(tmp_path, ids)
    assert_close(together, reference_states(model, ids))
    for row, expected in zip(ids, together, strict=True):
        assert np.array_equal(hidden_states(tmp_path, [row])[0], expected)


@pytest.mark.parametrize("case", [case for case in CASES if "experts" in case or "deepseek" in case])
def test_all_experts_at_once(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped products, which a GPU uses, give transformers' hidden states too."""
    model, grouped = write_model(tmp_path, *CASES[case]), list[None]()
    grouped_mm = torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *each, **by: grouped.append(None) or grouped_mm(*each, **by))
    monkeypatch.setattr(experts, "multiplies_in_groups", lambda *_: True)
    found = hidden_states(tmp_path, random_ids())
    loaded.cache_clear()
    assert_close(found, reference_states(model, random_ids()))
    assert grouped


@pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(12)
def test_layers_in_one_call_have_the_bits_of_their_parts(
    case: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers in one call, unless something is to run between them; then each in one call; and their parts one by one."""
    write_model(tmp_path, *CASES[case])
    calls: list[None] = []
    call = LayerCall.__call__
    monkeypatch.setattr(LayerCall, "__call__", lambda *args: (calls.append(None), call(*args))[1])
    whole = hidden_states(tmp_path, random_ids(), dtype)
    whole_calls = len(calls)
    between: list[None] = []
    each = hidden_states(tmp_path, random_ids(), dtype, between_layers=lambda: between.append(None))
    never = case == "gemma2" or "deepseek" in case or "experts" in case
    assert bool(whole_calls) != never
    apart = never or case.startswith("lfm2") or "conv_kernel_size" in CASES[case][1]  # lfm2: in part
    assert len(calls) == (2 * whole_calls if apart else 1 + len(between) + 1)
    monkeypatch.setattr(Layer, "join_parts", lambda _: None)
    loaded.cache_clear()
    calls.clear()
    parts = hidden_states(tmp_path, random_ids(), dtype)
    loaded.cache_clear()
    assert not calls
    for others in (each, parts):
        assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(whole, others, strict=True))


@pytest.mark.parametrize("case", ["bert", "modernbert", "qwen3", "t5 gated"])
def test_a_layer_in_int8_has_the_bits_of_its_parts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one call only when its weights are rounded."""
    write_model(tmp_path, *CASES[case])
    calls: list[None] = []
    call = LayerCall.__call__
    monkeypatch.setattr(LayerCall, "__call__", lambda *args: (calls.append(None), call(*args))[1])
    card, quantization = read_card(tmp_path, "m", pooling="mean"), Quantization()
    with torch.inference_mode():
        model, _ = load_model(tmp_path, card, device=torch.device("cpu"), dtype=torch.float32, quantization=quantization)
        monkeypatch.setattr("hidden_states.loaded", lambda *_: (card, model))
        hidden_states(tmp_path, random_ids(1))
        quantization.finish()
    parts = hidden_states(tmp_path, random_ids())
    assert not calls
    model.join_parts()
    joined = hidden_states(tmp_path, random_ids())
    own = kernels()
    assert bool(calls) == (own is not None and "int8" in own.kinds)
    assert all(np.array_equal(*each) for each in zip(joined, parts, strict=True))


@pytest.mark.bfloat16
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(8)
def test_half_precision_is_near(case: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, *CASES[case])
    ids = random_ids()
    together = hidden_states(tmp_path, ids, torch.bfloat16)
    for row, found in zip(ids[::3], together[::3], strict=True):
        assert np.array_equal(hidden_states(tmp_path, [row], torch.bfloat16)[0], found)
    for found, expected in zip(together, reference_states(model, ids), strict=True):
        one, other = found.mean(0), expected.mean(0)
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > least_cosine(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_same(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = write_model(tmp_path, *CASES[case])
    ids = random_ids()
    for found, expected in zip(hidden_states(tmp_path, ids, dtype, "cuda"), reference_states(model, ids), strict=True):
        one, other = found.mean(0), expected.mean(0)
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > (
            0.9999 if dtype == torch.float32 else least_cosine(case)
        )


@pytest.mark.parametrize(
    ("case", "form"),
    [("bert", "ForMaskedLM"), ("bert", "ForPreTraining"), ("roberta", "ForMaskedLM"), ("xlm-roberta", "ForMaskedLM"),
     ("camembert", "ForMaskedLM"), ("distilbert", "ForMaskedLM"), ("electra", "ForMaskedLM"), ("electra", "ForPreTraining"),
     ("mpnet", "ForMaskedLM"), ("deberta v3", "ForMaskedLM"), ("gte", "ForMaskedLM"), ("jina v3", "ForMaskedLM"), ("modernbert", "ForMaskedLM"),
     ("qwen2", "ForCausalLM"), ("qwen3", "ForCausalLM"), ("mistral", "ForCausalLM"), ("llama", "ForCausalLM"),
     ("lfm2", "ForCausalLM"), ("lfm2 with experts", "ForCausalLM"), ("deepseek", "ForCausalLM"), ("gemma2", "ForCausalLM"), ("gemma3", "ForCausalLM")],
)  # fmt: skip
@pytest.mark.sample(6)
def test_the_encoder_of_a_larger_model(case: str, form: str, tmp_path: Path) -> None:
    """The names have a prefix, and the checkpoint has a head that is not used."""
    model = write_model(tmp_path, *CASES[case], form=form)
    assert_close(hidden_states(tmp_path, random_ids()), reference_states(model, random_ids()))


@pytest.mark.parametrize(
    ("case", "change"),
    [("qwen2 with windows", {"use_sliding_window": False, "layer_types": None}), ("mistral", {"sliding_window": None}),
     ("gemma3 both ways", {"sliding_window": 50}), ("modernbert", {"local_attention": 100}), ("gemma2", {"attn_logit_softcapping": None}),
     ("qwen3 both ways", {"is_causal": True}), ("llama 3", {"rope_parameters": None}), ("gemma2", {"query_pre_attn_scalar": 16})],
)  # fmt: skip
def test_what_the_config_says_matters(case: str, change: dict[str, Any], tmp_path: Path) -> None:
    """Guard: the comparison with transformers would notice each of these."""
    write_model(tmp_path, *CASES[case])
    before = hidden_states(tmp_path, random_ids())[-1]
    edit_json(tmp_path / "config.json", **change)
    assert np.abs(hidden_states(tmp_path, random_ids())[-1] - before).max() > 1e-3


def test_a_config_as_the_hub_s_modernberts_have_it(tmp_path: Path) -> None:
    """Old configs precede rope_parameters and layer_types, and have keys that have no effect."""
    model = write_model(tmp_path, *CASES["modernbert"])
    edit_json(
        tmp_path / "config.json", rope_parameters=None, layer_types=None, global_rope_theta=160000.0, local_rope_theta=10000.0,
        global_attn_every_n_layers=3, position_embedding_type="absolute", layer_norm_eps=1e-5, reference_compile=False,
        repad_logits_with_grad=False,
    )  # fmt: skip
    assert_close(hidden_states(tmp_path, random_ids()), reference_states(model, random_ids()))


def test_full_texts_of_deberta(tmp_path: Path) -> None:
    """The buckets and the length are those of DeBERTa v3: 511, the largest distance, lies on the bound of two buckets."""
    model = write_model(tmp_path, "DebertaV2", DEBERTA | {"position_buckets": 256, "max_position_embeddings": 512})
    rng = np.random.default_rng(3)
    ids = [rng.integers(5, VOCABULARY, length).astype(np.int32) for length in (512, 512, 400, 129, 128)]
    together = hidden_states(tmp_path, ids)
    assert_close(together, reference_states(model, ids))
    for row, expected in zip(ids[1:], together[1:], strict=True):
        assert np.array_equal(hidden_states(tmp_path, [row])[0], expected)


def test_a_config_as_old_decoders_have_it(tmp_path: Path) -> None:
    model = write_model(tmp_path, "Qwen2", DECODER | {"rope_theta": 1e6})
    edit_json(
        tmp_path / "config.json", rope_parameters=None, layer_types=None, rope_theta=1000000.0, rope_scaling=None,
        use_sliding_window=False, sliding_window=131072, max_window_layers=21,
    )  # fmt: skip
    assert_close(hidden_states(tmp_path, random_ids()), reference_states(model, random_ids()))


def test_a_config_as_old_gemmas_have_it(tmp_path: Path) -> None:
    model = write_model(tmp_path, *CASES["gemma3"])
    edit_json(
        tmp_path / "config.json", rope_parameters=None, layer_types=None, rope_theta=1000000.0, rope_local_base_freq=10000.0,
        sliding_window_pattern=6,
    )  # fmt: skip
    assert_close(hidden_states(tmp_path, random_ids()), reference_states(model, random_ids()))


def test_weights_in_shards(tmp_path: Path) -> None:
    model = write_model(tmp_path, *CASES["qwen3"])
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, tmp_path / file, metadata={"format": "pt"})
    where = {name: file for file, part in files.items() for name in part}
    write_json(tmp_path / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": where})
    assert_close(hidden_states(tmp_path, random_ids()), reference_states(model, random_ids()))


WRONG = [
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets"),
    ("deberta v3", {"relative_attention": False}, "relative_attention"),
    ("deberta v3", {"pos_att_type": "p2p|c2p"}, "pos_att_type"),
    ("deberta v3", {"relative_attention": None}, "relative_attention"),
    ("deberta v3", {"pos_att_type": None}, "pos_att_type"),
    ("deberta v3", {"pos_att_type": [["c2p"]]}, "pos_att_type"),
    ("deberta v3", {"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd"),
    ("deberta v3", {"position_buckets": 2}, "position_buckets"),
    ("deberta v3", {"max_relative_positions": 7}, "position_buckets"),
    ("deberta v3", {"embedding_size": 24}, "embedding_size"),
    ("deberta v3", {"attention_head_size": 16}, "attention_head_size"),
    ("deberta v2", {"conv_groups": 2}, "conv_groups"),
    ("deberta v2", {"conv_kernel_size": 4}, "conv_kernel_size"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "linear with factor"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 1.0}}, "mscale"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "theta 'x'"),
    ("llama", {"rope_parameters": {"rope_type": ["default"], "rope_theta": 1e4}}, "rope_scaling"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": "x"}}, "'x' of"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e999}}, "linear with factor"),
    ("llama with yarn and biases", {"rope_parameters": YARN | {"rope_theta": 1e4, "beta_fast": "x"}}, "beta_fast"),
    ("llama 3", {"rope_parameters": LLAMA3 | {"rope_theta": 1e4, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": 5}}, "must be an object"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"attention_chunk_size": 5}, "attention_chunk_size"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
    ("gemma3", {"layer_types": ["chunked_attention"] * 7}, "layer_types"),
    ("modernbert", {"hidden_activation": "mish"}, "hidden_activation"),
    ("qwen3", {"head_dim": 0}, "head_dim"),
    ("qwen3", {"architectures": ["Qwen3MoeModel"]}, "architectures"),
    ("qwen3", {"model_type": "qwen2"}, "model_type"),
    ("distilbert", {"n_heads": 5}, "n_heads"),
    ("electra", {"embedding_size": -1}, "embedding_size"),
    ("lfm2", {"layer_types": ["conv", "sliding_attention", "conv"]}, "full_attention or conv"),
    ("lfm2", {"is_causal": False}, "is_causal"),
    ("lfm2", {"conv_dim": 96}, "conv_dim"),
    ("lfm2", {"conv_L_cache": 0}, "conv_L_cache"),
    ("internlm3", {"head_dim": -1}, "head_dim"),
    ("lfm2 with experts", {"num_experts_per_tok": 17}, "num_experts_per_tok"),
    ("lfm2 with experts", {"block_ff_dim": 64}, "block_ff_dim"),
    ("deepseek", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek", {"is_causal": False}, "is_causal"),
    ("deepseek", {"n_group": 3}, "n_group"),
    ("deepseek", {"topk_group": 3}, "topk_group"),
    ("deepseek", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("deepseek", {"v_head_dim": 30}, "v_head_dim"),
    ("deepseek stretched", {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 1.0}}, "mscale"),
    ("mistral", {"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "sliding_window"),
]


@pytest.mark.parametrize(("case", "change", "says"), WRONG, ids=[f"{case}: {says}" for case, _, says in WRONG])
def test_what_is_not_supported_is_refused(case: str, change: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_model(tmp_path, *CASES[case])
    edit_json(tmp_path / "config.json", **change)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        read_card(tmp_path, "m", pooling="mean")
    assert says in str(caught.value)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(4)
def test_every_tensor_is_asked_for(case: str, tmp_path: Path) -> None:
    """A checkpoint with a missing or an extra tensor is rejected with its name."""
    write_model(tmp_path, *CASES[case])
    card = read_card(tmp_path, "m", pooling="mean")
    weights = load_file(tmp_path / "model.safetensors")
    device = torch.device("cpu")
    for name in weights:
        left = {key: value for key, value in weights.items() if key != name}
        save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if name.startswith("pooler."):
            load_model(tmp_path, card, device=device, dtype=torch.float32)
            continue
        with pytest.raises(CheckpointError, match="missing"):
            load_model(tmp_path, card, device=device, dtype=torch.float32)
    save_file(weights | {"extra.weight": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"extra\.weight"):
        load_model(tmp_path, card, device=device, dtype=torch.float32)


def test_the_config_is_read_and_not_changed(tmp_path: Path) -> None:
    write_model(tmp_path, *CASES["distilbert"])
    before = json.loads((tmp_path / "config.json").read_text())
    read_card(tmp_path, "m", pooling="mean")
    assert json.loads((tmp_path / "config.json").read_text()) == before


def test_the_oldest_names_of_norms(tmp_path: Path) -> None:
    """google-bert/bert-base-uncased still has TensorFlow's names."""
    write_model(tmp_path, "Bert", SIZES)
    before = hidden_states(tmp_path, random_ids())
    weights = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name in list(weights):
        for new, oldest in old.items():
            if name.endswith(new):
                weights[name.removesuffix(new) + oldest] = weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for one, other in zip(hidden_states(tmp_path, random_ids()), before, strict=True):
        assert np.array_equal(one, other)
