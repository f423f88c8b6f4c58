"""Configs of decoders: Llama, its descendants and Gemma. Attention is causal, or bidirectional in adapted models.

Sources: transformers/models/*/configuration_*.py (5.23), and on the hub llama_bidirectional_model.py of
nvidia/llama-nemotron-embed-1b-v2, modeling_qwen.py of gte-Qwen2, modeling_gritlm7b.py of GritLM/GritLM-7B,
modeling_lfm2_bidirectional.py of LiquidAI/LFM2.5-Embedding-350M, modeling_qwen3_bidirectional.py of voyageai/voyage-4-nano,
modeling_internlm2.py of internlm/internlm2-1_8b-reward, modeling_internlm3.py of internlm/internlm3-8b-instruct, and
configuration_eurobert.py of jinaai/jina-embeddings-v5-text-nano.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import log
from typing import Any, Final, cast

from whimbrel.checkpoint.config import common
from whimbrel.checkpoint.config.common import ACTIVATIONS, CONV, DECODER, FULL, SLIDING, allow_auto_map
from whimbrel.checkpoint.json_file import Fixed, JsonFile
from whimbrel.types.card import Encoder, Latent, Layer, Rotary, Routing
from whimbrel.types.choices import PoolingMode
from whimbrel.types.heads import Dense

_POOLINGS: Final[Mapping[str, PoolingMode]] = {"avg": "mean", "cls": "cls", "last": "lasttoken"}


def read_stated_pooling(config: JsonFile) -> PoolingMode | None:
    """Return the pooling that config.json states, or that of GritLM."""
    if is_gritlm(config):
        return "mean"
    return config.choice("pooling", _POOLINGS, "avg") if config.data.get("model_type") == "llama_bidirec" else None


def is_gritlm(config: JsonFile) -> bool:
    """Return whether this is GritLM, by the code that it names on the hub or as saved for vLLM."""
    is_own = any(name.startswith("modeling_gritlm7b.") for name in common.own_code(config).values())
    return is_own or config.data.get("architectures") == ["GritLM"]


def read_llama_bidirec(config: JsonFile) -> Encoder:
    allow_auto_map(config)
    read_stated_pooling(config)
    config.require_values({"is_causal": (False, None), "use_bidirectional_attention": (True, None)})
    return replace(read_llama(config), causal=False)


def read_qwen2(config: JsonFile) -> Encoder:
    """Read Qwen2. The code of gte-Qwen2 differs in `is_causal`, and that of reward models in the head's layers."""
    names = cast(list[str], config.get("architectures", list))
    is_gte = common.own_code(config).get("AutoModel") == "modeling_qwen.Qwen2Model"
    if is_gte and config.data.get("is_causal") is None:
        message = "is missing, and code of this name sees both ways unless it is told not to; add false or true"
        raise config.error(f"{message}, as the model was trained.", "is_causal")
    if is_gte or config.data.get("is_causal") is False or any(name.endswith("RewardModel") for name in names):
        allow_auto_map(config)
    return replace(read_llama(config), qkv_bias=True, out_bias=False)


_VOYAGE: Final = ("VoyageQwen3BidirectionalEmbedModel", "modeling_qwen3_bidirectional.Qwen3BidirectionalModel")
"""Architecture by which vLLM serves voyage-4-nano, and the class in its own code."""


def read_qwen3(config: JsonFile) -> Encoder:
    """Read Qwen3 and voyage-4-nano, which sees both ways and has a linear layer after the last norm."""
    config.ignore("task_names")  # of jina-embeddings-v5, whose adapter may be merged into the weights
    if not _is_voyage(config):
        return read_llama(config, "qwen3")
    allow_auto_map(config)
    config.require_values(dict.fromkeys(("is_causal", "use_sliding_window"), (False, None)))
    config.require_values({"use_bidirectional_attention": (True, None)})
    if config.data.get("use_bidirectional_attention") is None and config.data.get("architectures") != [_VOYAGE[0]]:
        raise config.error("is missing; without it the model's own code may see one way only.", "use_bidirectional_attention")
    return replace(read_llama(config, "qwen3"), causal=False)


