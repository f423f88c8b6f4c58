"""FastEmbed with a model of one's own, exported to ONNX."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fastembed import LateInteractionTextEmbedding, TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
from fastembed.rerank.cross_encoder import TextCrossEncoder

_OWN = "local/model"
_SOURCE = ModelSource(url="http://127.0.0.1/unused")  # the folder is named, so nothing is fetched


def load(folder: str, task: str, *, threads: int, file: str) -> Callable[[Any], Any]:
    options: dict[str, Any] = {"specific_model_path": folder, "threads": threads, "providers": ["CPUExecutionProvider"]}
    return {"dense": _dense, "rerank": _rerank, "token-vectors": _tokens}[task](folder, file, options)


def _dense(folder: str, file: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    pooling = json.loads(Path(folder, "1_Pooling/config.json").read_text())
    kind = PoolingType.CLS if pooling["pooling_mode_cls_token"] else PoolingType.MEAN
    width = pooling["word_embedding_dimension"]
    TextEmbedding.add_custom_model(_OWN, pooling=kind, normalization=True, sources=_SOURCE, dim=width, model_file=file)
    model = TextEmbedding(_OWN, **options)
    return lambda texts: list(model.embed(texts))


def _rerank(folder: str, file: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    del folder
    TextCrossEncoder.add_custom_model(_OWN, sources=_SOURCE, model_file=file)
    model = TextCrossEncoder(_OWN, **options)
    return lambda call: 1 / (1 + np.exp(-np.array(list(model.rerank(call["query"], call["documents"])))))


def _tokens(folder: str, file: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    """FastEmbed takes no ColBERT of one's own. So one that it knows, of the same layout and width, gets other files."""
    del folder, file
    from fastembed.late_interaction import colbert

    known = next(each for each in colbert.supported_colbert_models if each.model == "colbert-ir/colbertv2.0")
    object.__setattr__(known, "model_file", "onnx/model_tokens.onnx")
    model = LateInteractionTextEmbedding(known.model, **options)
    return lambda texts: list(model.embed(texts))
