"""Texts that are pooled, or run, in parts. numpy only.

Late chunking: the texts of a request are parts of one document, which runs in one pass; each part's vector is the mean of its
own tokens, so that it knows what stands around it. A token belongs to the part in which it ends: what leads a token, a space
mostly, may be the last of the part before. Special tokens and a prompt belong to none.

Long texts: what is too long for the model runs in parts of its own, each with the special tokens and the prompt, and the
vector is the mean of theirs, weighted by the text's own tokens in each; it is normalised again where they are.

Sources: jina-ai/late-chunking, chunked_pooling/__init__.py (the mean over a span of token vectors); vLLM's chunked processing
of long embeddings, entrypoints/pooling/embed (0.33).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import WhimbrelError
from whimbrel.types import Float32Array, Int32Array, Int64Array, Outputs

_INPUT: Final = re.compile(r"input\[(\d+)\]")


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """How the vectors of parts become those of texts."""

    offsets_N1: Int64Array
    """Parts offsets_N1[i] to offsets_N1[i + 1] are those of text i."""
    weights_S: Float32Array
    """Of each part: its tokens."""
    normalized: bool
    """Whether vectors are."""


def spans(ends_N1: NDArray[np.integer], offsets_T2: NDArray[np.integer]) -> Int32Array:
    """The tokens of each part, (N, 2); those of a part without any are an empty range.

    `ends_N1` says where in the characters the prompt ends, and then each part; `offsets_T2` where each token begins and ends.
    """
    last_T = np.maximum(offsets_T2[:, 1] - 1, 0)  # a space whose offsets were trimmed has none left
    part_T = np.maximum.accumulate(np.searchsorted(ends_N1, last_T, side="right"))
    parts_N = np.arange(1, ends_N1.size)
    bounds = [np.searchsorted(part_T, parts_N, side=side) for side in ("left", "right")]
    return np.stack(bounds, axis=1).astype(np.int32)


def split(ids: Int32Array, before: int, after: int, max_length: int) -> list[tuple[Int32Array, int]]:
    """Parts of at most `max_length` tokens, and how many tokens of each are its own.

    Each has the first `before` and the last `after` tokens. A text that is not too long is one part.
    """
    own = ids[before : ids.size - after]
    if ids.size <= max_length:
        return [(ids, own.size)]
    room = max_length - before - after
    pieces = [own[start : start + room] for start in range(0, own.size, room)]
    return [(np.concatenate((ids[:before], piece, ids[ids.size - after :])), piece.size) for piece in pieces]


def merged(outputs: Outputs, merge: Merge | None) -> Outputs:
    """Vectors of parts -> vectors of texts. What is one part stays as it is."""
    if merge is None or outputs.dense is None:
        return outputs
    starts, counts = merge.offsets_N1[:-1], np.diff(merge.offsets_N1)
    weights_S1 = merge.weights_S[:, None].astype(np.float64)
    mean_ND = np.add.reduceat(outputs.dense * weights_S1, starts) / np.add.reduceat(weights_S1, starts)
    if merge.normalized:
        norms_N1 = np.linalg.norm(mean_ND, axis=1, keepdims=True)
        mean_ND /= np.where(norms_N1 > 0, norms_N1, 1.0)
    dense = np.where((counts == 1)[:, None], outputs.dense[starts], mean_ND).astype(np.float32)
    return replace(outputs, dense=dense)


def located(error: WhimbrelError, merge: Merge | None) -> WhimbrelError:
    """An error that names a part, as one that names the text."""
    found = _INPUT.fullmatch(error.param or "")
    if merge is None or found is None:
        return error
    index = int(np.searchsorted(merge.offsets_N1, int(found[1]), side="right")) - 1
    moved = copy(error)
    moved.param = f"input[{index}]"
    moved.args = (f"{moved.param}: {error.message}",)
    return moved


def common_prefix(first: Int32Array, second: Sequence[int]) -> int:
    """How many leading ids are equal."""
    size = min(first.size, len(second))
    differs = np.flatnonzero(first[:size] != np.array(second[:size], np.int32))
    return int(differs[0]) if differs.size else size
