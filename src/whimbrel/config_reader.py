"""config.json -> Encoder: one reader per dialect of config. Every key is read, known not to matter, or refused.

Sources: transformers/models/*/configuration_*.py (5.23), and code on the hub that checkpoints came with: Alibaba-NLP/new-impl
(gte-multilingual-base, gte-base-en-v1.5, snowflake-arctic-embed-m-v2.0), llama_bidirectional_model.py of
nvidia/llama-nemotron-embed-1b-v2, modeling_qwen.py of gte-Qwen2, modeling_gritlm7b.py of GritLM/GritLM-7B. More of those in
`config_hub`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias, cast

from whimbrel.card import Encoder, Layer, PoolingMode
from whimbrel.config_adapters import name_adapter_folders
from whimbrel.config_fallback import is_offered, read_fallback, undeclared_keys
from whimbrel.config_hub import read_jina_bert, read_jina_roberta, read_nomic
from whimbrel.config_parts import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    accept_own_code,
    read_layer_types,
    read_positive,
    read_rotary,
    read_sizes,
    read_types,
    refuse_own_code,
    rope_parameters,
)
from whimbrel.json_file import JsonFile

_Reader: TypeAlias = Callable[[JsonFile], Encoder]

# Keys that never change a vector: training, generation, bookkeeping, heads of other tasks.
_INERT: Final = frozenset(
    """
    _attn_implementation _commit_hash _name_or_path _num_labels architectures attention_dropout
    attention_probs_dropout_prob attn_implementation bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward classifier_dropout cross_attention_hidden_size decoder_start_token_id directionality
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    hidden_dropout_prob id2label initializer_range label2id language length_penalty max_length min_length model_type name
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_past output_scores pad_token_id pooler_fc_size pooler_num_attention_heads
    pooler_num_fc_layers pooler_size_per_head pooler_type prefix problem_type remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate sep_token_id summary_activation summary_first_dropout summary_last_dropout
    summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p use_bfloat16 use_cache use_return_dict xla_device
    is_matryoshka matryoshka_dimensions
""".split()
)

# Keys that would change a vector, with the only values that are supported.
_FIXED: Final[Mapping[str, tuple[object, ...]]] = {
    "is_decoder": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
    "add_pooling_layer": (True, False, None),
    "quantization_config": (None,),
}


def read_encoder(config: JsonFile) -> Encoder:
    """The transformer that config.json describes. Raises CheckpointError."""
    names = cast(list[object], config.get("architectures", list))
    if names == ["HF_ColBERT"]:
        names = list[object]([_wrapped(config)])
    if not _is_native(config, names) and is_offered(config, names):
        config.refuse_other(_FIXED)
        return _checked(config, read_fallback(config))
    if not all(isinstance(name, str) and name in _ARCHITECTURES for name in names):
        refuse_own_code(config)
    rows = [_form(config, name) for name in names]
    if len(set(rows)) != 1:
        raise config.error(f"must name one architecture, is {names!r:.80}.", "architectures")
    model_type, reader = rows[0]
    if "use_flash_attn" in config.data and not config.data.get("model_type"):
        config.ignore("model_type")  # jina-reranker-v2 states none
    else:
        config.get("model_type", str)
        config.refuse_other({"model_type": (model_type,)})
    encoder = reader(config)
    refuse_own_code(config)
    config.refuse_other(_FIXED)
    config.refuse_unread(_INERT)
    return _checked(config, encoder)


def refuse_undeclared(config: JsonFile, declared: Collection[str]) -> None:
    """Refuse keys of a fallback's config that transformers' class does not declare, and of which nothing else is known."""
    config.refuse_unknown(_INERT, _FIXED, undeclared_keys(config), declared)


def _is_native(config: JsonFile, names: list[object]) -> bool:
    """Whether Whimbrel has the family, though perhaps not with these heads."""
    model_type = config.get("model_type", str, "")
    return model_type in _MODEL_TYPES or any(isinstance(name, str) and name in _ARCHITECTURES for name in names)


def _checked(config: JsonFile, encoder: Encoder) -> Encoder:
    if not 0 <= encoder.pad_id < encoder.vocab_size:
        raise config.error(f"{encoder.pad_id} is outside the vocabulary of {encoder.vocab_size}.", "pad_token_id")
    if encoder.num_heads % encoder.num_kv_heads:
        raise config.error(f"{encoder.num_kv_heads} does not divide {encoder.num_heads} heads.", "num_key_value_heads")
    return encoder


def _wrapped(config: JsonFile) -> str:
    """The architecture that Stanford's ColBERT wraps."""
    if config.data.get("position_embedding_type") == "rotary":
        return "ColBERTJinaRobertaModel"
    return config.choice("model_type", {"bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel"})


