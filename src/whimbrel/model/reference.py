"""Results of Sentence Transformers in float32 on the CPU, to compare with.

Loads a checkpoint with Sentence Transformers' own classes and never runs code that comes with a checkpoint. Knows nothing of
our models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import numpy as np
import sentence_transformers
import torch
import transformers

from whimbrel.types.arrays import Float32Array

_CPU: Final[dict[str, Any]] = {"device": "cpu", "model_kwargs": {"dtype": torch.float32}, "local_files_only": True}


def compute(output: str, folder: str, texts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[Float32Array]:
    """Return an array per text, or per pair for the output "scores", where several classes have logits.

    Raises whatever Sentence Transformers raises.
    """
    cast(Any, transformers).utils.logging.disable_progress_bar()
    return [np.asarray(row, np.float32) for row in _COMPUTE[output](folder, list(texts), list(pairs))]


def _dense(folder: str, texts: list[str], _: object) -> Any:
    return cast(Any, sentence_transformers.SentenceTransformer)(folder, **_CPU).encode(texts, show_progress_bar=False)


def _sparse(folder: str, texts: list[str], _: object) -> Any:
    model = cast(Any, sentence_transformers).SparseEncoder(folder, **_CPU)
    return model.encode(texts, convert_to_sparse_tensor=False, show_progress_bar=False).numpy()


def _multi_vector(folder: str, texts: list[str], _: object) -> Any:
    model = cast(Any, sentence_transformers).MultiVectorEncoder(folder, **_CPU)
    return [torch.as_tensor(row).numpy() for row in model.encode_document(texts, show_progress_bar=False)]


def _scores(folder: str, _: object, pairs: list[tuple[str, str]]) -> Any:
    model = cast(Any, sentence_transformers).CrossEncoder(folder, **_CPU)
    logits = {"activation_fn": torch.nn.Identity()} if model.num_labels > 1 else {}
    return model.predict(pairs, show_progress_bar=False, **logits)


_COMPUTE: Final[dict[str, Callable[..., Any]]] = {
    "dense": _dense,
    "sparse": _sparse,
    "multi_vector": _multi_vector,
    "scores": _scores,
}
