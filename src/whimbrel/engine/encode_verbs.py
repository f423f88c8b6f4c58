"""Verbs that encode texts, as functions that return operations. Those that score are in `outputs/scoring.py`.

Engine and AsyncEngine run the operations. The docstrings of both modules are those of their methods.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Unpack

from whimbrel.outputs.scoring import Operation
from whimbrel.types.arrays import Float32Array
from whimbrel.types.card import Card
from whimbrel.types.options import TextOptions, reject_muvera, require, require_muvera, text_request
from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs, Ragged, Sparse


def embed(card: Card, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Operation[Float32Array]:
    """Return dense vectors of `texts`: float32, (N, D), or (D,) for a single string. The options are those of TextOptions."""
    request = text_request(card, texts, ("dense",), **options)
    return Operation(request, lambda result: _unwrap(result.dense, texts))


def sparse(card: Card, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Operation[Sparse]:
    """Return the sparse vector of each of `texts`: weights of vocabulary entries. The options are those of TextOptions."""
    return Operation(text_request(card, texts, ("sparse",), **options), lambda result: require(result.outputs.sparse))


def multi_vector(card: Card, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Operation[Ragged]:
    """Return the token vectors of each of `texts`, (tokens, D) per text. Options: TextOptions except `muvera`."""
    reject_muvera(options)
    request = text_request(card, texts, ("multi_vector",), **options)
    return Operation(request, lambda result: require(result.outputs.multi_vector))


def muvera(card: Card, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Operation[Float32Array]:
    """Return one MUVERA encoding per text in place of its token vectors: float32, (N, E), or (E,) for a single string.

    `input_type` is required. The other options are those of TextOptions; `muvera` takes parameters (`outputs/muvera.py`).
    """
    request = text_request(card, texts, ("multi_vector",), **require_muvera(options))
    return Operation(request, lambda result: _unwrap(require(result.outputs.muvera), texts))


def encode(
    card: Card, texts: str | Iterable[str], outputs: OutputName | Sequence[OutputName] = (), **options: Unpack[TextOptions]
) -> Operation[Outputs]:
    """Return several outputs of `texts` from one pass of the model, as attributes of the result.

    `outputs` names them, e.g. ["dense", "sparse"]. Default: the outputs that the model is made for. A single string is a list
    of one. The options are those of TextOptions.
    """
    request = text_request(card, texts, outputs, **options)
    return Operation(request, lambda result: replace(result.outputs, logits=None))  # no server sends logits


def _unwrap(vectors_ND: Float32Array, texts: str | Iterable[str]) -> Float32Array:
    return vectors_ND[0] if isinstance(texts, str) else vectors_ND