def _form(config: JsonFile, name: object) -> tuple[str, _Reader]:
    """The model type and the reader of an architecture. An error names what there is of its family, or the families."""
    if isinstance(name, str) and name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    stems = [stem for stem in _FORMS if isinstance(name, str) and name.startswith(f"{stem}For")]
    known = [stem + ending for stem in stems for ending in _FORMS[stem][1]] or [f"{stem}..." for stem in _FORMS]
    raise config.error(f"{name!r:.80} is not supported; supported: {', '.join(known)}.", "architectures")


def stated_pooling(config: JsonFile) -> PoolingMode | None:
    """How config.json says that tokens are pooled: llama_bidirec says it there, and GritLM is known to."""
    if is_gritlm(config):
        return "mean"
    return config.choice("pooling", _POOLINGS, "avg") if config.data.get("model_type") == "llama_bidirec" else None


def is_gritlm(config: JsonFile) -> bool:
    """Whether this is GritLM: by the code that it names on the hub, or as it was saved for vLLM."""
    code: object = config.data.get("auto_map")
    names = list(cast(dict[str, object], code).values()) if isinstance(code, dict) else []
    return config.data.get("architectures") == ["GritLM"] or any(
        isinstance(name, str) and name.rpartition("--")[2].startswith("modeling_gritlm7b.") for name in names
    )


_POOLINGS: Final[Mapping[str, PoolingMode]] = {"avg": "mean", "cls": "cls", "last": "lasttoken"}


def _bert(config: JsonFile, family: str = "bert", *, after_padding: bool = False) -> Encoder:
    """BERT and what shares its config. `after_padding`: positions begin after the padding id."""
    config.refuse_other({"position_embedding_type": ("absolute", None)})
    pad_id = config.get("pad_token_id", int) if after_padding else config.get("pad_token_id", int, 0)
    offset = pad_id + 1 if after_padding else 0
    max_positions = config.positive("max_position_embeddings") - offset
    if max_positions <= 0:
        raise config.error(f"leaves no position after pad_token_id {pad_id}.", "max_position_embeddings")
    return Encoder(
        family=family,
        **read_sizes(config),
        max_positions=max_positions,
        position_offset=offset,
        pad_id=pad_id,
        type_vocab_size=config.positive("type_vocab_size", 2),
        norm_eps=config.get("layer_norm_eps", float, 1e-12),
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
    )


def _electra(config: JsonFile) -> Encoder:
    return replace(_bert(config, "electra"), embedding_size=config.positive("embedding_size", 128))


def _mpnet(config: JsonFile) -> Encoder:
    config.refuse_other({"relative_attention_num_buckets": (32,), "pad_token_id": (1,)})
    bert = _bert(config, "mpnet", after_padding=True)
    return replace(
        bert, type_vocab_size=0, positions="relative", num_buckets=config.get("relative_attention_num_buckets", int, 32)
    )


def _distilbert(config: JsonFile) -> Encoder:
    config.ignore("dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_")
    hidden_size, num_heads = config.positive("dim"), config.positive("n_heads")
    if hidden_size % num_heads:
        raise config.error(f"{num_heads} does not divide dim {hidden_size}.", "n_heads")
    return Encoder(
        family="distilbert",
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.positive("hidden_dim"),
        layers=(Layer(),) * config.positive("n_layers"),
        num_heads=num_heads,
        max_positions=config.positive("max_position_embeddings"),
        pad_id=config.get("pad_token_id", int, 0),
        norm_eps=1e-12,
        activation=config.choice("activation", ACTIVATIONS, "gelu"),
    )


def _xlm_roberta(config: JsonFile) -> Encoder:
    if config.data.get("position_embedding_type") == "rotary":
        return read_jina_roberta(config)
    return _jina_reranker(config) if "use_flash_attn" in config.data else _ROBERTA(config)


def _jina_reranker(config: JsonFile) -> Encoder:
    """XLM-RoBERTa in the code that jina-embeddings-v3 came with too, with learned positions."""
    accept_own_code(config)
    config.get("use_flash_attn", bool, True)
    return _bert(config, "jina_reranker", after_padding=True)


def _nomic(config: JsonFile) -> Encoder:
    if "n_embd" in config.data:
        return read_nomic(config)
    return _rotary_bert(config, "nomic_bert", theta=1000.0, types=2, gated=True, biases=False)


