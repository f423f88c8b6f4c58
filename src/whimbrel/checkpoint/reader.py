"""Checkpoint layout detection.

Chooses the reader of a checkpoint's layout, which makes the `Card`. Every key of the files must be used, be known not to change
a vector, or have its one supported value. Anything else raises `CheckpointError` with file and key (ADR 4). Knows nothing of
devices, options or weights.

The layouts are those of Sentence Transformers (up to 5.3, and since 5.4), transformers alone, late interaction and rerankers.
The reader of each names its source code.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from whimbrel.checkpoint.config.decoders import read_stated_pooling
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.late_interaction.layouts import find_layout, read_multi_vector
from whimbrel.checkpoint.scores.classifiers import is_chain_of_scores, is_cross_encoder, names_classes
from whimbrel.checkpoint.scores.llm_rerankers import is_reranker, read_reranker
from whimbrel.checkpoint.scores.step_rewards import MATH_SHEPHERD_IDS
from whimbrel.checkpoint.sentence_transformers.heads import CHAINED
from whimbrel.checkpoint.sentence_transformers.modules import KINDS, MODULES, WITH_TASKS, Rows, has_modules, read_modules
from whimbrel.checkpoint.sentence_transformers.router import read_router
from whimbrel.checkpoint.sentence_transformers.static import is_model2vec, read_static_card
from whimbrel.checkpoint.transformer import read_transformer_card
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Card, PoolingOption, RerankerName

_TABLES: Final = ("StaticEmbedding", "SparseStaticEmbedding")
_SPARSE_PIPELINES: Final = (["Transformer", "SpladePooling"], ["MLMTransformer", "SpladePooling"], ["SparseStaticEmbedding"])
_FIRST: Final = (["Transformer"], ["StaticEmbedding"])


def read_card(folder: Path, name: str, *, pooling: PoolingOption | None = None, reranker: RerankerName | None = None) -> Card:
    """Read the card of the checkpoint in `folder`. `name` is the model's name.

    `pooling` is the user's choice for a checkpoint without modules.json, whose files do not state it. `reranker` is the
    convention by which it scores pairs. Raises CheckpointError for anything missing, malformed or not supported.
    """
    if not has_modules(folder) and not (folder / "config.json").exists():
        raise CheckpointError(f"not found in {folder}; is this a checkpoint's folder?", file="config.json")
    if pooling is None and is_reranker(folder, name, reranker):
        return read_reranker(folder, name, reranker)
    if reranker is not None:
        raise CheckpointError("is for models that judge pairs; leave out --pooling or --reranker.", file=MODULES)
    if (layout := find_layout(folder)) is not None:
        return read_multi_vector(folder, name, layout, pooling=pooling)
    if has_modules(folder):
        if pooling is not None:
            raise CheckpointError("says how tokens are pooled; leave out --pooling.", file=MODULES)
        return _read_modules(folder, name)
    pooling = _pooling(folder, "math-shepherd" if pooling is None and name in MATH_SHEPHERD_IDS else pooling)
    if is_model2vec(folder):
        return read_static_card(folder, name, [("StaticEmbedding", "")])
    return read_transformer_card(folder, name, [("Transformer", "")], pooling)


def _pooling(folder: Path, pooling: PoolingOption | None) -> PoolingOption | None:
    """Return the pooling of config.json, else the user's. None if the model needs none."""
    config = JsonFile.read(folder, "config.json")
    stated = read_stated_pooling(config)
    if stated is not None and pooling is not None:
        raise config.error("says how tokens are pooled; leave out --pooling.", "pooling")
    pooling = stated or pooling
    if pooling is None and not is_model2vec(folder) and not names_classes(config):
        raise CheckpointError(
            "not found, so nothing says how tokens are pooled; say it with --pooling (e.g. --pooling mean, or splade).",
            file=MODULES,
        )
    return pooling


def _read_modules(folder: Path, name: str) -> Card:
    """Read the card of the modules in modules.json. A Router makes a tower for each route."""
    rows = read_modules(folder, KINDS)
    router = next((i for i, (kind, _) in enumerate(rows) if kind == "Router"), None)
    if router is None:
        return _read_tower(folder, name, rows)
    if is_chain_of_scores(folder, rows):
        raise CheckpointError("a Router in a CrossEncoder is not supported.", file=MODULES, key="type")
    routes = read_router(folder, rows[router][1])
    towers = [_read_tower(folder, name, [*rows[:router], *route, *rows[router + 1 :]]) for route in routes.rows.values()]
    number = {route: i for i, route in enumerate(routes.rows)}
    tower_of = {input_type: number[route] for input_type, route in routes.route_of.items()}
    return replace(towers[tower_of.get(None, 0)], towers=tuple(towers), tower_of=tower_of)


def _read_tower(folder: Path, name: str, rows: Rows) -> Card:
    """Read the card of modules that run in sequence."""
    rows = [row for row in rows if row[0] != "Dropout"]
    _check_order(folder, rows)
    if rows[0][0] in _TABLES:
        return read_static_card(folder, name, rows)
    return read_transformer_card(folder, name, rows, None)


def _check_order(folder: Path, rows: Rows) -> None:
    kinds = ["Transformer" if kind == WITH_TASKS else kind for kind, _ in rows]
    if kinds in _SPARSE_PIPELINES or (kinds == ["Transformer"] and is_cross_encoder(folder / rows[0][1])):
        return
    behind = kinds[1:-1] if kinds[-1:] == ["SparseAutoEncoder"] else kinds[1:]
    if kinds[:1] not in _FIRST or any(kind not in CHAINED for kind in behind) or kinds == ["Transformer"]:
        raise CheckpointError(
            f"must begin with one Transformer or StaticEmbedding, and go on with {', '.join(CHAINED)}; is {kinds}.",
            file=MODULES,
        )
