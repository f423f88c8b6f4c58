"""Sentence Transformers with its defaults, on torch or OpenVINO."""

from collections.abc import Callable
from typing import Any

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer


def load(folder: str, task: str, *, threads: int, backend: str = "torch", **model_kwargs: Any) -> Callable[[Any], Any]:
    torch.set_num_threads(threads)
    loaders: dict[str, Callable[..., Callable[[Any], Any]]] = {
        "dense": _dense, "rerank": _rerank, "token-vectors": _tokens, "sparse": _sparse,
    }  # fmt: skip
    options = {"backend": backend, "device": "cpu", "local_files_only": True}
    if model_kwargs:
        options["model_kwargs"] = model_kwargs
    return loaders[task](folder, **options)


def _dense(folder: str, **options: Any) -> Callable[[Any], Any]:
    return SentenceTransformer(folder, **options).encode


def _rerank(folder: str, **options: Any) -> Callable[[Any], Any]:
    model = CrossEncoder(folder, max_length=512, **options)
    return lambda call: model.predict([(call["query"], document) for document in call["documents"]])


def _tokens(folder: str, **options: Any) -> Callable[[Any], Any]:
    from sentence_transformers import MultiVectorEncoder

    encode = MultiVectorEncoder(folder, **options).encode_document
    return lambda texts: [rows.float() for rows in encode(texts)]  # numpy has no bfloat16


def _sparse(folder: str, **options: Any) -> Callable[[Any], Any]:
    from sentence_transformers import SparseEncoder

    return SparseEncoder(folder, **options).encode
