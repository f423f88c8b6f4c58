"""Shared readers of config.json keys."""

from collections.abc import Mapping
from math import inf
from typing import Any, Final, cast

from whimbrel.checkpoint.json_file import REQUIRED, JsonFile
from whimbrel.types.card import Layer, Rotary
from whimbrel.types.heads import Activation

NO_LAYERS: Final[dict[str, Any]] = {
    "intermediate_size": 0, "layers": (), "num_heads": 1, "norm_eps": 0.0, "activation": "identity",
}  # fmt: skip
"""Fields of an `Encoder` whose layers Whimbrel does not run."""
DECODER: Final[dict[str, Any]] = {"norm": "rms", "positions": "rotary", "gated": True}
"""Fields of an `Encoder` that Llama and its descendants have in common."""
ACTIVATIONS: Final[Mapping[str, Activation]] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
    **dict.fromkeys(("silu", "swish"), "silu"),
    "relu": "relu",
    "tanh": "tanh",
}
_MAX_LAYERS: Final = 2**12


def read_sizes(config: JsonFile) -> dict[str, Any]:
    """Return the sizes that nearly all configs name alike, without the number of layers."""
    hidden_size, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    if config.data.get("head_dim") is None and hidden_size % num_heads:
        raise config.error(f"{num_heads} does not divide hidden_size {hidden_size}.", "num_attention_heads")
    return {
        "vocab_size": config.positive("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": config.positive("intermediate_size"),
        "num_heads": num_heads,
        "head_width": config.positive("head_dim", hidden_size // num_heads),
    }


def read_biases(config: JsonFile) -> dict[str, Any]:
    return biases(attention=config.get("attention_bias", bool, False), mlp=config.get("mlp_bias", bool, False))


def biases(*, attention: bool = False, mlp: bool = False) -> dict[str, Any]:
    """Return the fields of an `Encoder` that say which layers have biases."""
    return {"qkv_bias": attention, "out_bias": attention, "up_bias": mlp, "down_bias": mlp}


def read_depth(config: JsonFile, key: str = "num_hidden_layers") -> int:
    """Return the number of layers. The limit protects the memory of a list of layers."""
    layers = config.positive(key)
    if layers > _MAX_LAYERS:
        raise config.error(f"{layers:,} layers; the limit is {_MAX_LAYERS:,}.", key)
    return layers


def read_positions(
    config: JsonFile, *, pad_id: int = 0, after_padding: bool = False, key: str = "max_position_embeddings"
) -> dict[str, Any]:
    """Return the padding id, whose default is `pad_id`, and the positions, which begin at 0 or after the padding id."""
    pad_id = config.get("pad_token_id", int) if after_padding else config.get("pad_token_id", int, pad_id)
    offset = pad_id + 1 if after_padding else 0
    max_positions = config.positive(key) - offset
    if max_positions <= 0:
        raise config.error(f"leaves no position after pad_token_id {pad_id}.", key)
    return {"pad_id": pad_id, "position_offset": offset, "max_positions": max_positions}


def read_types(config: JsonFile, default: int) -> int:
    """Return the number of token types, which may be 0."""
    types = config.get("type_vocab_size", int, default)
    if types < 0:
        raise config.error(f"must not be negative, is {types}.", "type_vocab_size")
    return types


def read_matryoshka(config: JsonFile, dimension: int | None, *, is_cut: bool = False) -> dict[str, Any]:
    """Return the fields of a `Card` for dense vectors of `dimension` columns that may be cut, as `is_cut` may say already."""
    widths: list[object] = [] if dimension is None else config.get("matryoshka_dimensions", list, [])
    for width in widths:
        if type(width) is not int or not 1 <= width <= (dimension or 0):
            raise config.error(f"{width!r} is no width from 1 to {dimension}.", "matryoshka_dimensions")
    may_be_cut = config.get("is_matryoshka", bool, False) or bool(widths) or is_cut
    return {"matryoshka": may_be_cut, "matryoshka_dimensions": tuple(widths)}


def own_code(config: JsonFile) -> dict[str, str]:
    """Return the classes of the checkpoint's own code by their parts, without the repository that holds them."""
    code: object = config.data.get("auto_map")
    rows = cast(dict[str, object], code).items() if isinstance(code, dict) else ()
    return {part: name.rpartition("--")[2] for part, name in rows if isinstance(name, str)}


def allow_auto_map(config: JsonFile) -> None:
    """Accept an auto_map. The caller implements that code, which is never run."""
    for part, name in cast(dict[str, object], config.get("auto_map", dict, {})).items():
        if not isinstance(name, str):
            raise config.error(f"{part} must be the name of a class, is {name!r:.80}.", "auto_map")


def reject_auto_map(config: JsonFile) -> None:
    """Raise CheckpointError if config.json has an auto_map that no reader accepted."""
    if "auto_map" in config.data and not config.was_read("auto_map"):
        raise config.error("this checkpoint needs code of its own; custom code is not run.", "auto_map")


FULL, SLIDING, CONV = "full_attention", "sliding_attention", "conv"
"""Kinds of layers: attention without a window and with one, and a short convolution."""

_OPTIONAL: Final = frozenset({"attention_factor", "beta_fast", "beta_slow", "truncate"})
"""Parameters of rotary scaling that have a default."""
_SCALINGS: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("linear", "ntk", "dynamic"), frozenset({"factor"})),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": _OPTIONAL | {"factor", "original_max_position_embeddings"},
}
"""Kind of rotary scaling -> its parameters."""