def read_token_head(config: JsonFile, encoder: Encoder) -> tuple[Dense, ...]:
    """Return the linear layer that each hidden state passes in the model's own code, if there is one."""
    if not _is_voyage(config):
        return ()
    return (Dense(None, "linear", encoder.hidden_size, config.positive("num_labels"), bias=False, activation="identity"),)


def _is_voyage(config: JsonFile) -> bool:
    return config.data.get("architectures") == [_VOYAGE[0]] or common.own_code(config).get("AutoModel") == _VOYAGE[1]


def read_qwen3_bidirec(config: JsonFile) -> Encoder:
    """Read Giga-Embeddings, which are Qwen3 without a causal mask."""
    allow_auto_map(config)
    config.get("is_causal", bool)
    config.require_values({"is_causal": (False,), "use_sliding_window": (False, None)})
    return replace(read_llama(config, "qwen3"), causal=False)


def read_internlm2(config: JsonFile) -> Encoder:
    """Read InternLM2. `reward_token_id` ends a text that a reward model judges; the caller writes it."""
    allow_auto_map(config)
    config.ignore("reward_token_id")
    bias = config.get("bias", bool, True)
    return replace(read_llama(config, "internlm2"), qkv_bias=bias, out_bias=bias)


def read_internlm3(config: JsonFile) -> Encoder:
    """Read InternLM3, whose own code and transformers have different names for biases."""
    allow_auto_map(config)
    encoder = read_llama(config)
    qkv_bias, bias = config.get("qkv_bias", bool, encoder.qkv_bias), config.get("bias", bool, encoder.up_bias)
    return replace(encoder, qkv_bias=qkv_bias, out_bias=bias, up_bias=bias, down_bias=bias)


def read_mistral(config: JsonFile) -> Encoder:
    """Read Mistral and GritLM. In GritLM every token attends to every other, whatever the window."""
    encoder = read_llama(config)
    if not is_gritlm(config):
        return encoder
    allow_auto_map(config)
    return replace(encoder, causal=False, layers=tuple(replace(layer, window=None) for layer in encoder.layers))


def read_llama(config: JsonFile, family: str = "llama") -> Encoder:
    """Read Llama and its descendants."""
    sizes = common.read_sizes(config)
    rotary = common.read_rotary(config, 10_000.0, sizes["head_width"])
    causal = config.get("is_causal", bool, True)
    config.require_values({"pretraining_tp": (1, None)})
    windows = _windows(config, common.read_depth(config), causal=causal)
    return Encoder(
        family=family,
        **sizes,
        layers=tuple(Layer(window, rotary) for window in windows),
        num_kv_heads=config.positive("num_key_value_heads", sizes["num_heads"]),
        **common.read_positions(config),
        causal=causal,
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        **DECODER,
        **common.read_biases(config),
    )


_EUROBERT_INERT: Final = """
    bos_token classifier_pooling clf_pooling eos_token hidden_dropout mask_token mask_token_id pad_token task_names
""".split()


def read_eurobert(config: JsonFile) -> Encoder:
    """Read EuroBERT, a Llama that sees both ways. Its code on the hub and transformers differ in the default of rope_theta."""
    allow_auto_map(config)
    config.require_values({"is_causal": (False, None), "sliding_window": (None,)})
    rotary = config.data.get("rope_parameters")
    if config.data.get("rope_theta") is None and not (isinstance(rotary, dict) and "rope_theta" in rotary):
        raise config.error("is missing, and code of this name has different defaults.", "rope_theta")
    config.ignore(*_EUROBERT_INERT)
    return replace(read_llama(config, "eurobert"), causal=False, norm_eps=config.get("rms_norm_eps", float, 1e-5))


