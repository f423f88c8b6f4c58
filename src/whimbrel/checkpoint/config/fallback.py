"""Configs of architectures that transformers runs.

Reads only the fields that the rest of the program needs. `model/hf.py` checks at load how transformers reads the file, and
whether the model can be packed. Architectures that are known not to be packable are refused here, with the reason.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final, cast

from whimbrel.checkpoint.config.common import NO_LAYERS, read_positions
from whimbrel.checkpoint.json_file import JSON, Fixed, JsonFile
from whimbrel.types.card import FALLBACK, Encoder

_ENDINGS: Final = ("Model", "ForCausalLM", "ForMaskedLM", "ForPreTraining")
_CLASSES: Final = ("ForSequenceClassification", "ForTokenClassification")
OTHER_TASKS: Final = """
    ForCausalLM ForMaskedLM ForMultipleChoice ForNextSentencePrediction ForPreTraining ForQuestionAnswering
    ForSequenceClassification ForTokenClassification LMHeadModel
""".split()
"""Endings of classes in transformers that compute the same hidden states as a family's "Model", and then something else."""
_OF_ENCODERS: Final = ("Data2VecText", "RobertaPreLayerNorm", "XLMRobertaXL", "Xmod")
_POOLED: Final = {"Albert": "albert.pooler", "Ernie": "ernie.pooler.dense", "MobileBert": "mobilebert.pooler.dense"}
OWN_HEADS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    **{f"{stem}ForSequenceClassification": ((pooler,), "classifier") for stem, pooler in _POOLED.items()},
    **{f"{stem}ForSequenceClassification": (("classifier.dense",), "classifier.out_proj") for stem in _OF_ENCODERS},
    **{f"{stem}ForTokenClassification": ((), "classifier") for stem in ("GPT2", *_POOLED, *_OF_ENCODERS)},
}
"""Classifier -> layers with tanh over the first token, or over each, and the layer that gives the classes."""
_AFTER_PADDING: Final = frozenset({"data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl", "xmod"})
_BYPASS: Final = "does not pass through transformers' attention interface"
_UNPACKABLE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("big_bird", "longformer"), f"its sparse attention {_BYPASS}"),
    **dict.fromkeys(("deberta", "xlnet"), f"its attention to relative positions {_BYPASS}"),
    **dict.fromkeys(("esm", "esmc"), "it looks at the mask tokens of all texts of a batch at once"),
    "umt5": f"its bias of relative positions {_BYPASS}",
    "rembert": f"its attention {_BYPASS}",
    "funnel": "it shortens a batch as if it were one text",
    "llama4_text": "its attention is cut into chunks",
}
"""Model type -> reason why packed texts would not get their own vectors."""
_VISION: Final = "it embeds images too, and its text tower alone is not read"
_UNREAD: Final[Mapping[str, str]] = {
    **dict.fromkeys(("bart", "mbart", "led"), "it is an encoder with a decoder, of whose last token the classes are made"),
    **dict.fromkeys(("chinese_clip", "clip", "siglip", "siglip2"), _VISION),
    "dpr": "its encoders of questions and passages are read only as Sentence Transformers saves them",
}
_CHANGING: Final = ("dynamic", "longrope")
"""Kinds of rotary scaling whose frequencies depend on the longest text of the batch."""
_FIXED: Final[Fixed] = {
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
    "gpt2": "n_ctx n_special predict_special_tokens",
    "modernbert-decoder": """
        causal_mask classifier_pooling deterministic_flash_attn global_attn_every_n_layers global_rope_theta layer_norm_eps
        local_rope_theta position_embedding_type reference_compile repad_logits_with_grad sparse_pred_ignore_index
        sparse_prediction
    """,
    "phi3": "attention_bias",  # if there were biases, their weights would be unknown
    "smollm3": "max_window_layers pretraining_tp",
}
"""Model type, or "" for all -> keys on the hub that transformers' classes do not declare: translated old names, or unused."""


def reason_to_refuse(model_type: str) -> str:
    """Return the reason why models of a type are refused. Empty if none is known."""
    return _UNPACKABLE.get(model_type) or _UNREAD.get(model_type, "")


