"""Chained modules: Pooling, Dense, LayerNorm, Normalize and SparseAutoEncoder.

Each module reads one named feature and writes one. A Transformer gives "token_embeddings", or "scores" if it has classes. A
Pooling makes "sentence_embedding" of "token_embeddings", and a LayerNorm changes it. The settings of Dense and Normalize name
their input and output, so a Dense may stand before or after the Pooling, or give "scores". Unread features are not computed.

Sources: sentence_transformers/sentence_transformer/modules/{pooling,layer_norm}.py (6.2, and Pooling before 5.4),
base/modules/{dense,normalize}.py and sparse_encoder/modules/sparse_auto_encoder.py (6.2).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast, get_args

from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.sentence_transformers.modules import MODULES, Rows
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Output
from whimbrel.types.choices import POOLING_MODES, PoolingMode
from whimbrel.types.heads import Activation, Dense, Head, LayerNorm, Normalize, SparseAutoencoder
from whimbrel.types.request import OutputName

Feature: TypeAlias = Literal["token_embeddings", "sentence_embedding", "scores"]
Features: TypeAlias = Mapping[Feature, Output]
_FEATURES: Final[Mapping[str, Feature]] = {name: name for name in get_args(Feature)}
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


def finish_output(folder: Path, features: Features, rows: Rows, max_entries: int) -> dict[OutputName, Output]:
    """Return the dense output after the modules, or the sparse one, of `max_entries`, if a SparseAutoEncoder comes last."""
    code = rows[-1][1] if rows and rows[-1][0] == "SparseAutoEncoder" else None
    dense = resolve_features(folder, rows if code is None else rows[:-1], features, "sentence_embedding")
    head, activated = without_norm(dense.head)
    dense = replace(dense, head=head, activated=activated)
    return {"dense": dense} if code is None else {"sparse": _read_sparse_code(folder, code, dense, max_entries)}


def cut_output(dense: Output, sentence: JsonFile) -> Output:
    """Truncate dense vectors to `truncate_dim`, after all modules and without normalising again."""
    if not (width := sentence.positive("truncate_dim", 0)):
        return dense
    head = (*dense.head, Normalize()) if dense.activated else dense.head
    return replace(dense, head=head, activated=False, default_width=min(width, dense.width))


def resolve_features(
    folder: Path, rows: Rows, inputs: Features, target: Feature, *, of_dense: Feature = "sentence_embedding"
) -> Output:
    """Return the feature `target` after the modules. `of_dense`: default input of a Dense. Raises CheckpointError."""
    features = dict(inputs)
    for kind, path in rows:
        features |= CHAINED[kind](folder, path, features, of_dense)
    if target not in features:
        raise CheckpointError(f"has no module that gives {target!r}, only {', '.join(map(repr, features))}.", file=MODULES)
    return features[target]


def tokens(width: int, head: tuple[Dense, ...] = ()) -> Features:
    """Return the features of a Transformer whose hidden states have `width` columns and pass `head`."""
    width = head[-1].out_features if head else width
    return {"token_embeddings": Output(width, rows="token", token_head=head, activation="normalize")}


def without_norm(heads: tuple[Head, ...]) -> tuple[tuple[Head, ...], bool]:
    """Return (heads without final Normalize, whether there was one). A request may change the final normalisation."""
    count = len(heads)
    while count and isinstance(heads[count - 1], Normalize):
        count -= 1
    return heads[:count], count < len(heads)


def _with_head(output: Output, head: Head) -> Output:
    if isinstance(head, Dense):
        output = replace(output, width=head.out_features)
    if output.modes:
        return replace(output, head=(*output.head, head))
    return replace(output, token_head=(*output.token_head, head))


def _read_pooling(folder: Path, path: str, features: Features, _: Feature) -> Features:
    before = _input(path, features, "token_embeddings")
    config = JsonFile.read(folder, f"{path}/config.json")
    sizes = {"word_embedding_dimension", "embedding_dimension"}
    config.reject_unknown_keys(sizes, {"pooling_mode", "include_prompt"}, _OLD_POOLING)
    size_key = "embedding_dimension" if "embedding_dimension" in config.data else "word_embedding_dimension"
    if (size := config.positive(size_key)) != before.width:
        raise config.error(f"{size} is not the width {before.width} of the tokens before it.", size_key)
    modes, include_prompt = _read_modes(config), config.get("include_prompt", bool, True)
    pooled = replace(before, width=len(modes) * size, rows="text", modes=modes, include_prompt=include_prompt)
    return {"sentence_embedding": pooled}


def _read_modes(config: JsonFile) -> tuple[PoolingMode, ...]:
    if "pooling_mode" in config.data:
        value = config.data["pooling_mode"]
        table: Mapping[str, PoolingMode] = {mode: mode for mode in POOLING_MODES}
        names = cast(list[object], value) if isinstance(value, list) else [value]
        modes: tuple[PoolingMode, ...] = tuple(config.lookup("pooling_mode", name, table) for name in names)
    else:
        modes = tuple(mode for key, mode in _OLD_POOLING.items() if config.get(key, bool, False))
    if not modes:
        raise config.error("names no pooling mode.", "pooling_mode")
    return modes


def _read_dense(folder: Path, path: str, features: Features, default: Feature) -> Features:
    config = JsonFile.read(folder, f"{path}/config.json")
    names = {"module_input_name", "module_output_name"}
    config.reject_unknown_keys({"in_features", "out_features", "bias", "activation_function", "use_residual"}, names)
    before, target = _ends(config, path, features, default)
    if (in_features := config.positive("in_features")) != before.width:
        raise config.error(f"{in_features} is not the width {before.width} of what comes before.", "in_features")
    dense = Dense(
        path,
        "linear",
        in_features=in_features,
        out_features=config.positive("out_features"),
        bias=config.get("bias", bool, True),
        activation=config.choice("activation_function", _ACTIVATIONS, "torch.nn.modules.activation.Tanh"),
        residual=config.get("use_residual", bool, False),
    )
    return {target: _with_head(before, dense)}


def _read_layer_norm(folder: Path, path: str, features: Features, _: Feature) -> Features:
    before = _input(path, features, "sentence_embedding")
    config = JsonFile.read(folder, f"{path}/config.json")
    config.reject_unknown_keys({"dimension"})
    if (dimension := config.positive("dimension")) != before.width:
        raise config.error(f"{dimension} is not the width {before.width} of what comes before.", "dimension")
    return {"sentence_embedding": _with_head(before, LayerNorm(path, "norm", dimension))}


def _read_normalize(folder: Path, path: str, features: Features, _: Feature) -> Features:
    config = JsonFile.read_optional(folder, f"{path}/config.json")
    config.reject_unknown_keys({"module_input_name", "module_output_name"})
    before, target = _ends(config, path, features, "sentence_embedding")
    return {target: _with_head(before, Normalize())}


CHAINED: Final[Mapping[str, Callable[[Path, str, Features, Feature], Features]]] = {
    "Pooling": _read_pooling,
    "Dense": _read_dense,
    "LayerNorm": _read_layer_norm,
    "Normalize": _read_normalize,
}
"""Kind of module -> its reader: (folder, path, features before it, default input of a Dense) -> features."""


def _ends(config: JsonFile, path: str, features: Features, default: Feature) -> tuple[Output, Feature]:
    """Return a module's input and the name of its output. Both must have a row per token, or both a row per text."""
    source = config.choice("module_input_name", _FEATURES, default)
    before = _input(path, features, source, config)
    target = config.choice("module_output_name", _FEATURES) if config.data.get("module_output_name") is not None else source
    if (source == "token_embeddings") != (target == "token_embeddings"):
        raise config.error(f"{target!r} cannot be made of {source!r} without a Pooling.", "module_output_name")
    return before, target


