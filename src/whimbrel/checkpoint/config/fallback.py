"""config.json -> Encoder, of an architecture that Whimbrel does not run itself: transformers does, where it is installed.

Only what the rest of the program needs to know is read here. What transformers makes of the file is checked at load, by
`models.hf`, and so is whether the model can be packed; what is known not to be is refused here, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final, TypeAlias, cast

from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.types.card import Encoder

FALLBACK: Final = "hf"
"""The family of such an Encoder."""

_ENDINGS: Final = ("Model", "ForCausalLM", "ForMaskedLM", "ForPreTraining")
_AFTER_PADDING: Final = frozenset({"data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl", "xmod"})
"""Model types whose positions begin after the padding id."""

_BIAS: Final = "its bias of relative positions does not pass through transformers' attention interface"
_SPARSE: Final = "its sparse attention does not pass through transformers' attention interface"
_RELATIVE: Final = "its attention to relative positions does not pass through transformers' attention interface"
_MASKS: Final = "it looks at the mask tokens of all texts of a batch at once"
_UNPACKABLE: Final[Mapping[str, str]] = {
    "big_bird": _SPARSE,
    "deberta": _RELATIVE,
    "deberta-v2": _RELATIVE,
    "esm": _MASKS,
    "esmc": _MASKS,
    "funnel": "it shortens a batch as if it were one text",
    "llama4_text": "its attention is cut into chunks",
    "longformer": _SPARSE,
    "mt5": _BIAS,
    "rembert": "its attention does not pass through transformers' attention interface",
    "t5": _BIAS,
    "umt5": _BIAS,
    "xlnet": _RELATIVE,
}
"""Model type -> why texts that lie one after another would not get their own vectors."""
_CHANGING: Final = ("dynamic", "longrope")
"""Kinds of rotary scaling whose frequencies depend on the longest text of the batch."""
_FIXED: Final[Mapping[str, tuple[object, ...]]] = {
    "attention_chunk_size": (None,),
    "clip_qkv": (None,),
    "trigram_input": (False, None),  # MobileBERT's, which looks at neighbours outside the text
}
_UNDECLARED: Final[Mapping[str, str]] = {
    "": """
        auto_map bos_token cls_token eos_token is_causal mask_token pad_token partial_rotary_factor rope_scaling rope_theta
        sep_token unk_token
    """,
    "albert": "down_scale_factor gap_size layers_to_keep net_structure_type num_memory_blocks",
    "ernie": "enable_recompute task_id",
    "eurobert": "hidden_dropout pretraining_tp",
    "gpt2": "n_ctx n_special predict_special_tokens",
    "modernbert-decoder": """
        causal_mask classifier_pooling deterministic_flash_attn global_attn_every_n_layers global_rope_theta layer_norm_eps
        local_rope_theta position_embedding_type reference_compile repad_logits_with_grad sparse_pred_ignore_index
        sparse_prediction
    """,
    "phi3": "attention_bias",  # if there were biases, their weights would be unknown
    "smollm3": "max_window_layers pretraining_tp",
}
"""Keys of the hub's configs that transformers' classes do not declare, in all models and by model type: they are old names
that transformers translates, or nobody reads them."""

_HIDDEN: Final = ("hidden_size", "n_embd")
_POSITIONS: Final = ("max_position_embeddings", "n_positions")
"""What configs call the same thing."""

JSON: TypeAlias = dict[str, Any]


def is_offered(config: JsonFile, names: list[object]) -> bool:
    """Whether transformers has classes of these names that turn tokens into hidden states. Raises CheckpointError where it
    might, and is not installed."""
    if config.get("model_type", str, "") in _UNPACKABLE:
        return True  # to be refused with the reason
    if not names or not all(isinstance(name, str) and name.endswith(_ENDINGS) for name in names):
        return False
    if find_spec("transformers") is None:
        raise config.error(
            f"{names!r:.80} is not among the families that Whimbrel runs itself; others need transformers:"
            " pip install 'whimbrel[hf]'.", "architectures",
        )  # fmt: skip
    import transformers

    return frozenset(dir(transformers)).issuperset(names)


def read_fallback(config: JsonFile) -> Encoder:
    """The Encoder of an architecture that is `offered`. Raises CheckpointError."""
    model_type = config.get("model_type", str)
    if model_type in _UNPACKABLE:
        raise config.error(f"{model_type} cannot be run in a ragged batch: {_UNPACKABLE[model_type]}.", "model_type")
    names = cast(list[object], config.get("architectures", list))
    if len(names) != 1:
        raise config.error(f"must name one architecture, is {names!r:.80}.", "architectures")
    config.require_values(_FIXED)
    for key in ("rope_scaling", "rope_parameters"):
        _refuse_changing(config, key, config.get(key, dict, {}))
    pad_id = config.get("pad_token_id", int) if model_type in _AFTER_PADDING else config.get("pad_token_id", int, 0)
    offset = pad_id + 1 if model_type in _AFTER_PADDING else 0
    positions = _key(config, _POSITIONS)
    max_positions = config.positive(positions) - offset
    if max_positions <= 0:
        raise config.error(f"leaves no position after pad_token_id {pad_id}.", positions)
    return Encoder(
        family=FALLBACK,
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive(_key(config, _HIDDEN)),
        max_positions=max_positions,
        position_offset=offset,
        pad_id=pad_id,
        type_vocab_size=config.get("type_vocab_size", int, 0),
        intermediate_size=0,
        layers=(),
        num_heads=1,
        norm_eps=0.0,
        activation="identity",
    )


def undeclared_keys(config: JsonFile) -> frozenset[str]:
    """Keys that may stand in a config beside those that transformers' class declares."""
    more = _UNDECLARED.get(config.get("model_type", str), "")
    if "position_embedding_type" not in more:
        config.require_values({"position_embedding_type": ("absolute", None)})
    return frozenset((*_FIXED, *_UNDECLARED[""].split(), *more.split(), "position_embedding_type"))


def _key(config: JsonFile, names: tuple[str, ...]) -> str:
    return next((name for name in names if config.data.get(name) is not None), names[0])


def _refuse_changing(config: JsonFile, key: str, given: JSON) -> None:
    """Of all layers, or of each kind of layers."""
    for each in (given, *(cast(JSON, value) for value in given.values() if isinstance(value, dict))):
        kind = each.get("rope_type", each.get("type"))
        if kind in _CHANGING:
            raise config.error(f"{kind} is not supported: a text's vector would depend on the longest text of its batch.", key)
