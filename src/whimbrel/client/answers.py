"""What comes back in Whimbrel's own dialect -> arrays; and the answers to parts -> the whole. Raise ValueError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from whimbrel.client.task import Reply
from whimbrel.types import Classes, Entity, Explanation, Float32Array, Outputs, Ragged, Sparse
from whimbrel.wire import Block, read_blocks

METADATA: Final = "metadata"
"""The header that says what the bytes are."""


class _About(msgspec.Struct):
    arrays: list[Block]


def read_outputs(reply: Reply, count: int) -> Outputs:
    """The answer of /v1/embed in bytes: arrays are views of them."""
    about = msgspec.json.decode(reply.headers[METADATA], type=_About)
    arrays = read_blocks(about.arrays, reply.content)
    outputs = Outputs(
        dense=arrays.get("dense"),
        sparse=_sparse(arrays),
        multi_vector=_ragged(arrays, "multi_vector"),
        scores=arrays.get("scores"),
        token_scores=_ragged(arrays, "token_scores"),
        muvera=arrays.get("muvera"),
        hidden=_ragged(arrays, "hidden"),
        token_dense=_ragged(arrays, "token_dense"),
    )
    for name in Outputs.__slots__:
        output = getattr(outputs, name)
        if output is not None and len(output) != count:
            raise ValueError(f"{len(output)} rows of {name} for {count} inputs")
    return outputs


def _sparse(arrays: Mapping[str, NDArray[Any]]) -> Sparse | None:
    if "sparse.ids" not in arrays:
        return None
    ids, weights = arrays["sparse.ids"], arrays["sparse.weights"]
    return Sparse(ids, weights, _checked(arrays["sparse.offsets"], len(ids), len(weights)))


def _ragged(arrays: Mapping[str, NDArray[Any]], name: str) -> Ragged | None:
    if f"{name}.rows" not in arrays:
        return None
    rows = arrays[f"{name}.rows"]
    return Ragged(rows, _checked(arrays[f"{name}.offsets"], len(rows)))


def _checked(offsets_N1: NDArray[Any], *counts: int) -> NDArray[np.int64]:
    """Where texts begin and end in lists of so many."""
    if offsets_N1.ndim != 1 or not offsets_N1.size or offsets_N1[0] != 0 or (np.diff(offsets_N1) < 0).any():
        raise ValueError("offsets that are none")
    if any(offsets_N1[-1] != count for count in counts):
        raise ValueError(f"offsets up to {offsets_N1[-1]} in a list of {counts[0]}")
    return offsets_N1


class _Explained(msgspec.Struct):
    query_tokens: tuple[str, ...] | None
    document_tokens: tuple[str, ...] | None
    maxima: list[float]
    places: list[int]


class _Score(msgspec.Struct):
    index: int
    score: float
    explanation: _Explained | None = None


class _ScoreAnswer(msgspec.Struct):
    data: list[_Score]


def _scores(reply: Reply, count: int) -> list[_Score]:
    data = sorted(msgspec.json.decode(reply.content, type=_ScoreAnswer).data, key=lambda row: row.index)
    if [row.index for row in data] != list(range(count)):
        raise ValueError(f"{len(data)} scores for {count} pairs, or their numbers are wrong")
    return data


def read_scores(reply: Reply, count: int) -> Float32Array:
    """The scores of /v1/score."""
    return np.array([row.score for row in _scores(reply, count)], np.float32)


def read_explanations(reply: Reply, count: int) -> list[Explanation]:
    """The explanations of /v1/score."""
    found: list[Explanation] = []
    for row in _scores(reply, count):
        if (each := row.explanation) is None:
            raise ValueError("there is no explanation")
        maxima, places = np.array(each.maxima, np.float32), np.array(each.places, np.int32)
        found.append(Explanation(float(np.float32(row.score)), each.query_tokens, each.document_tokens, maxima, places))
    return found


class _ClassesAnswer(msgspec.Struct):
    labels: tuple[str, ...]
    scores: list[list[float]]


def read_classes(reply: Reply, count: int) -> Classes:
    """The answer of /v1/classify."""
    found = msgspec.json.decode(reply.content, type=_ClassesAnswer)
    if len(found.scores) != count:
        raise ValueError(f"{len(found.scores)} rows for {count} inputs")
    return Classes(found.labels, np.array(found.scores, np.float32).reshape(count, len(found.labels)))


class _EntitiesAnswer(msgspec.Struct):
    entities: list[list[Entity]]


def read_entities(reply: Reply, count: int) -> list[list[Entity]]:
    """The answer of /v1/token_classify."""
    found = msgspec.json.decode(reply.content, type=_EntitiesAnswer).entities
    if len(found) != count:
        raise ValueError(f"{len(found)} rows for {count} inputs")
    return found


def chained(parts: list[list[Any]]) -> list[Any]:
    """One list after another."""
    return [each for part in parts for each in part]


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def join_classes(parts: list[Classes]) -> Classes:
    """Of one model."""
    return Classes(parts[0].labels, np.concatenate([part.scores_NC for part in parts]))


def join_outputs(parts: list[Outputs]) -> Outputs:
    """The same outputs of all."""
    if len(parts) == 1:
        return parts[0]
    return Outputs(**{name: _joined([getattr(part, name) for part in parts]) for name in Outputs.__slots__})


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    offsets = _offsets(np.concatenate([np.diff(part.offsets_N1) for part in parts]))
    if isinstance(first, Ragged):
        return Ragged(np.concatenate([part.rows_XD for part in parts]), offsets)
    return Sparse(np.concatenate([part.ids_X for part in parts]), np.concatenate([part.weights_X for part in parts]), offsets)
