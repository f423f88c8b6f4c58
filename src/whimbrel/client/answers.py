"""What comes back in Whimbrel's own dialect -> arrays; and the answers to parts -> the whole. Raise ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray

from whimbrel.client.task import Reply
from whimbrel.types import Classes, Entity, Explanation, Float32Array, Outputs, Ragged, Sparse
from whimbrel.wire import from_base64


class _Entries(msgspec.Struct):
    ids: str
    weights: str


class _Matrix(msgspec.Struct):
    shape: tuple[int, int]
    data: str


class _Outputs(msgspec.Struct):
    dense: list[str] | None = None
    sparse: list[_Entries] | None = None
    multi_vector: list[_Matrix] | None = None
    scores: list[str] | None = None
    token_scores: list[_Matrix] | None = None
    muvera: list[str] | None = None


class _EmbedAnswer(msgspec.Struct):
    outputs: _Outputs


def read_outputs(reply: Reply, count: int) -> Outputs:
    """The answer of /v1/embed."""
    found = msgspec.json.decode(reply.content, type=_EmbedAnswer).outputs
    for name in _Outputs.__struct_fields__:
        column = getattr(found, name)
        if column is not None and len(column) != count:
            raise ValueError(f"{len(column)} rows of {name} for {count} inputs")
    return Outputs(
        dense=_rows(found.dense),
        sparse=_sparse(found.sparse),
        multi_vector=_ragged(found.multi_vector),
        scores=_rows(found.scores),
        token_scores=_ragged(found.token_scores),
        muvera=_rows(found.muvera),
    )


def _rows(column: list[str] | None) -> Float32Array | None:
    return None if column is None else from_base64(column)


def _numbers(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(pybase64.b64decode(text, validate=True), dtype)


def _sparse(column: list[_Entries] | None) -> Sparse | None:
    if column is None:
        return None
    ids = [_numbers(each.ids, "<i4") for each in column]
    weights = [_numbers(each.weights, "<f4") for each in column]
    if [each.size for each in ids] != [each.size for each in weights]:
        raise ValueError("not as many ids as weights")
    return Sparse(_flat(ids, np.int32), _flat(weights, np.float32), _offsets([each.size for each in ids]))


def _ragged(column: list[_Matrix] | None) -> Ragged | None:
    if column is None:
        return None
    rows = [_numbers(each.data, "<f4").reshape(each.shape) for each in column]
    return Ragged(np.concatenate(rows, dtype=np.float32), _offsets([len(each) for each in rows]))


def _flat(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.empty(0, dtype)


def _offsets(counts: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


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


def join_classes(parts: list[Classes]) -> Classes:
    """Of one model."""
    return Classes(parts[0].labels, np.concatenate([part.scores_NC for part in parts]))


def join_outputs(parts: list[Outputs]) -> Outputs:
    """The same outputs of all."""
    if len(parts) == 1:
        return parts[0]
    return Outputs(**{name: _joined([getattr(part, name) for part in parts]) for name in _Outputs.__struct_fields__})


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    offsets = _offsets([count for part in parts for count in np.diff(part.offsets_N1).tolist()])
    if isinstance(first, Ragged):
        return Ragged(np.concatenate([part.rows_XD for part in parts]), offsets)
    return Sparse(np.concatenate([part.ids_X for part in parts]), np.concatenate([part.weights_X for part in parts]), offsets)
