"""Task adapters of jina-embeddings-v3 and v5, and adapters that a user adds to a model, as PEFT saves them.

In v3 a task adds its adapter to all weights, embedding tables included, and puts its instruction before each text. Only
retrieval has an instruction. Without a task the weights are unchanged. In v5, whose base is Qwen3 or EuroBERT, a task adds its
adapter to all linear layers. Its own code pools the last token, normalises, and puts a prompt before every text, which is
another choice of the caller's.

Sources: on the hub, modeling_lora.py of jinaai/xlm-roberta-flash-implementation, custom_st.py of jinaai/jina-embeddings-v3,
the files of jinaai/jina-embeddings-v3-hf, and custom_st.py and modeling_jina_embeddings_v5.py of
jinaai/jina-embeddings-v5-text-nano and -small; vllm/model_executor/models/jina.py; transformers' tests/models/
jina_embeddings_v3; peft/tuners/lora/config.py (0.21).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from whimbrel.checkpoint.config.common import allow_auto_map, read_positive
from whimbrel.checkpoint.config.decoders import read_eurobert, read_qwen3
from whimbrel.checkpoint.json_file import Fixed, JsonFile
from whimbrel.errors import SetupError
from whimbrel.types.card import Encoder, LoraAdapter

T = TypeVar("T", int, float)

_UNUSED_IN_FOLDERS: Final = """
    load_trained_adapters lora_alpha lora_dropout_p lora_main_params_trainable lora_rank use_flash_attn emb_pooler
""".split()
"""Keys of stacked adapters that config.json keeps if the adapters are in folders."""
_PEFT_INERT: Final = """
    auto_mapping base_model_name_or_path ensure_weight_tying inference_mode loftq_config lora_dropout megatron_core peft_version
    qalora_group_size revision task_type
""".split()
_PEFT_FIXED: Final[Fixed] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", None),  # the others change the weights that are added to
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    "target_parameters": ([], None),
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_bdlora", "use_dora", "use_qalora", "use_rslora"), (False, None)),
    **dict.fromkeys(
        """
        alora_invocation_tokens arrow_config corda_config eva_config exclude_modules kasa_config layer_replication
        layers_pattern layers_to_transform lora_ga_config megatron_config modules_to_save monteclora_config
        trainable_token_indices velora_config
        """.split(),
        (None,),
    ),
}
_PEFT_FREE: Final = "rank_pattern alpha_pattern use_rslora exclude_modules layers_to_transform layers_pattern".split()
"""Keys that an adapter of the user may have other values for. The tensors say which modules are adapted."""
_ADAPTER: Final = "adapter_config.json"
_BASE: Final = "base_model_name_or_path"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MERGE: Final = "merge it into the model (peft: merge_and_unload, then save_pretrained)"
_LINEAR: Final = frozenset("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())
_TARGETS: Final[Mapping[str, frozenset[str]]] = {
    "jina_embeddings_v3": frozenset("word_embeddings token_type_embeddings q_proj k_proj v_proj o_proj fc1 fc2".split()),
    **dict.fromkeys(("qwen3", "eurobert"), _LINEAR),
}
"""Family -> modules that each of a checkpoint's own adapters changes."""
DEFAULT_TASK: Final = "retrieval"
"""Task of texts for which none is named, as in vLLM. The model's own code has no default."""
PROMPTS: Final[Mapping[str, str]] = {"query": "Query: ", "document": "Document: "}
"""Prompts in the model's own code, for checkpoints without files of Sentence Transformers."""
DEFAULT_PROMPT: Final = "document"