def read_layer_types(
    config: JsonFile, num_layers: int, default: list[str], known: tuple[str, ...] = (FULL, SLIDING)
) -> list[str]:
    """Return the kind of each layer, one of `known`."""
    kinds = cast(list[object], config.get("layer_types", list, default))
    if len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise config.error(f"must name {' or '.join(known)} for each of {num_layers} layers.", "layer_types")
    return cast(list[str], kinds)


def read_layers(
    config: JsonFile, kinds: list[str], thetas: Mapping[str, float], head_width: int, *, window: int
) -> tuple[Layer, ...]:
    """Return layers whose kinds differ in window and rotary positions. `thetas` holds the defaults."""
    rotary = {kind: read_rotary(config, theta, head_width, kind) for kind, theta in thetas.items()}
    return tuple(Layer(window if kind == SLIDING else None, rotary[kind]) for kind in kinds)


def _rope_parameters(config: JsonFile, theta: float, kind: str | None) -> dict[str, Any]:
    """Return the rotary parameters of a kind of layers: rope_theta and rope_scaling, or rope_parameters in newer configs."""
    theta = theta if kind else config.get("rope_theta", float, theta)
    old = cast(dict[str, Any], config.get("rope_scaling", dict, {})) if kind != SLIDING else {}
    new = cast(dict[str, Any], config.get("rope_parameters", dict, {}))
    if kind is not None and any(isinstance(value, dict) for value in new.values()):
        own: object = new.get(kind) or {}
        if not isinstance(own, dict):
            raise config.error(f"{kind} must be an object, is {own!r:.80}.", "rope_parameters")
        new = cast(dict[str, Any], own)
    parameters: dict[str, Any] = {"rope_theta": theta, **old, **new}
    parameters["rope_type"] = parameters.get("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    return parameters


def read_rotary(config: JsonFile, theta: float, head_width: int, kind: str | None = None) -> Rotary:
    """Return the rotary positions of all layers, or of one kind. `theta` is the default."""
    parameters = _rope_parameters(config, theta, kind)
    fraction = parameters.pop("partial_rotary_factor", None) or 1.0
    base, scaling = parameters.pop("rope_theta"), parameters["rope_type"]
    width = int(head_width * fraction) if _is_number(fraction) else 0
    if width <= 0 or width % 2 or width > head_width or not _is_number(base):
        columns = f"{fraction!r:.80} of {head_width} columns"
        raise config.error(f"theta {base!r:.80} over {columns} is not supported.", "rope_parameters")
    if scaling in ("default", None):
        return Rotary(float(base), width)
    if not isinstance(scaling, str) or scaling not in _SCALINGS:
        raise config.error(f"{scaling!r} is not supported; supported: default, {', '.join(_SCALINGS)}.", "rope_scaling")
    unknown = parameters.keys() - _SCALINGS[scaling] - {"rope_type"}
    wrong = [key for key in _SCALINGS[scaling] - _OPTIONAL if not _is_number(parameters.get(key))]
    optional = {key: parameters[key] for key in _OPTIONAL & parameters.keys()}
    wrong += [key for key, value in optional.items() if not isinstance(value, bool | None) and not _is_number(value)]
    if unknown or wrong:
        names = ", ".join(sorted({*unknown, *wrong}))
        raise config.error(f"{scaling} with {names} unknown, missing or no positive number.", "rope_scaling")
    if scaling == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise config.error("high_freq_factor must be greater than low_freq_factor.", "rope_scaling")
    if scaling == "dynamic":  # it begins beyond max_position_embeddings, and no text is longer
        return Rotary(float(base), width)
    return Rotary(float(base), width, scaling=parameters)


def read_positive(config: JsonFile, key: str, default: float = REQUIRED) -> float:
    value = config.get(key, float, default)
    if not _is_number(value):
        raise config.error(f"must be positive, is {value}.", key)
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf
