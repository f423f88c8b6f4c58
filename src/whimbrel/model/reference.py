"""Results of Sentence Transformers in float32 on the CPU, to compare with.

Loads a checkpoint with Sentence Transformers' own classes and never runs code that comes with a checkpoint. Knows nothing of
our models.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import numpy as np
import sentence_transformers
import torch
import transformers

from whimbrel.types.arrays import Float32Array

_CPU: Final[dict[str, Any]] = {"device": "cpu", "model_kwargs": {"dtype": torch.float32}, "local_files_only": True}
_QUIET: Final[dict[str, Any]] = {"show_progress_bar": False}


def compute(output: str, folder: str, texts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[Float32Array]:
    """Return an array per text, or per pair for the output "scores", where several classes have logits.

    Raises whatever Sentence Transformers raises.
    """
    cast(Any, transformers).utils.logging.disable_progress_bar()
    name, encode = _COMPUTE[output]
    model = getattr(sentence_transformers, name)(folder, **_CPU)
    rows = encode(model, list(pairs if output == "scores" else texts))
    return [np.asarray(torch.as_tensor(row), np.float32) for row in rows]


def _scores(model: Any, pairs: list[tuple[str, str]]) -> Any:
    logits = {"activation_fn": torch.nn.Identity()} if model.num_labels > 1 else {}
    return model.predict(pairs, **_QUIET, **logits)


_COMPUTE: Final[dict[str, tuple[str, Callable[[Any, list[Any]], Any]]]] = {
    "dense": ("SentenceTransformer", lambda model, texts: model.encode(texts, **_QUIET)),
    "sparse": ("SparseEncoder", lambda model, texts: model.encode(texts, convert_to_sparse_tensor=False, **_QUIET)),
    "multi_vector": ("MultiVectorEncoder", lambda model, texts: model.encode_document(texts, **_QUIET)),
    "scores": ("CrossEncoder", _scores),
}
"""Class of each output, and its call."""
