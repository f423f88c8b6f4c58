"""Hidden states of every family against transformers, on random checkpoints that transformers has saved."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from checkpoints import bert_tokenizer, edit_json, write_json
from classifiers import qwen_tokenizer
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError
from whimbrel.model.layer import Layer
from whimbrel.model.load import load_model
from whimbrel.model.ops.attention import AttentionLayout
from whimbrel.model.ops.kernels import kernels
from whimbrel.model.ops.layer_call import LayerCall
from whimbrel.model.ops.linear import round_up_rows, takes_any_rows
from whimbrel.model.ops.quantization import Quantization
from whimbrel.model.transformer import Transformer
from whimbrel.types.batch import equal_length_groups, pack
from whimbrel.types.seq import Seq

VOCABULARY = 400
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 120,
    "pad_token_id": 0,
}
ROBERTA = SIZES | {"pad_token_id": 1}
DECODER = SIZES | {"num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20}
LFM2 = DECODER | {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}
LFM2_MOE = DECODER | {
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "num_experts": 16,  # as many as its router has columns
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}
DEEPSEEK = SIZES | {
    "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 2,
    "topk_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "num_mtp_layers": 0, "num_key_value_heads": 4,
}  # fmt: skip
DEBERTA = SIZES | {
    "relative_attention": True, "position_buckets": 12, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": "p2c|c2p", "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
"""As DeBERTa v3."""

T5 = {
    "vocab_size": VOCABULARY, "d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 4,
    "relative_attention_max_distance": 60,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", ROBERTA),
    "xlm-roberta": ("XLMRoberta", ROBERTA),
    "camembert": ("Camembert", ROBERTA),
    "distilbert": (
        "DistilBert",
        {"vocab_size": VOCABULARY, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 120},
    ),
    "electra": ("Electra", SIZES | {"embedding_size": 24}),
    "electra of one width": ("Electra", SIZES | {"embedding_size": 48}),
    "mpnet": ("MPNet", ROBERTA | {"max_position_embeddings": 300}),
    "deberta v3": ("DebertaV2", DEBERTA),
    "deberta v3 of wide heads": ("DebertaV2", DEBERTA | {"num_attention_heads": 1}),
    "deberta v2": ("DebertaV2", DEBERTA | {"conv_kernel_size": 3, "conv_act": "gelu", "position_buckets": 64}),
    "deberta v2 of other parts": (
        "DebertaV2",
        DEBERTA | {"position_biased_input": True, "type_vocab_size": 2, "share_att_key": False, "conv_kernel_size": 5},
    ),
    "deberta v2 without buckets": (
        "DebertaV2",
        DEBERTA | {"position_buckets": -1, "max_relative_positions": 20, "pos_att_type": ["c2p"], "norm_rel_ebd": "none"},
    ),
    "deberta v2 of keys alone": ("DebertaV2", DEBERTA | {"pos_att_type": ["p2c"], "share_att_key": False}),
    "t5": ("T5", T5),
    "t5 gated": ("T5", T5 | {"feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 24, "d_kv": 10}),
    "mt5": ("MT5", T5 | {"relative_attention_max_distance": 128}),
    "mt5 of another gate": ("MT5", T5 | {"feed_forward_proj": "gated-silu"}),
    "nomic": ("NomicBert", SIZES),
    "gte": ("Gte", SIZES),
    "gte without token types": ("Gte", SIZES | {"type_vocab_size": 0}),
    "jina v3": ("JinaEmbeddingsV3", ROBERTA),
    "modernbert": ("ModernBert", SIZES | {"local_attention": 8}),
    "modernbert with biases": (
        "ModernBert",
        SIZES | {"local_attention": 6, "attention_bias": True, "mlp_bias": True, "norm_bias": True},
    ),
    "qwen2": ("Qwen2", DECODER),
    "qwen2 with windows": ("Qwen2", DECODER | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", DECODER | {"head_dim": 16}),
    "qwen3 both ways": ("Qwen3", DECODER | {"head_dim": 16, "is_causal": False}),
    "qwen2 with windows both ways": (
        "Qwen2",
        DECODER | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "is_causal": False},
    ),
    "mistral": ("Mistral", DECODER | {"sliding_window": 5}),
    "mistral both ways": ("Mistral", DECODER | {"sliding_window": 5, "is_causal": False}),
    "mistral without a window": ("Mistral", DECODER | {"sliding_window": None}),
    "eurobert": ("EuroBert", DECODER | {"mask_token_id": 4}),
    "llama": ("Llama", DECODER),
    "llama 3": ("Llama", DECODER | {"rope_scaling": LLAMA3}),
    "llama with yarn and biases": ("Llama", DECODER | {"rope_scaling": YARN, "attention_bias": True, "mlp_bias": True}),
    "llama stretched": ("Llama", DECODER | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama stretched for longer texts": ("Llama", DECODER | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "internlm3": ("InternLM3", DECODER | {"head_dim": 16}),
    "internlm3 with biases": ("InternLM3", DECODER | {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "llama of one key": ("Llama", DECODER | {"num_key_value_heads": 1}),
    "lfm2": ("Lfm2", LFM2),
    "lfm2 with biases": (
        "Lfm2",
        LFM2 | {"conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False, "block_multiple_of": 256},
    ),
    "lfm2 with experts": ("Lfm2Moe", LFM2_MOE),
    "lfm2 with other experts": (
        "Lfm2Moe",
        LFM2_MOE | {"num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    ),
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "deepseek of narrow queries": (
        "DeepseekV3",
        DEEPSEEK
        | {"q_lora_rank": 20, "attention_bias": True, "rope_interleave": False, "norm_topk_prob": False, "v_head_dim": 20},
    ),
    "deepseek stretched": ("DeepseekV3", DEEPSEEK | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek stretched without mscale": ("DeepseekV3", DEEPSEEK | {"rope_scaling": YARN}),
    "gemma both ways": ("Gemma", DECODER | {"head_dim": 16, "attention_bias": True, "use_bidirectional_attention": True}),
    "gemma2": ("Gemma2", DECODER | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24}),
    "gemma2 without a cap": ("Gemma2", DECODER | {"head_dim": 12, "sliding_window": 5, "attn_logit_softcapping": None}),
    "gemma3": ("Gemma3Text", DECODER | {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 7}),
    "gemma3 both ways": (
        "Gemma3Text",
        DECODER | {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 7, "use_bidirectional_attention": True},
    ),
}
LENGTHS = (1, 2, 3, 7, 7, 7, 16, 17, 33, 70, 70, 100)


def rows(seed: int = 0) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, VOCABULARY, length).astype(np.int32) for length in LENGTHS]


def write(folder: Path, name: str, config: dict[str, Any], *, form: str = "Model") -> Any:
    """Write a random checkpoint and return transformers' model. All weights are large enough to matter."""
    kind = name if form == "Model" else name.removesuffix("Text")
    form = "EncoderModel" if (name in ("T5", "MT5") and form == "Model") else form
    if name == "InternLM3":  # transformers runs it as Llama
        model = transformers.AutoModel.from_config(transformers.InternLM3Config(**config)).eval()
    else:
        model = getattr(transformers, kind + form)(getattr(transformers, f"{name}Config")(**config)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in key.lower() and key.endswith("weight") and not name.startswith("Gemma")
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.2 * noise)
        for key, buffer in model.named_buffers():
            if key.endswith(("expert_bias", "e_score_correction_bias")):  # which would be zero
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.tie_weights()
    model.save_pretrained(folder)
    if name == "InternLM3":
        edit_json(folder / "config.json", architectures=["InternLM3ForCausalLM"])
    (qwen_tokenizer if name == "Qwen2" else bert_tokenizer)().save_pretrained(folder)  # Qwen2's class reads no other
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", model_max_length=100)
    return model


