"""Checkpoint files -> Card.

Reads both layouts of Sentence Transformers (up to 5.3, and 5.4 and later). Every key must be known: it is used, or it is
known not to change a vector, or it must have the one value that is supported. Anything else raises `CheckpointError` with
file and key. Knows nothing of devices, options or weights' values.

Sources of the formats: sentence_transformers/base/modules/transformer.py, .../modules/pooling.py, .../dense.py (6.2) and
transformers' configuration and tokenizer classes (5.x).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, cast

from whimbrel.card import POOLING_MODES, Card, Encoder, Instruction, Output, PoolingMode, RerankerName, StatedPooling
from whimbrel.card_classes import FIXED_TRANSFORMER, is_cross_encoder, names_classes, note_keys, read_classes
from whimbrel.card_modules import FIXED_FEATURES, TRANSFORMER_FILES, level_names, read_dense, read_matryoshka, read_max_length
from whimbrel.card_multi_vector import find_layout, read_multi_vector
from whimbrel.card_rerankers import is_reranker, read_reranker
from whimbrel.card_router import Rows, module_kind, read_router
from whimbrel.card_sparse import FILL_MASK, SPARSE_MODULES, read_m3, read_sparse_code, read_splade
from whimbrel.card_static import is_model2vec, read_sparse_table, read_static
from whimbrel.config_adapters import read_adapter_folders, read_default_adapter, read_instructions
from whimbrel.config_decoders import is_gritlm, stated_pooling
from whimbrel.config_reader import read_encoder
from whimbrel.errors import CheckpointError
from whimbrel.heads import Dense, Head, LayerNorm, Normalize
from whimbrel.json_file import JsonFile, find_file, read_json
from whimbrel.tokenizer_reader import read_tokenizer
from whimbrel.types import OutputName

_LEGACY_POOLING: Final[Mapping[str, PoolingMode]] = {  # in the order in which the modes are concatenated
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

_KNOWN_MODULES: Final[Mapping[str, str]] = {
    "sentence_transformers.models.Asym": "Router",
    "sentence_transformers.models.Router": "Router",
    "sentence_transformers.base.modules.router.Router": "Router",
    "sentence_transformers.models.StaticEmbedding": "StaticEmbedding",
    "sentence_transformers.models.StaticEmbedding.StaticEmbedding": "StaticEmbedding",
    "sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding": "StaticEmbedding",
    "sentence_transformers.models.Transformer": "Transformer",
    "sentence_transformers.models.Pooling": "Pooling",
    "sentence_transformers.models.Dense": "Dense",
    "sentence_transformers.models.LayerNorm": "LayerNorm",
    "sentence_transformers.models.Normalize": "Normalize",
    "sentence_transformers.models.Dropout": "Dropout",
    "sentence_transformers.base.modules.transformer.Transformer": "Transformer",
    "sentence_transformers.base.modules.dense.Dense": "Dense",
    "sentence_transformers.base.modules.normalize.Normalize": "Normalize",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling": "Pooling",
    "sentence_transformers.sentence_transformer.modules.layer_norm.LayerNorm": "LayerNorm",
    "sentence_transformers.sentence_transformer.modules.normalize.Normalize": "Normalize",
    "sentence_transformers.sentence_transformer.modules.dropout.Dropout": "Dropout",
    **SPARSE_MODULES,
}

_WITH_TASKS: Final = "custom_st.Transformer"
"""The Transformer of jina-embeddings-v3, which chooses an adapter by the task. What it does is done natively."""
_MODULES: Final[Mapping[str, str]] = {**_KNOWN_MODULES, _WITH_TASKS: _WITH_TASKS}
_TABLES: Final = ("StaticEmbedding", "SparseStaticEmbedding")
_SPARSE_PIPELINES: Final = (["Transformer", "SpladePooling"], ["MLMTransformer", "SpladePooling"], ["SparseStaticEmbedding"])
_BEGINNINGS: Final = (["Transformer", "Pooling"], ["StaticEmbedding"])

_GRITLM: Final = Instruction("<|user|>\n", "<|embed|>\n")


def read_card(folder: Path, name: str, *, pooling: StatedPooling | None = None, reranker: RerankerName | None = None) -> Card:
    """Read the card of the checkpoint in `folder`. `name` is what the model is called.

    `pooling` is what the user says of a checkpoint without modules.json, whose pooling is not written anywhere; `reranker`, by
    which convention it judges pairs. Raises CheckpointError for anything missing, malformed or not supported.
    """
    if not (folder / "modules.json").exists() and not (folder / "config.json").exists():
        raise CheckpointError(f"not found in {folder}; is this a checkpoint's folder?", file="config.json")
    if pooling is None and is_reranker(folder, name, reranker):
        return _reranker_card(folder, name, reranker)
    if reranker is not None:
        raise CheckpointError("is for models that judge pairs; leave out --pooling or --reranker.", file="modules.json")
    if (layout := find_layout(folder)) is not None:
        return read_multi_vector(folder, name, layout, pooling=pooling)
    pooling = _pooling_without_modules(folder, pooling)
    rows = _module_rows(folder, pooling)
    routers = [i for i, (kind, _) in enumerate(rows) if kind == "Router"]
    if not routers:
        return _tower(folder, name, rows, pooling)
    before, (_, path), after = rows[: routers[0]], rows[routers[0]], rows[routers[0] + 1 :]
    routes = read_router(folder, path, _MODULES)
    towers = [_tower(folder, name, [*before, *routes.rows[route], *after], pooling) for route in routes.rows]
    number = {route: i for i, route in enumerate(routes.rows)}
    tower_of = {way: number[route] for way, route in routes.route_of.items()}
    return replace(towers[tower_of.get(None, 0)], towers=tuple(towers), tower_of=tower_of)


def _tower(folder: Path, name: str, rows: Rows, pooling: StatedPooling | None) -> Card:
    """The card of modules that come one after another."""
    _check_order(folder, rows)
    rows = [row for row in rows if row[0] != "Dropout"]
    if rows[0][0] in _TABLES:
        return _static_card(folder, name, rows)
    path = rows[0][1]
    root = folder / path
    config = JsonFile.read(root, "config.json")
    has_classes = len(rows) == 1 and pooling is None
    if has_classes:
        if config.data.get("model_type") == "llama_bidirec":
            raise config.error("does not say how a pair is put to it; say --reranker nemotron.", "architectures")
        note_keys(config)
    encoder = read_adapter_folders(root, read_encoder(config))
    instruction = _GRITLM if is_gritlm(config) else None
    has_tasks = rows[0][0] == _WITH_TASKS
    if has_tasks and not encoder.adapters:
        message = (
            f"{_WITH_TASKS!r} is code of the checkpoint's own, which is not run; known is that of jina-embeddings-v3 only."
        )
        raise CheckpointError(message, file="modules.json", key="type")
    transformer = _transformer(root, rows, cross_encoder=has_classes and _has_modules(folder))
    tokenizer = JsonFile.read_optional(root, "tokenizer_config.json")
    is_sparse = rows[-1][0] in SPARSE_MODULES.values()
    sentence = _sentence_transformers(
        folder, "CrossEncoder" if has_classes else "SparseEncoder" if is_sparse else "SentenceTransformer"
    )
    tokenizer_card = read_tokenizer(root, config, tokenizer, lowercase=transformer.get("do_lower_case", bool, False))
    if has_classes:
        outputs, labels = read_classes(root, config, encoder, sentence)
    else:
        outputs, labels = _outputs(folder, rows, config, encoder, pooling=pooling, max_entries=_max_entries(sentence)), ()
        if "dense" in outputs:
            outputs |= read_m3(root, encoder, tokenizer_card)
            if instruction is not None:
                dense = outputs["dense"]
                outputs["dense"] = replace(dense, include_prompt=False, finished=dense.finished or pooling is not None)
    widths = read_matryoshka(config, outputs["dense"].width) if "dense" in outputs else ()
    return Card(
        name=name,
        path=path,
        encoder=encoder,
        outputs=outputs,
        labels=labels,
        max_length=read_max_length(encoder, transformer, tokenizer),
        tokenizer=tokenizer_card,
        prompts=read_instructions(config, encoder.adapters, sentence)
        if encoder.adapters
        else sentence.get("prompts", dict, {}),
        default_prompt_name=sentence.data.get("default_prompt_name"),
        default_adapter=read_default_adapter(transformer, encoder.adapters) if has_tasks else None,
        matryoshka=config.get("is_matryoshka", bool, False) or bool(widths),
        matryoshka_dimensions=widths,
        similarity=sentence.data.get("similarity_fn_name"),
        instruction=instruction,
    )


def _static_card(folder: Path, name: str, rows: Rows) -> Card:
    """The card of a table of vectors."""
    path = Path(rows[0][1]).as_posix() if Path(rows[0][1]).parts else ""
    is_sparse = rows[-1][0] in SPARSE_MODULES.values()
    sentence = _sentence_transformers(folder, "SparseEncoder" if is_sparse else "SentenceTransformer")
    max_entries = _max_entries(sentence)
    if rows[0][0] == "SparseStaticEmbedding":
        encoder, tokenizer, max_length, entries = read_sparse_table(folder, path)
        outputs: dict[OutputName, Output] = {"sparse": replace(entries, max_entries=max_entries)}
    else:
        encoder, tokenizer, max_length, normalized = read_static(folder / path)
        mean = Output(encoder.hidden_size, modes=("mean",), finish="normalize", finished=False)
        outputs = _dense_or_code(folder, mean, rows[1:], max_entries)
        if normalized is not None and "dense" in outputs:
            outputs["dense"] = replace(outputs["dense"], finished=normalized)
    return Card(
        name=name,
        path=path,
        encoder=encoder,
        outputs=outputs,
        max_length=max_length,
        tokenizer=tokenizer,
        prompts=sentence.get("prompts", dict, {}),
        default_prompt_name=sentence.data.get("default_prompt_name"),
        similarity=sentence.data.get("similarity_fn_name"),
    )


def _max_entries(sentence: JsonFile) -> int:
    """Of a sparse vector, as the checkpoint says; 0: it does not."""
    return sentence.positive("max_active_dims") if sentence.data.get("max_active_dims") is not None else 0


def _reranker_card(folder: Path, name: str, stated: RerankerName | None) -> Card:
    """The card of a language model that judges pairs."""
    config = JsonFile.read(folder, "config.json")
    tokenizer = JsonFile.read_optional(folder, "tokenizer_config.json")
    reranker = read_reranker(folder, name, config, tokenizer, stated)
    max_length = read_max_length(reranker.encoder, JsonFile.read_optional(folder, TRANSFORMER_FILES[0]), tokenizer)
    return Card(
        name=name,
        path="",
        encoder=reranker.encoder,
        outputs={"scores": reranker.output},
        max_length=min(max_length, reranker.max_length or max_length),
        tokenizer=read_tokenizer(folder, config, tokenizer, lowercase=False),
        prompts=reranker.prompts,
        default_prompt_name=reranker.default_prompt_name,
        template=reranker.template,
    )


def _pooling_without_modules(folder: Path, pooling: StatedPooling | None) -> StatedPooling | None:
    """What config.json says of the pooling, where modules.json cannot; else what the user says."""
    if _has_modules(folder):
        return pooling
    config = JsonFile.read(folder, "config.json")
    stated = stated_pooling(config)
    if stated is not None and pooling is not None:
        raise config.error("says how tokens are pooled; leave out --pooling.", "pooling")
    return stated or pooling


def _module_rows(folder: Path, pooling: StatedPooling | None) -> Rows:
    """(kind, path) of each module: a Transformer, a Pooling, heads."""
    file = "modules.json"
    if not _has_modules(folder):
        if is_model2vec(folder):
            return [("StaticEmbedding", "")]
        if pooling is None and not names_classes(JsonFile.read(folder, "config.json")):
            raise CheckpointError(
                "not found, so nothing says how tokens are pooled; say it with --pooling (e.g. --pooling mean, or splade).",
                file=file,
            )
        return [("Transformer", "")]
    if pooling is not None:
        raise CheckpointError("says how tokens are pooled; leave out --pooling.", file=file)
    values = read_json(folder, file)
    if not isinstance(values, list):
        raise CheckpointError("must be a list of objects.", file=file)
    return [_module_row(JsonFile(file, value)) for value in cast(list[object], values)]


def _check_order(folder: Path, rows: Rows) -> None:
    if not (folder / "modules.json").exists():
        return
    for _, path in rows:
        find_file(folder, path)
    kinds = ["Transformer" if kind == _WITH_TASKS else kind for kind, _ in rows if kind != "Dropout"]
    if kinds in _SPARSE_PIPELINES or (kinds == ["Transformer"] and is_cross_encoder(folder / rows[0][1])):
        return
    begin = 1 if kinds and kinds[0] in _TABLES else 2
    heads = kinds[begin:-1] if kinds[-1:] == ["SparseAutoEncoder"] else kinds[begin:]
    if kinds[:begin] not in _BEGINNINGS or any(kind not in _HEADS for kind in heads):
        raise CheckpointError(
            f"must begin with one Transformer and one Pooling, or one StaticEmbedding, is {kinds}.", file="modules.json"
        )


def _has_modules(folder: Path) -> bool:
    return (folder / "modules.json").exists()


def _module_row(row: JsonFile) -> tuple[str, str]:
    row.refuse_unknown({"idx", "name", "path", "type", "kwargs"})
    arguments = ["task"] if row.data.get("type") == _WITH_TASKS else None
    row.refuse_other({"kwargs": (arguments, [], {}, None)})
    path = row.get("path", str)
    if path.startswith(("/", "\\")) or ".." in Path(path).parts:
        raise row.error(f"{path!r} leads out of the checkpoint's folder.", "path")
    return module_kind(row, "type", row.data.get("type"), _MODULES), path


def _outputs(
    folder: Path,
    rows: Rows,
    config: JsonFile,
    encoder: Encoder,
    *,
    pooling: StatedPooling | None,
    max_entries: int,
) -> dict[OutputName, Output]:
    """What comes after the Transformer. `max_entries` of a sparse vector; 0: not stated."""
    if pooling == "splade":
        return {"sparse": read_splade(config, encoder, JsonFile("", {}), max_entries)}
    if pooling is not None:
        return {"dense": Output(encoder.hidden_size, modes=(pooling,), finish="normalize", finished=False)}
    config_of_next = JsonFile.read(folder, f"{rows[1][1]}/config.json")
    if rows[1][0] == "SpladePooling":
        return {"sparse": read_splade(config, encoder, config_of_next, max_entries)}
    return _dense_or_code(folder, _pooling(config_of_next, encoder.hidden_size), rows[2:], max_entries)


def _dense_or_code(folder: Path, output: Output, rows: Rows, max_entries: int) -> dict[OutputName, Output]:
    """What `output` and the heads after it give: dense vectors, or sparse ones if a sparse autoencoder comes last."""
    if rows and rows[-1][0] == "SparseAutoEncoder":
        return {"sparse": read_sparse_code(folder, rows[-1][1], _with_heads(folder, output, rows[:-1]), max_entries)}
    return {"dense": _with_heads(folder, output, rows)}


def _with_heads(folder: Path, output: Output, rows: Rows) -> Output:
    """An output with the heads that come after it."""
    width = output.width
    head = list[Head]()
    for kind, path in rows:
        head.append(_HEADS[kind](folder, path, width))
        if isinstance(head[-1], Dense):
            width = head[-1].out_features
    finished = bool(head) and isinstance(head[-1], Normalize)
    while head and isinstance(head[-1], Normalize):
        head.pop()
    return replace(output, width=width, head=tuple(head), finished=finished)


def _pooling(config: JsonFile, hidden_size: int) -> Output:
    sizes = {"word_embedding_dimension", "embedding_dimension"}
    config.refuse_unknown(sizes, {"pooling_mode", "include_prompt"}, _LEGACY_POOLING)
    size_key = "embedding_dimension" if "embedding_dimension" in config.data else "word_embedding_dimension"
    if (size := config.positive(size_key)) != hidden_size:
        raise config.error(f"{size} is not the model's hidden_size {hidden_size}.", size_key)
    if "pooling_mode" in config.data:
        given = config.data["pooling_mode"]
        table: Mapping[str, PoolingMode] = {mode: mode for mode in POOLING_MODES}
        names = cast(list[object], given) if isinstance(given, list) else [given]
        modes: tuple[PoolingMode, ...] = tuple(config.lookup("pooling_mode", name, table) for name in names)
    else:
        modes = tuple(mode for key, mode in _LEGACY_POOLING.items() if config.get(key, bool, False))
    if not modes:
        raise config.error("names no pooling mode.", "pooling_mode")
    include_prompt = config.get("include_prompt", bool, True)
    return Output(len(modes) * size, modes=modes, include_prompt=include_prompt, finish="normalize")


def _layer_norm(folder: Path, path: str, size: int) -> LayerNorm:
    config = JsonFile.read(folder, f"{path}/config.json")
    config.refuse_unknown({"dimension"})
    if (dimension := config.positive("dimension")) != size:
        raise config.error(f"{dimension} is not the width {size} of what comes before.", "dimension")
    return LayerNorm(path, "norm", dimension)


def _normalize(folder: Path, path: str, _: int) -> Normalize:
    config = JsonFile.read_optional(folder, f"{path}/config.json")
    config.refuse_unknown(level_names("sentence_embedding"))
    config.refuse_other(level_names("sentence_embedding"))
    return Normalize()


_HEADS: Final[Mapping[str, Callable[[Path, str, int], Head]]] = {
    "Dense": read_dense,
    "LayerNorm": _layer_norm,
    "Normalize": _normalize,
}


def _transformer(folder: Path, rows: list[tuple[str, str]], *, cross_encoder: bool) -> JsonFile:
    """Its own configuration. `rows` are the modules."""
    file = next((name for name in TRANSFORMER_FILES if (folder / name).exists()), TRANSFORMER_FILES[0])
    config = JsonFile.read_optional(folder, file)
    has_tasks, fills_masks = rows[0][0] == _WITH_TASKS, rows[-1][0] == "SpladePooling"
    more: Mapping[str, tuple[object, ...]] = FIXED_TRANSFORMER if cross_encoder else FILL_MASK if fills_masks else {}
    stated = {**FIXED_FEATURES, **more}
    fixed = {key: values for key, values in stated.items() if not (has_tasks and key == "model_args")}
    config.refuse_unknown(stated, {"max_seq_length", "do_lower_case", "unpad_inputs"})
    config.refuse_other(fixed)
    if fills_masks and rows[0][0] == "Transformer":
        config.get("transformer_task", str)
    return config


def _sentence_transformers(folder: Path, kind: str) -> JsonFile:
    """What is said of the model as a whole, which is of this kind."""
    config = JsonFile.read_optional(folder, "config_sentence_transformers.json")
    used = {"prompts", "default_prompt_name", "similarity_fn_name", "max_active_dims"}
    own = {"activation_fn", "keep_in_fp32_modules"} if kind == "CrossEncoder" else set[str]()
    config.refuse_unknown(used, own, {"__version__", "model_type", "requirements", "truncate_dim"})
    config.refuse_other({"model_type": (kind, None), "truncate_dim": (None,)})
    if kind != "SparseEncoder":
        config.refuse_other({"max_active_dims": (None,)})
    prompts: dict[str, object] = config.get("prompts", dict, {})
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise config.error(f"prompt {name!r} must be a string, is {text!r}.", "prompts")
    default = config.get("default_prompt_name", str, "")
    if default and default not in prompts:
        raise config.error(f"{default!r} is not among the prompts {list(prompts)}.", "default_prompt_name")
    config.refuse_other({"similarity_fn_name": ("cosine", "dot", "euclidean", "manhattan", None)})
    return config