def is_offered(config: JsonFile, names: list[object]) -> bool:
    """Return whether transformers has these classes. Raises CheckpointError if it might have them, but is not installed."""
    if config.get("model_type", str, "") in (*_UNPACKABLE, *_UNREAD):
        return True  # to be refused with the reason
    if not names or not all(isinstance(name, str) and name.endswith((*_ENDINGS, *_CLASSES)) for name in names):
        return False
    if find_spec("transformers") is None:
        reason = "is not among the families that Whimbrel runs itself; others need transformers: pip install 'whimbrel[hf]'."
        raise config.error(f"{names!r:.80} {reason}", "architectures")
    import transformers

    known = frozenset(dir(transformers)).issuperset(names)
    for name in cast(list[str], names) if known else ():
        if name.endswith(_CLASSES) and not _is_known_head(name):
            kinds = f"the generic ones of decoders (a layer `score`) and those of {', '.join((*_POOLED, *_OF_ENCODERS))}"
            message = f"{name} has a head of its own; of the others in transformers these run: {kinds}."
            raise config.error(message, "architectures")
    return known


def find_base_class(config: JsonFile, names: list[object]) -> str | None:
    """Return transformers' class for hidden states of this model_type, of which `names` are classes for other tasks.

    None if there is none, if transformers is not installed, or if `is_offered` knows these classes.
    """
    model_type = config.data.get("model_type")
    if any(not isinstance(name, str) or name.endswith((*_ENDINGS, *_CLASSES)) for name in names):
        return None
    if not all(name.endswith((*OTHER_TASKS,)) for name in cast(list[str], names)):
        return None  # such as HF_ColBERT; importing transformers takes seconds, in each process of a server
    if not isinstance(model_type, str) or find_spec("transformers") is None:
        return None
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    for name in cast(list[str], names):
        kind = getattr(transformers, name, None)
        if kind is None or kind.config_class.model_type != model_type:
            return None
    base: object = MODEL_MAPPING_NAMES.get(model_type)
    return base if isinstance(base, str) else None


def _is_known_head(name: str) -> bool:
    """Return whether a classifier has the head that transformers gives to most decoders, or one of `OWN_HEADS`."""
    import transformers
    from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

    if name == "GPT2ForSequenceClassification" or name in OWN_HEADS:  # GPT-2's is the usual head, but no generic class
        return True
    return issubclass(getattr(transformers, name), GenericForSequenceClassification | GenericForTokenClassification)


def read_fallback(config: JsonFile) -> Encoder:
    model_type = config.get("model_type", str)
    if model_type in _UNPACKABLE:
        raise config.error(f"{model_type} cannot be run in a ragged batch: {_UNPACKABLE[model_type]}.", "model_type")
    if model_type in _UNREAD:
        raise config.error(f"{model_type} is not supported: {_UNREAD[model_type]}.", "model_type")
    names = cast(list[object], config.get("architectures", list))
    if len(names) != 1:
        raise config.error(f"must name one architecture, is {names!r:.80}.", "architectures")
    config.require_values(_FIXED)
    config.ignore("classifier_activation")
    if names == ["MobileBertForSequenceClassification"]:  # without it, its pooler is the first token
        config.require_values({"classifier_activation": (True, None)})
    for key in ("rope_scaling", "rope_parameters"):  # of all layers, or of a kind of layers
        parameters = cast(JSON, config.get(key, dict, {}))
        for each in (parameters, *(cast(JSON, value) for value in parameters.values() if isinstance(value, dict))):
            if (kind := each.get("rope_type", each.get("type"))) in _CHANGING:
                reason = "a text's vector would depend on the longest text of its batch."
                raise config.error(f"{kind} is not supported: {reason}", key)
    return Encoder(
        family=FALLBACK,
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive(_key(config, "hidden_size", "n_embd")),
        **read_positions(
            config, after_padding=model_type in _AFTER_PADDING, key=_key(config, "max_position_embeddings", "n_positions")
        ),
        type_vocab_size=config.get("type_vocab_size", int, 0),
        **NO_LAYERS,
    )


def undeclared_keys(config: JsonFile) -> frozenset[str]:
    """Return the keys that a config may have besides those that transformers' class declares."""
    more = _UNDECLARED.get(config.get("model_type", str), "")
    if "position_embedding_type" not in more:
        config.require_values({"position_embedding_type": ("absolute", None)})
    return frozenset((*_FIXED, "classifier_activation", *_UNDECLARED[""].split(), *more.split(), "position_embedding_type"))


def _key(config: JsonFile, name: str, other: str) -> str:
    """Return the name that this config gives to a setting."""
    return other if config.data.get(name) is None and config.data.get(other) is not None else name