def _input(path: str, features: Features, name: Feature, config: JsonFile | None = None) -> Output:
    """Return the input feature of the module in `path`. An error names `config` if it may state the input."""
    if name in features:
        return features[name]
    message = f"{path!r} works on {name!r}, but what comes before gives only {', '.join(map(repr, features))}."
    raise CheckpointError(message, file=MODULES) if config is None else config.error(message, "module_input_name")


def _read_sparse_code(folder: Path, path: str, dense: Output, max_entries: int) -> Output:
    """Return the output of a SparseAutoEncoder after a dense output. `max_entries` replaces k unless it is 0."""
    config = JsonFile.read(folder, f"{path}/config.json")
    config.reject_unknown_keys({"input_dim", "hidden_dim", "k", "k_aux", "normalize", "dead_threshold"})
    if (in_features := config.positive("input_dim")) != dense.width:
        raise config.error(f"{in_features} is not the width {dense.width} of what comes before.", "input_dim")
    out_features = config.positive("hidden_dim", 512)
    k = max_entries or config.positive("k", 8)
    if k > out_features:
        raise config.error(f"{k} latents are to be kept of {out_features}.", "k")
    code = SparseAutoencoder(path, in_features, out_features, k, config.get("normalize", bool, False))
    return Output(
        out_features,
        rows="vocabulary",
        modes=dense.modes,
        include_prompt=dense.include_prompt,
        token_head=dense.token_head,
        head=(*dense.head, *([Normalize()] if dense.activated else []), code),
        max_entries=k,
    )