def _gte(config: JsonFile, theta: float) -> Encoder:
    """Saved by transformers, or by the code that it has this model from."""
    accept_own_code(config)
    config.refuse_other(_GTE_FIXED)
    for key in ("unpad_inputs", "use_memory_efficient_attention"):
        config.get(key, bool, False)
    return _rotary_bert(config, "gte", theta=theta, types=1, gated=True, biases=True)


_GTE_FIXED: Final[Mapping[str, tuple[object, ...]]] = {
    "layer_norm_type": ("layer_norm", None),
    "logn_attention_clip1": (False, None),
    "logn_attention_scale": (False, None),
    "pack_qkv": (True, None),
    "position_embedding_type": ("rope", None),
}


def _rotary_bert(config: JsonFile, family: str, *, theta: float, types: int, gated: bool, biases: bool) -> Encoder:
    """nomic_bert, gte and jina_embeddings_v3 as transformers has them: post-norm, rotary positions."""
    sizes = read_sizes(config)
    rotary = read_rotary(config, rope_parameters(config, theta), sizes["head_width"])
    return Encoder(
        family=family,
        **dict(sizes, layers=tuple(replace(layer, rotary=rotary) for layer in sizes["layers"])),
        max_positions=config.positive("max_position_embeddings"),
        pad_id=config.get("pad_token_id", int, 0),
        type_vocab_size=read_types(config, types),
        norm_eps=config.get("layer_norm_eps", float, 1e-12),
        activation=config.choice("hidden_act", ACTIVATIONS),
        positions="rotary",
        gated=gated,
        qkv_bias=biases,
        out_bias=biases,
        up_bias=biases and not gated,
        down_bias=biases,
    )


def _jina_v3(config: JsonFile) -> Encoder:
    """As transformers has it. It knows nothing of some keys of the code on the hub, which are still there: they must agree."""
    encoder = _rotary_bert(config, "jina_embeddings_v3", theta=20_000.0, types=1, gated=False, biases=True)
    rotary = encoder.layers[0].rotary
    config.refuse_other(
        {
            "position_embedding_type": ("rotary", None),
            "rotary_emb_base": (rotary.theta if rotary else None, None),
            "truncate_dim": (None,),
        }
    )
    return replace(encoder, **name_adapter_folders(config))


def _modernbert(config: JsonFile) -> Encoder:
    config.ignore(*_MODERNBERT_INERT)
    sizes = read_sizes(config)
    num_layers = len(sizes["layers"])
    every = config.positive("global_attn_every_n_layers", 3)
    kinds = read_layer_types(config, num_layers, [FULL if i % every == 0 else SLIDING for i in range(num_layers)])
    thetas = {
        FULL: config.get("global_rope_theta", float, 160_000.0),
        SLIDING: config.get("local_rope_theta", float, 10_000.0),
    }
    rotary = {kind: read_rotary(config, rope_parameters(config, thetas[kind], kind), sizes["head_width"]) for kind in thetas}
    window = config.positive("local_attention", 128) // 2
    bias = config.get("attention_bias", bool, False)
    mlp_bias = config.get("mlp_bias", bool, False)
    return Encoder(
        family="modernbert",
        **dict(sizes, layers=tuple(Layer(window if kind == SLIDING else None, rotary[kind]) for kind in kinds)),
        max_positions=config.positive("max_position_embeddings", 8192),
        pad_id=config.get("pad_token_id", int, 50283),
        norm_eps=config.get("norm_eps", float, 1e-5),
        norm_bias=config.get("norm_bias", bool, False),
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu"),
        positions="rotary",
        gated=True,
        qkv_bias=bias,
        out_bias=bias,
        up_bias=mlp_bias,
        down_bias=mlp_bias,
    )


_MODERNBERT_INERT: Final = """
    position_embedding_type layer_norm_eps
    classifier_activation classifier_bias classifier_dropout classifier_pooling cls_token_id decoder_bias
    deterministic_flash_attn embedding_dropout initializer_cutoff_factor mlp_dropout reference_compile
    repad_logits_with_grad sparse_pred_ignore_index sparse_prediction
""".split()


def _llama_bidirec(config: JsonFile) -> Encoder:
    accept_own_code(config)
    stated_pooling(config)
    config.refuse_other({"is_causal": (False, None)})
    return replace(_LLAMA(config), causal=False)


def _qwen2(config: JsonFile) -> Encoder:
    """The code that gte-Qwen2 came with differs in what `is_causal` says, that of reward models in the layers of the head."""
    names = cast(list[str], config.get("architectures", list))
    if config.data.get("is_causal") is False or any(name.endswith("RewardModel") for name in names):
        accept_own_code(config)
    return _decoder(config, "llama", theta=10_000.0, qkv_bias=True)