def read_stacked_adapters(config: JsonFile) -> dict[str, Any]:
    """Return the fields of an Encoder for adapters among the weights. Empty without adapters."""
    if not (names := _read_names(config)):
        config.require_values({"load_trained_adapters": (False, None), "task_instructions": (None, {})})
        config.ignore("lora_alpha", "lora_rank")
        return {}
    if not config.get("load_trained_adapters", bool, False):
        raise config.error("says that the adapters of lora_adaptations are not in the weights.", "load_trained_adapters")
    instructions = cast(dict[str, object], config.get("task_instructions", dict))
    if instructions.keys() != set(names):
        raise config.error(f"must have an instruction for each of {', '.join(names)}.", "task_instructions")
    rank = config.positive("lora_rank", 4)
    return {"adapters": names, "adapter_rank": rank, "adapter_scale": read_positive(config, "lora_alpha", 1.0) / rank}


def name_adapter_folders(config: JsonFile) -> dict[str, Any]:
    """Return the fields of an Encoder for adapters in folders of their names. `read_adapter_folders` adds the rest."""
    names = _read_names(config)
    config.ignore(*_UNUSED_IN_FOLDERS)
    return {"adapters": names, "adapter_paths": tuple(re.sub(r"[.-]", "_", name) for name in names)}


def is_jina_v5(config: JsonFile) -> bool:
    return config.data.get("architectures") == ["JinaEmbeddingsV5Model"]


def read_jina_v5(config: JsonFile) -> Encoder:
    """Read jina-embeddings-v5. `is_decoder` tells its two bases apart, as in vLLM."""
    allow_auto_map(config)
    base = read_qwen3 if config.get("is_decoder", bool, True) else read_eurobert
    encoder, names = base(config), _read_names(config, "task_names")
    if DEFAULT_TASK not in names:
        raise config.error(f"must name {DEFAULT_TASK}, as the model's own code requires.", "task_names")
    return replace(encoder, adapters=names, adapter_paths=tuple(f"adapters/{name}" for name in names))


def read_adapter_folders(root: Path, encoder: Encoder) -> Encoder:
    """Return the encoder with the rank and scale of its adapters' folders. Unchanged without folders."""
    for i, path in enumerate(encoder.adapter_paths):
        file, expected = JsonFile.read(root, f"{path}/{_ADAPTER}"), _TARGETS[encoder.family]
        file.require_values(_PEFT_FIXED)
        file.get("peft_type", str)
        targets = cast(list[object], file.get("target_modules", list))
        if not expected <= set(map(str, targets)) <= expected | {"dense"}:  # on top, which only pre-training uses
            raise file.error(f"must be {', '.join(sorted(expected))}; is {targets!r:.200}.", "target_modules")
        rank = file.positive("r")
        scale = read_positive(file, "lora_alpha", 8.0) / rank
        file.reject_unread_keys(_PEFT_INERT)
        if i == 0:
            encoder = replace(encoder, adapter_rank=rank, adapter_scale=scale)
        elif (rank, scale) != (encoder.adapter_rank, encoder.adapter_scale):
            raise file.error("differs from that of the first adapter.", "r, lora_alpha")
    return encoder


def add_adapters(encoder: Encoder, model: str, folders: Mapping[str, str]) -> Encoder:
    """Return the encoder of `model`, a hub id or a folder's name, with adapters by name. Raises SetupError, CheckpointError."""
    if not folders:
        return encoder
    if encoder.adapters:
        raise SetupError("the model has adapters of its own; no others can be added.", hint="serve it without --adapter")
    if not encoder.layers:
        raise SetupError(f"adapters cannot be added to models of the family {encoder.family!r}.", hint=_MERGE)
    adapters = tuple(_read_adapter(name, Path(folder).expanduser(), model) for name, folder in folders.items())
    rank = max(rank for each in adapters for rank in (each.rank, *each.rank_pattern.values()))
    return replace(encoder, adapters=tuple(folders), adapter_rank=rank, lora=adapters)


