"""Random checkpoints of every family, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from checkpoints.classifiers import qwen_tokenizer
from checkpoints.encoders import bert_tokenizer
from checkpoints.files import edit_json
from checkpoints.reference_classes import reference_class
from checkpoints.weights import is_norm, randomise

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
"""Config of DeBERTa v3."""


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


def write_model(folder: Path, name: str, config: dict[str, Any], *, form: str = "Model") -> Any:
    """Write a random checkpoint and return transformers' model. All weights are large enough to matter."""
    kind = name if form == "Model" else name.removesuffix("Text")
    form = "EncoderModel" if (name in ("T5", "MT5") and form == "Model") else form
    if name == "InternLM3":  # transformers runs it as Llama
        model = transformers.AutoModel.from_config(reference_class("InternLM3Config")(**config)).eval()
    else:
        model = reference_class(kind + form)(reference_class(f"{name}Config")(**config)).eval()
    generator = randomise(model, near_one=lambda key: is_norm(key) and not name.startswith("Gemma"))
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
