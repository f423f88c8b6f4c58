"""modules.json of Sentence Transformers and the folders of its modules: what readers of all kinds of cards have in common.

Sources of the formats: sentence_transformers/base/modules/transformer.py and dense.py (6.2).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from whimbrel.card import Encoder
from whimbrel.errors import CheckpointError
from whimbrel.heads import Activation, Dense
from whimbrel.json_file import JsonFile, find_file, read_json

Level: TypeAlias = Literal["sentence_embedding", "token_embeddings"]
"""What a module works on, as its config calls it."""

_DENSE_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}

TRANSFORMER_FILES: Final = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)

_TEXT_ONLY: Final = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_NOTHING: Final[tuple[object, ...]] = ({}, None)
FIXED_FEATURES: Final[Mapping[str, tuple[object, ...]]] = {
    "transformer_task": ("feature-extraction", None),
    "modality_config": (_TEXT_ONLY, None),
    "module_output_name": ("token_embeddings", None),
    "processing_kwargs": _NOTHING,
    "model_args": _NOTHING,
    "config_args": _NOTHING,
    "tokenizer_args": _NOTHING,
    "model_kwargs": _NOTHING,
    "processor_kwargs": _NOTHING,
    "config_kwargs": _NOTHING,
    "query_length": (None,),
    "document_length": (None,),
    "query_expansion": (None,),
}


def read_module_rows(folder: Path, types: Mapping[str, str]) -> list[tuple[str, str]]:
    """(kind, path) of each module in modules.json that does something when a model is used. `types` gives the kinds."""
    file = "modules.json"
    values = read_json(folder, file)
    if not isinstance(values, list):
        raise CheckpointError("must be a list of objects.", file=file)
    rows = [_module_row(JsonFile(file, value), types) for value in cast(list[object], values)]
    rows = [row for row in rows if row[0] != "Dropout"]
    for _, path in rows:
        find_file(folder, path)
    return rows


def _module_row(row: JsonFile, types: Mapping[str, str]) -> tuple[str, str]:
    row.refuse_unknown({"idx", "name", "path", "type", "kwargs"})
    row.refuse_other({"kwargs": ([], {}, None)})
    path = row.get("path", str)
    if path.startswith(("/", "\\")) or ".." in Path(path).parts:
        raise row.error(f"{path!r} leads out of the checkpoint's folder.", "path")
    return row.choice("type", types), path


def read_dense(folder: Path, path: str, size: int, level: Level = "sentence_embedding") -> Dense:
    """A linear layer with an activation, after something `size` wide."""
    config = JsonFile.read(folder, f"{path}/config.json")
    names = level_names(level)
    config.refuse_unknown({"in_features", "out_features", "bias", "activation_function", "use_residual"}, names)
    config.refuse_other(names)
    if (in_features := config.positive("in_features")) != size:
        raise config.error(f"{in_features} is not the width {size} of what comes before.", "in_features")
    return Dense(
        path,
        "linear",
        in_features=in_features,
        out_features=config.positive("out_features"),
        bias=config.get("bias", bool, True),
        activation=config.choice("activation_function", _DENSE_ACTIVATIONS, "torch.nn.modules.activation.Tanh"),
        residual=config.get("use_residual", bool, False),
    )


def level_names(level: Level) -> Mapping[str, tuple[object, ...]]:
    """What a module's config may say of its level: that it is this, or nothing."""
    return {"module_input_name": (level, None), "module_output_name": (level, None)}


def read_transformer(folder: Path, used: Collection[str] = ()) -> JsonFile:
    """The configuration of the Transformer module. Its keys are checked, but for those that the caller will have `used`."""
    file = next((name for name in TRANSFORMER_FILES if (folder / name).exists()), TRANSFORMER_FILES[0])
    config = JsonFile.read_optional(folder, file)
    fixed = {key: values for key, values in FIXED_FEATURES.items() if key not in used}
    config.refuse_unknown(fixed, used, {"max_seq_length", "do_lower_case", "unpad_inputs"})
    config.refuse_other(fixed)
    return config


def read_max_length(encoder: Encoder, transformer: JsonFile, tokenizer: JsonFile) -> int:
    """Sentence Transformers' rule, and never more than there are positions for."""
    if transformer.data.get("max_seq_length") is not None:
        stated = transformer.positive("max_seq_length")
    else:
        key = "model_max_length" if "model_max_length" in tokenizer.data else "max_len"
        stated = tokenizer.get(key, float, float(encoder.max_positions))
        if stated < 1:
            raise tokenizer.error(f"must be positive, is {stated}.", key)
    return int(min(stated, encoder.max_positions))


def read_matryoshka(config: JsonFile, dimension: int) -> tuple[int, ...]:
    """The widths to which vectors may be cut, as config.json says."""
    widths: list[object] = config.get("matryoshka_dimensions", list, [])
    for width in widths:
        if type(width) is not int or not 1 <= width <= dimension:
            raise config.error(f"{width!r} is no width from 1 to {dimension}.", "matryoshka_dimensions")
    return tuple(cast(list[int], widths))


def read_prompts(config: JsonFile) -> tuple[dict[str, str], str | None]:
    """(prompts by name, the default's name) of config_sentence_transformers.json."""
    prompts: dict[str, str] = {}
    for name, text in cast(dict[str, object], config.get("prompts", dict, {})).items():
        if not isinstance(text, str):
            raise config.error(f"prompt {name!r} must be a string, is {text!r}.", "prompts")
        prompts[name] = text
    default = config.get("default_prompt_name", str, "")
    if default and default not in prompts:
        raise config.error(f"{default!r} is not among the prompts {list(prompts)}.", "default_prompt_name")
    return prompts, config.data.get("default_prompt_name")
