"""Configs of models with custom code on the hub.

Whimbrel implements that code natively and never runs it. Sources, all on the hub:

- nomic-ai/nomic-bert-2048, modeling_hf_nomic_bert.py (nomic-embed-text-v1, v1.5 and v2-moe, snowflake-arctic-embed-m-long);
- jinaai/jina-bert-implementation and jinaai/jina-bert-v2-qk-post-norm, modeling_bert.py (jina-embeddings-v2);
- jinaai/xlm-roberta-flash-implementation, modeling_xlm_roberta.py and modeling_lora.py (jina-embeddings-v3, jina-colbert-v2).
"""

from collections.abc import Mapping
from typing import Final

from whimbrel.checkpoint.config import common
from whimbrel.checkpoint.config.adapters import read_stacked_adapters
from whimbrel.checkpoint.config.common import ACTIVATIONS, allow_auto_map
from whimbrel.checkpoint.json_file import Fixed, JsonFile
from whimbrel.types.card import Encoder, Layer, Rotary
from whimbrel.types.heads import Activation

_NOMIC_INERT: Final = """
    attn_pdrop dense_seq_output embd_pdrop fused_bias_fc fused_dropout_add_ln last_layer_subset max_position_embeddings n_ctx
    parallel_block_tied_norm reorder_and_upcast_attn resid_pdrop use_xentropy moe_impl moe_resid_pdrop router_aux_loss_coef
""".split()
_NOMIC_OFF: Final = """
    causal expert_choice_router moe_normalize_expert_weights norm_mlp parallel_block prenorm rotary_head_dim
    scale_attn_by_inverse_layer_idx use_rms_norm
""".split()
_NOMIC_FIXED: Final[Fixed] = {
    **dict.fromkeys(_NOMIC_OFF, (False, None)),
    "ffn_div": (1, None),
    "num_shared_experts": (0, None),
    "rotary_emb_scale_base": (None,),
    "scale_attn_weights": (True, None),
}
_GATES: Final[Mapping[str, Activation]] = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}