def _windows(config: JsonFile, num_layers: int, *, causal: bool) -> list[int | None]:
    """Return the attention window of each layer. Qwen has a flag and a first layer for windows; others name kinds.

    transformers counts the token itself in a causal window, and not in one that goes both ways (masking_utils.py).
    """
    width = config.get("sliding_window", int, 0)
    is_unstated = not {"use_sliding_window", "max_window_layers"} & config.data.keys()
    used = config.get("use_sliding_window", bool, is_unstated)
    first = config.get("max_window_layers", int, 0)
    default = [SLIDING if width and used and i >= first else FULL for i in range(num_layers)]
    kinds = common.read_layer_types(config, num_layers, default)
    if SLIDING in kinds and width <= 0:
        raise config.error(f"must be positive, is {width}.", "sliding_window")
    return [width - causal if kind == SLIDING else None for kind in kinds]


def read_lfm2(config: JsonFile, *, causal: bool = True) -> Encoder:
    """Read LFM2, whose layers are short convolutions or attention. LFM2.5's encoders see both ways in both."""
    sizes = common.read_sizes(config)
    if not causal:
        allow_auto_map(config)
        config.ignore("disable_flash_attention")
    eps, width = config.get("norm_eps", float, 1e-5), sizes["hidden_size"]
    config.ignore(*"""
        block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init tie_embedding
    """.split())  # fmt: skip
    config.require_values({
        "is_causal": (causal, None), "block_norm_eps": (eps, None), "num_heads": (sizes["num_heads"], None), "theta": (None,),
        **dict.fromkeys(("block_use_swiglu", "use_pos_enc"), (True, None)),
        **dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), (width, None)),
    })  # fmt: skip
    attention = Layer(rotary=common.read_rotary(config, 1_000_000.0, sizes["head_width"]))
    conv = Layer(conv_width=config.positive("conv_L_cache", 3))
    depth = common.read_depth(config)
    attending = cast(list[object], config.get("full_attn_idxs", list, [*range(depth)]))  # in older configs
    default = [FULL if i in attending else CONV for i in range(depth)]
    kinds = common.read_layer_types(config, depth, default, known=(FULL, CONV))
    return Encoder(
        family="lfm2",
        **dict(sizes, intermediate_size=_lfm2_inner(config, sizes["intermediate_size"])),
        layers=tuple(attention if kind == FULL else conv for kind in kinds),
        num_kv_heads=config.positive("num_key_value_heads", 8),
        **common.read_positions(config),
        causal=causal,
        norm_eps=eps,
        activation="silu",
        **DECODER,
        **common.biases(),
        conv_bias=config.get("conv_bias", bool, False),
    )