Added: TypeAlias = tuple[tuple[str, str], ...]


@lru_cache(maxsize=1)
def loaded(folder: Path, dtype: torch.dtype, device: str, pooling: Any, written: tuple[int, ...], added: Added = ()) -> Any:
    """Return a card and its model, loaded again only if the files have changed."""
    card = read_card(folder, "m", pooling=pooling, adapters=dict(added))
    model, _ = load_model(folder, card, device=torch.device(device), dtype=dtype)
    return card, model


def hidden(
    folder: Path,
    ids: list[NDArray[np.int32]],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    pooling: Any = "mean",
    adapters: Sequence[int] = (),
    added: Added = (),
    between_layers: Callable[[], None] | None = None,
) -> list[Any]:
    """Return the hidden states of each seq, from one ragged batch. `added`: names and folders of LoRA adapters."""
    written = tuple(file.stat().st_mtime_ns for file in sorted(folder.iterdir()))
    card, model = loaded(folder, dtype, device, pooling, written, added)
    batch = pack(
        [Seq(row, i, adapter=adapters[i] if adapters else -1) for i, row in enumerate(ids)],
        position_offset=card.encoder.position_offset,
        pad_id=card.encoder.pad_id,
    )
    lengths = np.diff(batch.cu_seqlens)
    layout = AttentionLayout(
        torch.from_numpy(batch.cu_seqlens).to(device),
        equal_length_groups(batch.cu_seqlens),
        batch.num_tokens,
        int(lengths.max()),
    )
    any_rows = takes_any_rows(dtype, torch.device(device)) and isinstance(model, Transformer)
    num_rows = batch.num_tokens if any_rows else round_up_rows(batch.num_tokens)

    def filled(values: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(np.pad(values, (0, num_rows - values.size))).to(device)

    if adapters:
        layout = replace(layout, adapters_R=filled(np.repeat(batch.adapters_B, lengths)))
    with torch.inference_mode():
        out = model(
            filled(batch.ids_T),
            filled(batch.positions_T),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            layout,
            *([] if between_layers is None else [between_layers]),
        )
    parts = np.split(out[: batch.num_tokens].float().cpu().numpy(), batch.cu_seqlens[1:-1])
    return [parts[i] for i in np.argsort(batch.order_B)]


def reference(model: Any, ids: list[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
    base = getattr(model, model.base_model_prefix, model)
    with torch.inference_mode():
        inputs = [torch.from_numpy(row)[None].long() for row in ids]
        return [base(input_ids=x, attention_mask=torch.ones_like(x)).last_hidden_state[0].numpy() for x in inputs]


def assert_close(found: list[Any], expected: list[NDArray[np.float32]], tolerance: float = 1e-5) -> None:
    scale = max(1.0, *(float(np.abs(row).max()) for row in expected))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= tolerance * scale


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(16)
def test_hidden_states(case: str, tmp_path: Path) -> None:
    """Hidden states are equal bit for bit in a batch and alone, and close to transformers'."""
    model = write(tmp_path, *CASES[case])
    ids = rows()
    together = hidden(tmp_path, ids)
    assert_close(together, reference(model, ids))
    for row, expected in zip(ids, together, strict=True):
        assert np.array_equal(hidden(tmp_path, [row])[0], expected)


@pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(12)
def test_layers_in_one_call_have_the_bits_of_their_parts(
    case: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers in one call, unless something is to run between them; then each in one call; and their parts one by one."""
    write(tmp_path, *CASES[case])
    calls: list[None] = []
    call = LayerCall.__call__
    monkeypatch.setattr(LayerCall, "__call__", lambda *args: (calls.append(None), call(*args))[1])
    whole = hidden(tmp_path, rows(), dtype)
    whole_calls = len(calls)
    between: list[None] = []
    each = hidden(tmp_path, rows(), dtype, between_layers=lambda: between.append(None))
    never = case == "gemma2" or "deepseek" in case or "experts" in case
    assert bool(whole_calls) != never
    apart = never or case.startswith("lfm2") or "conv_kernel_size" in CASES[case][1]  # lfm2: in part
    assert len(calls) == (2 * whole_calls if apart else 1 + len(between) + 1)
    monkeypatch.setattr(Layer, "join_parts", lambda _: None)
    loaded.cache_clear()
    calls.clear()
    parts = hidden(tmp_path, rows(), dtype)
    loaded.cache_clear()
    assert not calls
    for others in (each, parts):
        assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(whole, others, strict=True))


@pytest.mark.parametrize("case", ["bert", "modernbert", "qwen3", "t5 gated"])
def test_a_layer_in_int8_has_the_bits_of_its_parts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one call only when its weights are rounded."""
    write(tmp_path, *CASES[case])
    calls: list[None] = []
    call = LayerCall.__call__
    monkeypatch.setattr(LayerCall, "__call__", lambda *args: (calls.append(None), call(*args))[1])
    card, quantization = read_card(tmp_path, "m", pooling="mean"), Quantization()
    with torch.inference_mode():
        model, _ = load_model(tmp_path, card, device=torch.device("cpu"), dtype=torch.float32, quantization=quantization)
        monkeypatch.setattr(sys.modules[__name__], "loaded", lambda *_: (card, model))
        hidden(tmp_path, rows(1))
        quantization.finish()
    parts = hidden(tmp_path, rows())
    assert not calls
    model.join_parts()
    joined = hidden(tmp_path, rows())
    own = kernels()
    assert bool(calls) == (own is not None and "int8" in own.kinds)
    assert all(np.array_equal(*each) for each in zip(joined, parts, strict=True))


def least_cosine(case: str) -> float:
    """Return the least cosine in half precision. A rounded router chooses other experts at times, in transformers too."""
    return 0.85 if case.startswith("deepseek") or "experts" in case else 0.995


@pytest.mark.bfloat16
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(8)
def test_half_precision_is_near(case: str, tmp_path: Path) -> None:
    model = write(tmp_path, *CASES[case])
    ids = rows()
    together = hidden(tmp_path, ids, torch.bfloat16)
    for row, found in zip(ids[::3], together[::3], strict=True):
        assert np.array_equal(hidden(tmp_path, [row], torch.bfloat16)[0], found)
    for found, expected in zip(together, reference(model, ids), strict=True):
        one, other = found.mean(0), expected.mean(0)
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > least_cosine(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_same(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = write(tmp_path, *CASES[case])
    ids = rows()
    for found, expected in zip(hidden(tmp_path, ids, dtype, "cuda"), reference(model, ids), strict=True):
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
    model = write(tmp_path, *CASES[case], form=form)
    assert_close(hidden(tmp_path, rows()), reference(model, rows()))


@pytest.mark.parametrize(
    ("case", "change"),
    [("qwen2 with windows", {"use_sliding_window": False, "layer_types": None}), ("mistral", {"sliding_window": None}),
     ("gemma3 both ways", {"sliding_window": 50}), ("modernbert", {"local_attention": 100}), ("gemma2", {"attn_logit_softcapping": None}),
     ("qwen3 both ways", {"is_causal": True}), ("llama 3", {"rope_parameters": None}), ("gemma2", {"query_pre_attn_scalar": 16})],
)  # fmt: skip
def test_what_the_config_says_matters(case: str, change: dict[str, Any], tmp_path: Path) -> None:
    """Guard: the comparison with transformers would notice each of these."""
    write(tmp_path, *CASES[case])
    before = hidden(tmp_path, rows())[-1]
    edit_json(tmp_path / "config.json", **change)
    assert np.abs(hidden(tmp_path, rows())[-1] - before).max() > 1e-3


def test_a_config_as_the_hub_s_modernberts_have_it(tmp_path: Path) -> None:
    """Old configs precede rope_parameters and layer_types, and have keys that have no effect."""
    model = write(tmp_path, *CASES["modernbert"])
    edit_json(
        tmp_path / "config.json", rope_parameters=None, layer_types=None, global_rope_theta=160000.0, local_rope_theta=10000.0,
        global_attn_every_n_layers=3, position_embedding_type="absolute", layer_norm_eps=1e-5, reference_compile=False,
        repad_logits_with_grad=False,
    )  # fmt: skip
    assert_close(hidden(tmp_path, rows()), reference(model, rows()))


def test_full_texts_of_deberta(tmp_path: Path) -> None:
    """The buckets and the length are those of DeBERTa v3: 511, the largest distance, lies on the bound of two buckets."""
    model = write(tmp_path, "DebertaV2", DEBERTA | {"position_buckets": 256, "max_position_embeddings": 512})
    rng = np.random.default_rng(3)
    ids = [rng.integers(5, VOCABULARY, length).astype(np.int32) for length in (512, 512, 400, 129, 128)]
    together = hidden(tmp_path, ids)
    assert_close(together, reference(model, ids))
    for row, expected in zip(ids[1:], together[1:], strict=True):
        assert np.array_equal(hidden(tmp_path, [row])[0], expected)


def test_a_config_as_old_decoders_have_it(tmp_path: Path) -> None:
    model = write(tmp_path, "Qwen2", DECODER | {"rope_theta": 1e6})
    edit_json(
        tmp_path / "config.json", rope_parameters=None, layer_types=None, rope_theta=1000000.0, rope_scaling=None,
        use_sliding_window=False, sliding_window=131072, max_window_layers=21,
    )  # fmt: skip
    assert_close(hidden(tmp_path, rows()), reference(model, rows()))


def test_a_config_as_old_gemmas_have_it(tmp_path: Path) -> None:
    model = write(tmp_path, *CASES["gemma3"])
    edit_json(
        tmp_path / "config.json", rope_parameters=None, layer_types=None, rope_theta=1000000.0, rope_local_base_freq=10000.0,
        sliding_window_pattern=6,
    )  # fmt: skip
    assert_close(hidden(tmp_path, rows()), reference(model, rows()))


def test_weights_in_shards(tmp_path: Path) -> None:
    model = write(tmp_path, *CASES["qwen3"])
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, tmp_path / file, metadata={"format": "pt"})
    where = {name: file for file, part in files.items() for name in part}
    write_json(tmp_path / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": where})
    assert_close(hidden(tmp_path, rows()), reference(model, rows()))


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
    write(tmp_path, *CASES[case])
    edit_json(tmp_path / "config.json", **change)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        read_card(tmp_path, "m", pooling="mean")
    assert says in str(caught.value)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(4)
def test_every_tensor_is_asked_for(case: str, tmp_path: Path) -> None:
    """A checkpoint with a missing or an extra tensor is rejected with its name."""
    write(tmp_path, *CASES[case])
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
    write(tmp_path, *CASES["distilbert"])
    before = json.loads((tmp_path / "config.json").read_text())
    read_card(tmp_path, "m", pooling="mean")
    assert json.loads((tmp_path / "config.json").read_text()) == before


def test_the_oldest_names_of_norms(tmp_path: Path) -> None:
    """google-bert/bert-base-uncased still has TensorFlow's names."""
    write(tmp_path, "Bert", SIZES)
    before = hidden(tmp_path, rows())
    weights = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name in list(weights):
        for new, oldest in old.items():
            if name.endswith(new):
                weights[name.removesuffix(new) + oldest] = weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for one, other in zip(hidden(tmp_path, rows()), before, strict=True):
        assert np.array_equal(one, other)