def _mistral(config: JsonFile) -> Encoder:
    """Mistral, and GritLM: for vectors every token sees every other, whatever the window."""
    encoder = _LLAMA(config)
    if not is_gritlm(config):
        return encoder
    accept_own_code(config)
    return replace(encoder, causal=False, layers=tuple(replace(layer, window=None) for layer in encoder.layers))


def _decoder(config: JsonFile, family: str, *, theta: float, qkv_bias: bool | None = None) -> Encoder:
    """Llama and its kin. `qkv_bias`: whether there is one, where the config does not say."""
    sizes = read_sizes(config)
    rotary = read_rotary(config, rope_parameters(config, theta), sizes["head_width"])
    bias = config.get("attention_bias", bool, False)
    mlp_bias = config.get("mlp_bias", bool, False)
    config.refuse_other({"pretraining_tp": (1, None)})
    return Encoder(
        family=family,
        **dict(sizes, layers=tuple(Layer(window, rotary) for window in _windows(config, len(sizes["layers"])))),
        num_kv_heads=config.positive("num_key_value_heads", sizes["num_heads"]),
        max_positions=config.positive("max_position_embeddings"),
        pad_id=config.get("pad_token_id", int, 0),
        causal=config.get("is_causal", bool, True),
        norm="rms",
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        positions="rotary",
        gated=True,
        qkv_bias=bias if qkv_bias is None else qkv_bias,
        out_bias=bias and qkv_bias is None,
        up_bias=mlp_bias,
        down_bias=mlp_bias,
    )


def _windows(config: JsonFile, num_layers: int) -> list[int | None]:
    """How far each layer sees, itself not counted. Qwen has a flag and a first layer for windows; others name kinds."""
    width = config.get("sliding_window", int, 0)
    used = config.get(
        "use_sliding_window", bool, "use_sliding_window" not in config.data and "max_window_layers" not in config.data
    )
    first = config.get("max_window_layers", int, 0)
    default = [SLIDING if width and used and i >= first else FULL for i in range(num_layers)]
    kinds = read_layer_types(config, num_layers, default)
    if SLIDING in kinds and width <= 0:
        raise config.error(f"must be positive, is {width}.", "sliding_window")
    return [width - 1 if kind == SLIDING else None for kind in kinds]


def _gemma1(config: JsonFile) -> Encoder:
    """A `hidden_act` of "gelu" stands for the tanh form."""
    config.positive("head_dim")
    config.refuse_other({"hidden_activation": ("gelu_pytorch_tanh", None)})
    decoder = _decoder(config, "gemma", theta=10_000.0)
    return replace(
        decoder,
        embedding_scale=decoder.hidden_size**0.5,
        causal=not config.get("use_bidirectional_attention", bool, False),
        norm="rms_plus_one",
        activation=config.choice("hidden_act", dict(ACTIVATIONS, gelu="gelu_tanh"), "gelu"),
    )


def _gemma2(config: JsonFile) -> Encoder:
    sizes = read_sizes(config)
    num_layers = len(sizes["layers"])
    rotary = read_rotary(config, rope_parameters(config, 10_000.0), sizes["head_width"])
    kinds = read_layer_types(config, num_layers, [FULL if i % 2 else SLIDING for i in range(num_layers)])
    window = config.positive("sliding_window", 4096) - 1
    layers = tuple(Layer(window if kind == SLIDING else None, rotary) for kind in kinds)
    return _gemma(config, "gemma2", dict(sizes, layers=layers), softcap="attn_logit_softcapping")


def _gemma3(config: JsonFile) -> Encoder:
    sizes = read_sizes(config)
    num_layers = len(sizes["layers"])
    every = config.positive("sliding_window_pattern", config.positive("_sliding_window_pattern", 6))
    kinds = read_layer_types(config, num_layers, [SLIDING if (i + 1) % every else FULL for i in range(num_layers)])
    thetas = {
        FULL: config.get("rope_theta", float, 1_000_000.0),
        SLIDING: config.get("rope_local_base_freq", float, 10_000.0),
    }
    rotary = {kind: read_rotary(config, rope_parameters(config, thetas[kind], kind), sizes["head_width"]) for kind in thetas}
    both_ways = config.get("use_bidirectional_attention", bool, False)
    width = config.positive("sliding_window", 4096)
    window = width // 2 if both_ways else width - 1
    layers = tuple(Layer(window if kind == SLIDING else None, rotary[kind]) for kind in kinds)
    config.refuse_other({"attn_logit_softcapping": (None,)})
    return _gemma(config, "gemma3", dict(sizes, layers=layers), softcap=None)