def read_hub_nomic(config: JsonFile) -> Encoder:
    """Read Nomic's BERT, whose config is GPT-2's: post-norm, rotary positions, and experts in some layers."""
    allow_auto_map(config)
    config.ignore(*_NOMIC_INERT)
    config.require_values(_NOMIC_FIXED)
    width, num_heads = config.positive("n_embd"), config.positive("n_head")
    if width % num_heads:
        raise config.error(f"{num_heads} does not divide n_embd {width}.", "n_head")
    rotary = _nomic_rotary(config, width // num_heads)
    multiple = config.positive("pad_vocab_size_multiple", 1)
    bias = config.get("qkv_proj_bias", bool, True)
    gated = config.data.get("activation_function") != "gelu"
    every, experts = _nomic_experts(config, gated=gated)
    depth = common.read_depth(config, "n_layer")
    positions, trained = config.positive("n_positions"), config.positive("max_trained_positions", 2048)
    if config.get("rotary_scaling_factor", float, 0.0 if "rotary_scaling_factor" in config.data else 1.0):
        positions = min(positions, trained)  # longer texts than in training would have other frequencies
    encoder = Encoder(
        family="nomic_bert" if gated else "nomic_bert_ungated",
        vocab_size=_round_up(config.positive("vocab_size"), multiple),
        hidden_size=width,
        intermediate_size=_round_up(config.positive("n_inner", 8 * width // 3), 256) if gated else config.positive("n_inner"),
        layers=tuple(Layer(rotary=rotary, num_experts=experts if every and i % every == 1 else 0) for i in range(depth)),
        num_heads=num_heads,
        max_positions=positions,
        pad_id=config.get("pad_token_id", int, 0),
        type_vocab_size=common.read_types(config, 2),
        norm_eps=config.get("layer_norm_epsilon", float, 1e-5),
        activation=config.choice("activation_function", {**_GATES, "gelu": "gelu"}),
        positions="rotary",
        gated=gated,
        experts_per_token=config.positive("moe_top_k", 1) if experts else 0,
        qkv_bias=bias,
        out_bias=bias,
        up_bias=config.get("mlp_fc1_bias", bool, True),
        down_bias=config.get("mlp_fc2_bias", bool, True),
    )
    twice: dict[str, object] = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        **dict.fromkeys(("num_attention_heads", "num_heads_kv"), num_heads),
        "head_dim": encoder.head_width,
        "intermediate_size": encoder.intermediate_size,
        "layer_norm_eps": encoder.norm_eps,
        "hidden_act": encoder.activation,
        "rope_parameters": {"rope_theta": rotary.theta, "rope_type": "default"},
    }
    config.require_values({key: (value, None) for key, value in twice.items()})  # transformers' names, in newer files
    return encoder


def _nomic_experts(config: JsonFile, *, gated: bool) -> tuple[int, int]:
    """Return (n, number of experts in the second of every n layers). (0, 0) without experts."""
    every, experts = config.get("moe_every_n_layers", int, 0), config.get("num_experts", int, 0)
    top = config.get("moe_top_k", int, 1)
    if every == 0 and experts == 0:
        return 0, 0
    if every < 2 or not 1 <= top <= experts:
        raise config.error(f"is {every}, with {top} of {experts} experts; this is not supported.", "moe_every_n_layers")
    if gated:
        raise config.error("a mixture of gated experts is not supported.", "activation_function")
    return every, experts


def _nomic_rotary(config: JsonFile, head_width: int) -> Rotary:
    theta, fraction = common.read_positive(config, "rotary_emb_base"), config.get("rotary_emb_fraction", float)
    width = int(head_width * fraction)
    if not 0 < width <= head_width or width % 2:
        raise config.error(f"{fraction} of {head_width} columns is not supported.", "rotary_emb_fraction")
    return Rotary(theta, width, interleaved=config.get("rotary_emb_interleaved", bool, False))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def read_jina_bert(config: JsonFile) -> Encoder:
    """Read Jina's BERT, with ALiBi instead of positions and mostly with a gated MLP."""
    allow_auto_map(config)
    config.require_values({"position_embedding_type": ("alibi",)})
    config.ignore("emb_pooler", "model_max_length")
    kinds: Mapping[str, Activation | None] = {"geglu": "gelu", "reglu": "relu", "original": None}
    gate = config.choice("feed_forward_type", kinds, "original")
    activation = config.choice("hidden_act", ACTIVATIONS, "gelu")
    return Encoder(
        family="jina_bert" if gate else "jina_bert_ungated",
        **common.read_sizes(config),
        layers=(Layer(),) * common.read_depth(config),
        **common.read_positions(config),
        type_vocab_size=config.positive("type_vocab_size", 2),
        norm_eps=config.get("layer_norm_eps", float, 1e-12),
        activation=gate or activation,
        positions="alibi",
        gated=gate is not None,
        up_bias=gate is None,
    )


JINA_INERT: Final = ("emb_pooler", "lora_dropout_p", "lora_main_params_trainable", "use_reentrant")
_GELUS: Final[Mapping[str, Activation]] = {name: value for name, value in ACTIVATIONS.items() if value in ("gelu", "gelu_tanh")}


def read_jina_roberta(config: JsonFile, family: str = "jina_embeddings_v3") -> Encoder:
    """Read XLM-RoBERTa with rotary positions, with adapters or without."""
    allow_auto_map(config)
    config.require_values({"position_embedding_type": ("rotary",), "truncate_dim": (None,)})
    adapters = read_stacked_adapters(config)
    if adapters and family != "jina_embeddings_v3":
        raise config.error("adapters are supported for jina-embeddings-v3 only.", "lora_adaptations")
    config.ignore(*JINA_INERT)
    config.get("use_flash_attn", bool, True)
    sizes, theta = common.read_sizes(config), config.get("rotary_emb_base", float, 10_000.0)
    if theta <= 0 or sizes["head_width"] % 2:
        raise config.error(f"theta {theta} over {sizes['head_width']} columns is not supported.", "rotary_emb_base")
    rotary = Rotary(theta, sizes["head_width"])
    return Encoder(
        family=family,
        **sizes,
        layers=(Layer(rotary=rotary),) * common.read_depth(config),
        **common.read_positions(config, pad_id=1),
        type_vocab_size=common.read_types(config, 1),
        norm_eps=config.get("layer_norm_eps", float, 1e-5),
        activation=config.choice("hidden_act", _GELUS, "gelu"),
        positions="rotary",
        **adapters,
    )
