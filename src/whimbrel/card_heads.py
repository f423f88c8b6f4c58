"""Sentence Transformers' modules that pool tokens and change rows: Pooling, Dense, LayerNorm, Normalize, SparseAutoEncoder.

Sources: sentence_transformers/sentence_transformer/modules/{pooling,layer_norm,normalize}.py, base/modules/dense.py and
sparse_encoder/modules/sparse_auto_encoder.py (6.2); of Pooling also what it said before 5.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from whimbrel.card import POOLING_MODES, Output, PoolingMode
from whimbrel.card_modules import Rows
from whimbrel.heads import Activation, Dense, Head, LayerNorm, Normalize, SparseCode
from whimbrel.json_file import JsonFile
from whimbrel.types import OutputName

Level: TypeAlias = Literal["sentence_embedding", "token_embeddings"]
"""What a module works on, as its config calls it."""

_OLD_POOLING: Final[Mapping[str, PoolingMode]] = {  # in the order in which the modes are concatenated
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


def read_pooling(config: JsonFile, hidden_size: int) -> Output:
    """What Pooling makes of the tokens of a text; `config` is its own."""
    sizes = {"word_embedding_dimension", "embedding_dimension"}
    config.refuse_unknown(sizes, {"pooling_mode", "include_prompt"}, _OLD_POOLING)
    size_key = "embedding_dimension" if "embedding_dimension" in config.data else "word_embedding_dimension"
    if (size := config.positive(size_key)) != hidden_size:
        raise config.error(f"{size} is not the model's hidden_size {hidden_size}.", size_key)
    if "pooling_mode" in config.data:
        given = config.data["pooling_mode"]
        table: Mapping[str, PoolingMode] = {mode: mode for mode in POOLING_MODES}
        names = cast(list[object], given) if isinstance(given, list) else [given]
        modes: tuple[PoolingMode, ...] = tuple(config.lookup("pooling_mode", name, table) for name in names)
    else:
        modes = tuple(mode for key, mode in _OLD_POOLING.items() if config.get(key, bool, False))
    if not modes:
        raise config.error("names no pooling mode.", "pooling_mode")
    include_prompt = config.get("include_prompt", bool, True)
    return Output(len(modes) * size, modes=modes, include_prompt=include_prompt, finish="normalize")


def finish_output(folder: Path, output: Output, rows: Rows, max_entries: int) -> dict[OutputName, Output]:
    """What `output` becomes by the modules after it: dense vectors, or sparse ones if a SparseAutoEncoder comes last.

    `max_entries` of a sparse vector; 0: not stated.
    """
    code = rows[-1][1] if rows and rows[-1][0] == "SparseAutoEncoder" else None
    head, width, finished = read_heads(folder, rows if code is None else rows[:-1], output.width)
    dense = replace(output, width=width, head=head, finished=finished)
    return {"dense": dense} if code is None else {"sparse": _read_sparse_code(folder, code, dense, max_entries)}


def read_heads(folder: Path, rows: Rows, width: int, level: Level = "sentence_embedding") -> tuple[tuple[Head, ...], int, bool]:
    """(heads, width after them, whether rows are normalised at last) of something `width` wide."""
    heads = list[Head]()
    for kind, path in rows:
        heads.append(HEADS[kind](folder, path, width, level))
        if isinstance(heads[-1], Dense):
            width = heads[-1].out_features
    finished = bool(heads) and isinstance(heads[-1], Normalize)
    while heads and isinstance(heads[-1], Normalize):
        heads.pop()
    return tuple(heads), width, finished


def _read_dense(folder: Path, path: str, size: int, level: Level) -> Dense:
    config = JsonFile.read(folder, f"{path}/config.json")
    names = _names(level)
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
        activation=config.choice("activation_function", _ACTIVATIONS, "torch.nn.modules.activation.Tanh"),
        residual=config.get("use_residual", bool, False),
    )


def _read_layer_norm(folder: Path, path: str, size: int, _: Level) -> LayerNorm:
    config = JsonFile.read(folder, f"{path}/config.json")
    config.refuse_unknown({"dimension"})
    if (dimension := config.positive("dimension")) != size:
        raise config.error(f"{dimension} is not the width {size} of what comes before.", "dimension")
    return LayerNorm(path, "norm", dimension)


def _read_normalize(folder: Path, path: str, _: int, level: Level) -> Normalize:
    """It works on texts, unless it says otherwise."""
    config = JsonFile.read_optional(folder, f"{path}/config.json")
    config.refuse_unknown(_names(level))
    if level == "token_embeddings" and config.data.get("module_input_name") != level:
        raise config.error(f"must be {level!r}.", "module_input_name")
    config.refuse_other(_names(level))
    return Normalize()


def _names(level: Level) -> Mapping[str, tuple[object, ...]]:
    """What a module's config may say of its level: that it is this, or nothing."""
    return {"module_input_name": (level, None), "module_output_name": (level, None)}


HEADS: Final[Mapping[str, Callable[[Path, str, int, Level], Head]]] = {
    "Dense": _read_dense,
    "LayerNorm": _read_layer_norm,
    "Normalize": _read_normalize,
}
"""Kind of module -> what reads it."""


def _read_sparse_code(folder: Path, path: str, dense: Output, max_entries: int) -> Output:
    """A SparseAutoEncoder after what would have given dense vectors. `max_entries` stands in place of k, unless it is 0."""
    config = JsonFile.read(folder, f"{path}/config.json")
    config.refuse_unknown({"input_dim", "hidden_dim", "k", "k_aux", "normalize", "dead_threshold"})
    if (in_features := config.positive("input_dim")) != dense.width:
        raise config.error(f"{in_features} is not the width {dense.width} of what comes before.", "input_dim")
    out_features = config.positive("hidden_dim", 512)
    k = max_entries or config.positive("k", 8)
    if k > out_features:
        raise config.error(f"{k} latents are to be kept of {out_features}.", "k")
    code = SparseCode(path, in_features, out_features, k, config.get("normalize", bool, False))
    return Output(
        out_features,
        rows="vocabulary",
        modes=dense.modes,
        include_prompt=dense.include_prompt,
        head=(*dense.head, *([Normalize()] if dense.finished else []), code),
        max_entries=k,
    )