def _gemma(config: JsonFile, family: str, sizes: dict[str, Any], *, softcap: str | None) -> Encoder:
    config.ignore("final_logit_softcapping", "hidden_act")
    bias = config.get("attention_bias", bool, False)
    capped = config.get(softcap, float, 0.0) if softcap else 0.0
    return Encoder(
        family=family,
        **sizes,
        num_kv_heads=config.positive("num_key_value_heads"),
        max_positions=config.positive("max_position_embeddings"),
        pad_id=config.get("pad_token_id", int, 0),
        embedding_scale=sizes["hidden_size"] ** 0.5,
        causal=not config.get("use_bidirectional_attention", bool, False),
        norm="rms_plus_one",
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        positions="rotary",
        gated=True,
        qkv_bias=bias,
        out_bias=bias,
        up_bias=False,
        down_bias=False,
        score_scale=read_positive(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=capped or None,
    )


_ROBERTA: Final = partial(_bert, family="roberta", after_padding=True)
_LLAMA: Final = partial(_decoder, family="llama", theta=10_000.0)
_QWEN3: Final = partial(_decoder, family="qwen3", theta=10_000.0)

_CLASSES: Final = ("ForSequenceClassification", "ForTokenClassification")
_REWARDS: Final = ("ForRewardModel", "ForProcessRewardModel")
_FORMS: Final[Mapping[str, tuple[str, tuple[str, ...], _Reader]]] = {
    "Bert": ("bert", ("Model", "ForMaskedLM", "ForPreTraining", *_CLASSES), _bert),
    "Roberta": ("roberta", ("Model", "ForMaskedLM", *_CLASSES), _ROBERTA),
    "XLMRoberta": ("xlm-roberta", ("Model", "ForMaskedLM", *_CLASSES), _xlm_roberta),
    "XLMRobertaLoRA": ("xlm-roberta", ("",), read_jina_roberta),
    "ColBERTJinaRoberta": ("xlm-roberta", ("Model",), partial(read_jina_roberta, family="jina_colbert")),
    "Camembert": ("camembert", ("Model", "ForMaskedLM", *_CLASSES), _ROBERTA),
    "DistilBert": ("distilbert", ("Model", "ForMaskedLM", *_CLASSES), _distilbert),
    "Electra": ("electra", ("Model", "ForPreTraining", "ForMaskedLM", *_CLASSES), _electra),
    "MPNet": ("mpnet", ("Model", "ForMaskedLM", *_CLASSES), _mpnet),
    "NomicBert": ("nomic_bert", ("Model", "ForMaskedLM", "ForPreTraining", *_CLASSES), _nomic),
    "New": ("new", ("Model", "ForMaskedLM", *_CLASSES), partial(_gte, theta=10_000.0)),
    "Gte": ("gte", ("Model", "ForMaskedLM", *_CLASSES), partial(_gte, theta=160_000.0)),
    "JinaBert": ("bert", ("Model", "ForMaskedLM", *_CLASSES), read_jina_bert),
    "JinaEmbeddingsV3": (
        "jina_embeddings_v3",
        ("Model", "ForMaskedLM", *_CLASSES),
        _jina_v3,
    ),
    "ModernBert": ("modernbert", ("Model", "ForMaskedLM", *_CLASSES), _modernbert),
    "Llama": ("llama", ("Model", "ForCausalLM", *_CLASSES), _LLAMA),
    "LlamaBidirectional": ("llama_bidirec", ("Model", "ForSequenceClassification"), _llama_bidirec),
    "Mistral": ("mistral", ("Model", "ForCausalLM", *_CLASSES), _mistral),
    "GritLM": ("mistral", ("",), _mistral),
    "Qwen2": ("qwen2", ("Model", "ForCausalLM", *_CLASSES, *_REWARDS), _qwen2),
    "Qwen3": ("qwen3", ("Model", "ForCausalLM", *_CLASSES), _QWEN3),
    "Gemma": ("gemma", ("Model", "ForCausalLM", *_CLASSES), _gemma1),
    "Gemma2": ("gemma2", ("Model", "ForCausalLM", *_CLASSES), _gemma2),
    "Gemma3": ("gemma3_text", ("TextModel", "ForCausalLM", "TextForSequenceClassification"), _gemma3),
}
_ARCHITECTURES: Final[Mapping[str, tuple[str, _Reader]]] = {
    stem + ending: (model_type, reader) for stem, (model_type, endings, reader) in _FORMS.items() for ending in endings
}
_MODEL_TYPES: Final = frozenset(model_type for model_type, _, _ in _FORMS.values())
