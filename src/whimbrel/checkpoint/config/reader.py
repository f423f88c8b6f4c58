"""Dispatch of config.json to architecture readers.

The readers are in `bert.py`, `decoders.py`, `hub_code.py`, `adapters.py` and `fallback.py`. Every key is
read by one of them, known not to matter, or refused. Sources: transformers/configuration_utils.py, models/*/configuration_*.py
(5.23).
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeAlias, cast

from whimbrel.checkpoint.config import adapters, bert, common, decoders, fallback, hub_code
from whimbrel.checkpoint.json_file import Fixed, JsonFile
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Encoder

_Reader: TypeAlias = Callable[[JsonFile], Encoder]
# Keys that never change a vector: training, generation, bookkeeping, heads of other tasks.
_INERT: Final = """
    _num_labels architectures attention_dropout attention_probs_dropout_prob bad_words_ids begin_suppress_tokens bos_token_id
    cache_implementation chunk_size_feed_forward classifier_dropout cross_attention_hidden_size decoder_start_token_id
    directionality diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    gradient_checkpointing_kwargs hidden_dropout_prob id2label initializer_range is_llama_config is_matryoshka label2id
    language length_penalty matryoshka_dimensions max_length min_length model_max_length model_type name no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states output_past output_scores
    pad_token_id pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type prefix
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id summary_activation
    summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p
    torchscript typical_p unk_token_id use_bfloat16 use_cache use_return_dict xla_device
""".split()
# Keys that would change a vector, with the only values that are supported.
_FIXED: Final[Fixed] = {
    **dict.fromkeys(("is_decoder", "is_encoder_decoder", "add_cross_attention"), (False, None)),
    "pruned_heads": ({}, None),
    "add_pooling_layer": (True, False, None),
    "quantization_config": (None,),
    "adapters": ({"adapters": {}, "config_map": {}, "fusion_config_map": {}, "fusions": {}}, {}, None),
}


def read_config(root: Path) -> JsonFile:
    """Return config.json with the architecture that runs. Raises CheckpointError.

    Sentence Transformers goes by `auto_map`, else by `model_type`, not by `architectures`. So if that is missing or empty, or
    names classes of a family for other tasks, it is replaced by the class that AutoModel takes. Other values stay.
    """
    task = JsonFile.read_optional(root, "sentence_bert_config.json").data.get("transformer_task")
    return with_architecture(JsonFile.read(root, "config.json"), _ENDING_FOR_TASK.get(str(task), "Model"))


def with_architecture(config: JsonFile, ending: str = "Model") -> JsonFile:
    """Return the config with the architecture that runs. `ending`: how classes for its task are called."""
    stated: object = config.data.get("architectures")
    if not isinstance(stated, list | None):
        return config
    names = cast(list[object], stated or [])
    name = _class_of_family(config, names) if names else _class_of_type(config, ending)
    return config if name is None else JsonFile(config.name, {**config.data, "architectures": [name]})


def _class_of_family(config: JsonFile, names: list[object]) -> str | None:
    """Return the class for hidden states of the family that has `names` for other tasks."""
    if any(not isinstance(name, str) or name in _ARCHITECTURES for name in names):
        return None
    stems = {next((stem for stem in _FORMS if str(name).removeprefix(stem) in fallback.OTHER_TASKS), None) for name in names}
    stem = stems.pop() if len(stems) == 1 else None
    return fallback.find_base_class(config, names) if stem is None else _native_class(stem, "Model")


def _class_of_type(config: JsonFile, ending: str) -> str | None:
    """Return the class that is taken if no architecture is named."""
    if config.data.get("auto_map"):
        own = common.own_code(config).get("AutoModel" if ending == "Model" else f"AutoModel{ending}", "").rpartition(".")[2]
        return own if own in _ARCHITECTURES else None
    stem = _STEMS.get(config.get("model_type", str, ""))
    return fallback.find_base_class(config, []) if stem is None else _native_class(stem, ending)


def _native_class(stem: str, ending: str) -> str | None:
    return next((stem + each for each in _FORMS[stem][1] if each.endswith(ending)), None)


def read_encoder(config: JsonFile) -> Encoder:
    """Return the transformer that config.json describes. Raises CheckpointError."""
    names = cast(list[object], config.get("architectures", list, []))
    if names == ["HF_ColBERT"]:
        names = list[object]([_colbert_architecture(config)])
    known = [isinstance(name, str) and name in _ARCHITECTURES for name in names]
    if not is_native(config.get("model_type", str, ""), names) and fallback.is_offered(config, names):
        encoder = fallback.read_fallback(config)
        config.require_values(_FIXED)
        return _check_encoder(config, encoder)
    if not all(known):
        common.reject_auto_map(config)
    if not names:
        raise _missing(config)
    rows = [_architecture(config, name) for name in names]
    if len(set(rows)) != 1:
        raise config.error(f"must name one architecture, is {names!r:.80}.", "architectures")
    model_type, reader = rows[0]
    if "use_flash_attn" in config.data and not config.data.get("model_type"):
        config.ignore("model_type")  # jina-reranker-v2 states none
    else:
        config.get("model_type", str)
        config.require_values({"model_type": (model_type,)})
    encoder = reader(config)
    common.reject_auto_map(config)
    config.require_values({key: values for key, values in _FIXED.items() if not config.was_read(key)})
    config.reject_unread_keys(_INERT)
    return _check_encoder(config, encoder)


def is_native(model_type: str, architectures: Collection[object]) -> bool:
    """Return whether Whimbrel runs a family by its own code: one that is named, with or without these heads."""
    return model_type in _MODEL_TYPES or any(isinstance(name, str) and name in _ARCHITECTURES for name in architectures)


def refuse_undeclared(config: JsonFile, declared: Collection[str]) -> None:
    """Raise CheckpointError if a fallback's config has a key that is neither known nor declared by transformers' class."""
    config.reject_unknown_keys(_INERT, _FIXED, fallback.undeclared_keys(config), declared)


def _missing(config: JsonFile) -> CheckpointError:
    """Return the error over a config that names no architecture, and whose model_type implies none."""
    if config.data.get("model_type") is None:
        return config.error("is missing, and so is architectures: nothing says which model this is.", "model_type")
    common.reject_auto_map(config)
    model_type, known = config.get("model_type", str), ", ".join(_STEMS)
    others = "" if find_spec("transformers") else "; others need transformers: pip install 'whimbrel[hf]'"
    message = f"is missing, and model_type {model_type!r:.80} does not tell the class that computes it, as those of {known} do"
    return config.error(f"{message}{others}.", "architectures")


def _check_encoder(config: JsonFile, encoder: Encoder) -> Encoder:
    if not 0 <= encoder.pad_id < encoder.vocab_size:
        raise config.error(f"{encoder.pad_id} is outside the vocabulary of {encoder.vocab_size}.", "pad_token_id")
    if encoder.num_heads % encoder.num_kv_heads:
        raise config.error(f"{encoder.num_kv_heads} does not divide {encoder.num_heads} heads.", "num_key_value_heads")
    return encoder


def _colbert_architecture(config: JsonFile) -> str:
    """Return the architecture that Stanford's ColBERT wraps."""
    jina = {"rotary": "ColBERTJinaRobertaModel", "alibi": "JinaBertModel"}
    if (positions := config.data.get("position_embedding_type")) in jina:
        return jina[positions]
    return config.choice("model_type", {"bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel"})


