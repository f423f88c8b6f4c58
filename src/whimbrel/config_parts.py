"""What readers of several dialects of config.json have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from whimbrel.card import Activation, Layer
from whimbrel.json_file import JsonFile

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def read_sizes(config: JsonFile) -> dict[str, Any]:
    """What nearly all configs call alike."""
    hidden_size, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    if config.data.get("head_dim") is None and hidden_size % num_heads:
        raise config.error(f"{num_heads} does not divide hidden_size {hidden_size}.", "num_attention_heads")
    return {
        "vocab_size": config.positive("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": config.positive("intermediate_size"),
        "layers": (Layer(),) * config.positive("num_hidden_layers"),
        "num_heads": num_heads,
        "head_width": config.positive("head_dim", hidden_size // num_heads),
    }


def read_types(config: JsonFile, default: int) -> int:
    """How many token types there are; there may be none."""
    types = config.get("type_vocab_size", int, default)
    if types < 0:
        raise config.error(f"must not be negative, is {types}.", "type_vocab_size")
    return types


def accept_own_code(config: JsonFile) -> None:
    """Let config.json name code of the checkpoint's own: the caller knows what it computes, and it is never run."""
    for part, name in cast(dict[str, object], config.get("auto_map", dict, {})).items():
        if not isinstance(name, str):
            raise config.error(f"{part} must be the name of a class, is {name!r:.80}.", "auto_map")


def refuse_own_code(config: JsonFile) -> None:
    """Refuse a config.json that names code of the checkpoint's own, unless that has been accepted."""
    if "auto_map" in config.data and not config.was_read("auto_map"):
        raise config.error("this checkpoint needs code of its own; custom code is not run.", "auto_map")