def read_lfm2_moe(config: JsonFile) -> Encoder:
    """Read LFM2 with experts, of which each token passes a few; the first layers have none. No width is adjusted."""
    adjusting = ("block_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "block_auto_adjust_ff_dim")
    config.require_values({**dict.fromkeys(adjusting, (None,)), "output_router_logits": (False, True, None)})
    encoder = read_lfm2(config)
    experts, chosen = config.positive("num_experts", 32), config.positive("num_experts_per_tok", 4)
    if not chosen <= experts or experts < 2:
        raise config.error(f"is {chosen}, of {experts} experts.", "num_experts_per_tok")
    first = config.get("num_dense_layers", int, 2)
    return replace(
        encoder,
        family="lfm2_moe",
        layers=tuple(replace(layer, num_experts=experts if i >= first else 0) for i, layer in enumerate(encoder.layers)),
        intermediate_size=config.positive("intermediate_size"),
        experts_per_token=chosen,
        routing=Routing(
            intermediate_size=config.positive("moe_intermediate_size", 1792),
            shared_size=0,
            num_groups=1,
            top_groups=1,
            normalized=config.get("norm_topk_prob", bool, True),
            scale=config.get("routed_scaling_factor", float, 1.0),
            corrected=config.get("use_expert_bias", bool, True),
            eps=1e-6,
        ),
    )


def _lfm2_inner(config: JsonFile, inner: int) -> int:
    """Return the width of the MLP, which transformers computes from the one that is stated."""
    inner = config.positive("block_ff_dim", inner)
    factor = common.read_positive(config, "block_ffn_dim_multiplier", 1.0)
    multiple = config.positive("block_multiple_of", 256)
    if not config.get("block_auto_adjust_ff_dim", bool, True):
        return inner
    inner = int(2 * inner / 3)
    if config.data.get("block_ffn_dim_multiplier", 1.0) is None:
        return inner
    return -(-int(factor * inner) // multiple) * multiple


_DEEPSEEK_INERT: Final = """
    aux_loss_alpha ep_size head_dim num_mtp_layers num_nextn_predict_layers output_router_logits q_lora_rank qk_head_dim seq_aux
""".split()
_DEEPSEEK_FIXED: Final[Fixed] = {
    **dict.fromkeys(("moe_layer_freq", "pretraining_tp"), (1, None)),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
}


def read_deepseek(config: JsonFile, *, causal: bool = True) -> Encoder:
    """Read DeepSeek V3, or the encoder that Giga-Embeddings made of it, which sees both ways."""
    allow_auto_map(config)
    config.ignore(*_DEEPSEEK_INERT)
    config.require_values({**_DEEPSEEK_FIXED, "is_causal": (True, None) if causal else (False,)})
    if not causal:
        config.get("is_causal", bool)
    depth, width = common.read_depth(config), config.positive("hidden_size")
    heads, experts = config.positive("num_attention_heads"), config.positive("n_routed_experts", 256)
    config.require_values({"num_key_value_heads": (heads, None)})
    latent = Latent(
        query_rank=0 if config.data.get("q_lora_rank", 1536) is None else config.positive("q_lora_rank", 1536),
        key_rank=config.positive("kv_lora_rank", 512),
        plain_width=config.positive("qk_nope_head_dim", 128),
        rotary_width=config.positive("qk_rope_head_dim", 64),
        value_width=config.positive("v_head_dim", 128),
    )
    if latent.value_width > latent.width:
        raise config.error(f"{latent.value_width} is more than the {latent.width} columns of a key.", "v_head_dim")
    rotary, scale = _deepseek_rotary(config, latent)
    first = config.get("first_k_dense_replace", int, 3)
    return Encoder(
        family="deepseek",
        vocab_size=config.positive("vocab_size"),
        hidden_size=width,
        intermediate_size=config.positive("intermediate_size"),
        layers=tuple(Layer(rotary=rotary, num_experts=experts if i >= first else 0) for i in range(depth)),
        num_heads=heads,
        head_width=latent.width,
        **common.read_positions(config),
        causal=causal,
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        experts_per_token=config.positive("num_experts_per_tok", 8),
        routing=_deepseek_routing(config, experts),
        latent=latent,
        score_scale=scale,
        **DECODER,
        **common.biases(attention=config.get("attention_bias", bool, False)),
    )


def _deepseek_rotary(config: JsonFile, latent: Latent) -> tuple[Rotary, float]:
    """Return the rotary positions and the scale of the scores. In yarn two equal `mscale` move the factor to the scores."""
    key = "rope_parameters" if config.data.get("rope_parameters") else "rope_scaling"
    stated = cast(dict[str, Any], config.get(key, dict, {}))
    rest = {name: value for name, value in stated.items() if name not in ("mscale", "mscale_all_dim")}
    factor, moved = rest.get("factor"), stated.get("mscale_all_dim")
    if stated.get("mscale") != moved or not isinstance(moved, int | float | None) or rest.get("attention_factor") is not None:
        raise config.error(f"mscale {stated.get('mscale')!r:.80} and mscale_all_dim {moved!r:.80} are not supported.", key)
    rotary = common.read_rotary(JsonFile(config.name, {**config.data, key: rest}), 10_000.0, latent.rotary_width)
    config.ignore("rope_parameters", "rope_scaling", "rope_theta")
    scale = latent.width**-0.5
    if moved and rotary.scaling is not None and isinstance(factor, int | float):
        rotary = replace(rotary, scaling={**rotary.scaling, "attention_factor": 1.0})
        scale *= (0.1 * moved * log(factor) + 1.0) ** 2 if factor > 1 else 1.0
    return replace(rotary, interleaved=config.get("rope_interleave", bool, True)), scale


def _deepseek_routing(config: JsonFile, experts: int) -> Routing:
    groups, top = config.positive("n_group", 8), config.positive("topk_group", 4)
    chosen = config.positive("num_experts_per_tok", 8)
    if experts % groups or experts < 2 * groups:
        raise config.error(f"{experts} experts cannot be put into {groups} groups of two or more.", "n_group")
    if top > groups:
        raise config.error(f"is {top}, of {groups} groups.", "topk_group")
    if chosen > top * experts // groups:
        raise config.error(f"is {chosen}, of {top * experts // groups} experts in {top} groups.", "num_experts_per_tok")
    inner = config.positive("moe_intermediate_size", 2048)
    return Routing(
        intermediate_size=inner,
        shared_size=inner * config.positive("n_shared_experts", 1),
        num_groups=groups,
        top_groups=top,
        normalized=config.get("norm_topk_prob", bool, True),
        scale=config.get("routed_scaling_factor", float, 2.5),
    )


def read_gemma(config: JsonFile) -> Encoder:
    """Read Gemma, whose `hidden_act` "gelu" means the tanh form."""
    config.positive("head_dim")
    config.require_values({"hidden_activation": ("gelu_pytorch_tanh", None)})
    decoder = read_llama(config, "gemma")
    return replace(
        decoder,
        embedding_scale=decoder.hidden_size**0.5,
        causal=not config.get("use_bidirectional_attention", bool, False),
        norm="rms_plus_one",
        activation=config.choice("hidden_act", dict(ACTIVATIONS, gelu="gelu_tanh"), "gelu"),
    )


def read_gemma2(config: JsonFile) -> Encoder:
    sizes, num_layers = common.read_sizes(config), common.read_depth(config)
    rotary = common.read_rotary(config, 10_000.0, sizes["head_width"])
    kinds = common.read_layer_types(config, num_layers, [FULL if i % 2 else SLIDING for i in range(num_layers)])
    window = config.positive("sliding_window", 4096) - 1
    config.require_values({"sliding_window_size": (window + 1, None)})
    layers = tuple(Layer(window if kind == SLIDING else None, rotary) for kind in kinds)
    cap = config.get("attn_logit_softcapping", float, 0.0)
    return replace(_gemma(config, "gemma2", sizes, layers), softcap=cap or None)


def read_gemma3(config: JsonFile) -> Encoder:
    sizes, num_layers = common.read_sizes(config), common.read_depth(config)
    every = config.positive("sliding_window_pattern", config.positive("_sliding_window_pattern", 6))
    kinds = common.read_layer_types(config, num_layers, [SLIDING if (i + 1) % every else FULL for i in range(num_layers)])
    full, sliding = config.get("rope_theta", float, 1_000_000.0), config.get("rope_local_base_freq", float, 10_000.0)
    both_ways = config.get("use_bidirectional_attention", bool, False)
    width = config.positive("sliding_window", 4096)
    window = width // 2 if both_ways else width - 1
    layers = common.read_layers(config, kinds, {FULL: full, SLIDING: sliding}, sizes["head_width"], window=window)
    config.require_values({"attn_logit_softcapping": (None,)})
    return _gemma(config, "gemma3", sizes, layers)


def _gemma(config: JsonFile, family: str, sizes: dict[str, Any], layers: tuple[Layer, ...]) -> Encoder:
    config.ignore("final_logit_softcapping", "hidden_act")
    return Encoder(
        family=family,
        **sizes,
        layers=layers,
        num_kv_heads=config.positive("num_key_value_heads"),
        **common.read_positions(config),
        embedding_scale=sizes["hidden_size"] ** 0.5,
        causal=not config.get("use_bidirectional_attention", bool, False),
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        score_scale=common.read_positive(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        **(DECODER | {"norm": "rms_plus_one"}),
        **common.biases(attention=config.get("attention_bias", bool, False)),
    )