def _architecture(config: JsonFile, name: object) -> tuple[str, _Reader]:
    """Return the model type and the reader of an architecture. The error names the architectures of its family."""
    if isinstance(name, str) and name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    stems = [stem for stem in _FORMS if isinstance(name, str) and name.startswith(f"{stem}For")]
    known = [stem + ending for stem in stems for ending in _FORMS[stem][1]] or [f"{stem}..." for stem in _FORMS]
    raise config.error(f"{name!r:.80} is not supported; supported: {', '.join(known)}.", "architectures")


_CLASSES: Final = ("ForSequenceClassification", "ForTokenClassification")
_USUAL: Final = ("Model", "ForMaskedLM", *_CLASSES)
_TEXTS: Final = ("Model", "ForCausalLM")
_CAUSAL: Final = (*_TEXTS, *_CLASSES)
_ENCODER_DECODER: Final = ("EncoderModel", "Model", "ForConditionalGeneration")
_FORMS: Final[Mapping[str, tuple[str, tuple[str, ...], _Reader]]] = {
    "Bert": ("bert", (*_USUAL, "ForPreTraining"), bert.read_bert),
    "Contriever": ("bert", ("",), bert.read_bert),
    "Roberta": ("roberta", _USUAL, bert.read_roberta),
    "XLMRoberta": ("xlm-roberta", _USUAL, bert.read_xlm_roberta),
    "XLMRobertaLoRA": ("xlm-roberta", ("",), hub_code.read_jina_roberta),
    "ColBERTJinaRoberta": ("xlm-roberta", ("Model",), partial(hub_code.read_jina_roberta, family="jina_colbert")),
    "Camembert": ("camembert", _USUAL, bert.read_roberta),
    "DistilBert": ("distilbert", _USUAL, bert.read_distilbert),
    "Electra": ("electra", (*_USUAL, "ForPreTraining"), bert.read_electra),
    "MPNet": ("mpnet", _USUAL, bert.read_mpnet),
    "DebertaV2": ("deberta-v2", _USUAL, bert.read_deberta),
    "NomicBert": ("nomic_bert", (*_USUAL, "ForPreTraining"), bert.read_nomic),
    "New": ("new", _USUAL, partial(bert.read_gte, theta=10_000.0)),
    "Gte": ("gte", _USUAL, partial(bert.read_gte, theta=160_000.0)),
    "JinaBert": ("bert", _USUAL, hub_code.read_jina_bert),
    "JinaEmbeddingsV3": ("jina_embeddings_v3", _USUAL, bert.read_jina_v3),
    "JinaEmbeddingsV5": ("jina_embeddings_v5", ("Model",), adapters.read_jina_v5),
    "EuroBert": ("eurobert", _USUAL, decoders.read_eurobert),
    "ModernBert": ("modernbert", _USUAL, bert.read_modernbert),
    "T5": ("t5", (*_ENCODER_DECODER, "WithLMHeadModel"), bert.read_t5),
    "MT5": ("mt5", _ENCODER_DECODER, partial(bert.read_t5, projection="gated-gelu")),
    "Llama": ("llama", _CAUSAL, decoders.read_llama),
    "LlamaBidirectional": ("llama_bidirec", ("Model", "ForSequenceClassification"), decoders.read_llama_bidirec),
    "Mistral": ("mistral", _CAUSAL, decoders.read_mistral),
    "GritLM": ("mistral", ("",), decoders.read_mistral),
    "Qwen2": ("qwen2", (*_CAUSAL, "ForRewardModel", "ForProcessRewardModel"), decoders.read_qwen2),
    "InternLM2": ("internlm2", (*_TEXTS, "ForRewardModel", "ForSequenceClassification"), decoders.read_internlm2),
    "InternLM3": ("internlm3", _TEXTS, decoders.read_internlm3),
    "Qwen3": ("qwen3", _CAUSAL, decoders.read_qwen3),
    "Jina": ("qwen3", ("ForRanking",), decoders.read_qwen3),
    "VoyageQwen3Bidirectional": ("qwen3", ("EmbedModel",), decoders.read_qwen3),
    "Qwen3Bidirectional": ("qwen3_bidirec", ("Model",), decoders.read_qwen3_bidirec),
    "DeepseekV3": ("deepseek_v3", _TEXTS, decoders.read_deepseek),
    "DeepseekV3Bidirectional": ("deepseek_v3_bidirec", ("Model",), partial(decoders.read_deepseek, causal=False)),
    "Lfm2": ("lfm2", _TEXTS, decoders.read_lfm2),
    "Lfm2Moe": ("lfm2_moe", _TEXTS, decoders.read_lfm2_moe),
    "Lfm2Bidirectional": ("lfm2", ("Model", "ForMaskedLM"), partial(decoders.read_lfm2, causal=False)),
    "Gemma": ("gemma", _CAUSAL, decoders.read_gemma),
    "Gemma2": ("gemma2", _CAUSAL, decoders.read_gemma2),
    "Gemma3": ("gemma3_text", ("TextModel", "ForCausalLM", "TextForSequenceClassification"), decoders.read_gemma3),
}
"""Prefix of an architecture's name -> (its model_type, suffixes of the name, the reader)."""
_ARCHITECTURES: Final[Mapping[str, tuple[str, _Reader]]] = {
    stem + ending: (model_type, reader) for stem, (model_type, endings, reader) in _FORMS.items() for ending in endings
}
_MODEL_TYPES: Final = frozenset(model_type for model_type, _, _ in _FORMS.values())
_WITHOUT_CLASS: Final = "deepseek_v3_bidirec internlm2 jina_embeddings_v5 llama_bidirec new qwen3_bidirec".split()
"""Model types for which transformers has no class, so that nothing but the checkpoint's own code says which one it is."""
_STEMS: Final[Mapping[str, str]] = {
    model_type: stem for stem, (model_type, _, _) in reversed(_FORMS.items()) if model_type not in _WITHOUT_CLASS
}
"""Model type -> prefix of the names of its classes in transformers, which stand first in `_FORMS`."""
_ENDING_FOR_TASK: Final[Mapping[str, str]] = {
    "sequence-classification": "ForSequenceClassification",
    "text-generation": "ForCausalLM",
    "fill-mask": "ForMaskedLM",
}