def _read_adapter(name: str, folder: Path, model: str) -> LoraAdapter:
    if not re.fullmatch(r"\w[\w.-]*", name) or name == "latest":
        hint = "letters, digits, _ . and -, but not latest: --adapter NAME=FOLDER"
        raise SetupError(f"{name!r:.100} is no name of an adapter.", hint=hint)
    if not folder.is_dir():
        raise SetupError(f"no folder {folder} for the adapter {name!r}.", hint="--adapter NAME=FOLDER, as PEFT saves it")
    config = JsonFile.read(folder, _ADAPTER)
    config.require_values({key: values for key, values in _PEFT_FIXED.items() if key not in _PEFT_FREE})
    config.get("peft_type", str)
    config.ignore("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    rank, alpha = config.positive("r"), read_positive(config, "lora_alpha", 8.0)
    patterns = _read_pattern(config, "rank_pattern", int), _read_pattern(config, "alpha_pattern", float)
    by_root, other_base = config.get("use_rslora", bool, False), _read_other_base(config, model)
    config.reject_unread_keys(_PEFT_INERT)
    return LoraAdapter(name, str(folder.absolute()), rank, alpha, *patterns, by_root, other_base)


def _read_other_base(config: JsonFile, model: str) -> str:
    """Return the hub id of the model that an adapter was made for, if it is not that of `model`; or "".

    Copies of a model often keep its name, so only that is compared. Two hub ids may differ only if the user accepts the key.
    """
    base = config.get(_BASE, str, "")
    if not _HUB_ID.fullmatch(base) or base.rpartition("/")[2].lower() == model.rpartition("/")[2].lower():
        return ""
    if "/" in model and not config.accepts(_BASE):
        hint = f"if both are the same model: --accept-config {_BASE}, in Python accept_config=({_BASE!r},)"
        raise config.error(f"the adapter was made for {base}, and the model is {model}.", _BASE, hint)
    return base


def _read_pattern(config: JsonFile, key: str, kind: type[T]) -> dict[str, T]:
    """Return positive numbers by patterns of modules' names."""
    stated = config.section(key)
    numbers = {pattern: stated.get(pattern, kind) for pattern in stated.data}
    for pattern, number in numbers.items():
        try:
            re.compile(pattern)
        except re.error:
            raise stated.error("is no regular expression.", pattern) from None
        if number <= 0:
            raise stated.error("must be positive.", pattern)
    return numbers


def read_instructions(config: JsonFile, adapters: tuple[str, ...], prompts: JsonFile) -> dict[str, str]:
    """Return the stated prompts, and for each adapter its instruction under its name."""
    stated = cast(dict[str, str], prompts.get("prompts", dict, {}))
    instructions = cast(dict[str, object], config.get("task_instructions", dict, {}))
    for name, text in instructions.items():
        if name not in adapters or not isinstance(text, str):
            raise config.error(f"{name!r:.80} is no adapter, or {text!r:.80} no text.", "task_instructions")
        if stated.get(name, text) != text:
            message = f"{name!r} is {stated[name]!r:.80}; config.json (task_instructions) has {text!r:.80}."
            raise prompts.error(message, "prompts")
    return dict.fromkeys(adapters, "") | stated | cast(dict[str, str], instructions)


def read_default_adapter(transformer: JsonFile, adapters: tuple[str, ...]) -> str | None:
    """Return the default task of custom_st.py. Texts without a task use its adapter but not its instruction."""
    arguments = transformer.section("model_args")
    arguments.reject_unknown_keys({"default_task", "trust_remote_code"})
    name = arguments.get("default_task", str, "")
    if name and name not in adapters:
        raise arguments.error(f"{name!r} is none of the adapters {', '.join(adapters)}.", "default_task")
    return name or None


def _read_names(config: JsonFile, key: str = "lora_adaptations") -> tuple[str, ...]:
    names = cast(list[object], config.get(key, list, []))
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name) or names.count(name) > 1:
            raise config.error(f"{name!r:.80} is no name, or is there twice.", key)
    config.ignore("task_instructions")  # they are read with the prompts
    return tuple(cast(list[str], names))
