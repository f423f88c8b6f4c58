"""What comes back in Whimbrel's own dialect -> arrays; and the answers to parts -> the whole. Raise ValueError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from whimbrel.client.task import Reply
from whimbrel.types.arrays import Float32Array
from whimbrel.types.result import Classes, Entity, Explanation, Outputs, Ragged, Sparse
from whimbrel.wire import Block, read_blocks


class _Placed(Protocol):
    index: int


class _Scored(Protocol):
    score: float


T = TypeVar("T", bound=_Placed)

METADATA: Final = "metadata"
"""The header that says what the bytes are."""


_Arrays: TypeAlias = Mapping[str, NDArray[Any]]


class _About(msgspec.Struct):
    arrays: list[Block]


def read_outputs(wanted: Sequence[str], reply: Reply, count: int) -> Outputs:
    """The answer of /v1/embed in bytes, which has what is wanted: arrays are views of them."""
    if METADATA not in reply.headers:
        raise ValueError(f"it has no header {METADATA!r}, as Whimbrel's have")
    about = msgspec.json.decode(reply.headers[METADATA], type=_About)
    arrays = read_blocks(about.arrays, reply.content)
    outputs = Outputs(
        dense=_array(arrays, "dense"),
        sparse=_sparse(arrays),
        multi_vector=_ragged(arrays, "multi_vector"),
        scores=_array(arrays, "scores"),
        token_scores=_ragged(arrays, "token_scores"),
        muvera=_array(arrays, "muvera"),
        hidden=_ragged(arrays, "hidden"),
        token_dense=_ragged(arrays, "token_dense"),
    )
    return checked(outputs, wanted, count)


def checked(outputs: Outputs, wanted: Sequence[str], count: int) -> Outputs:
    """If it has what is wanted, of so many inputs, and only numbers."""
    for name in Outputs.__slots__:
        output = getattr(outputs, name)
        if output is None and name in wanted:
            raise ValueError(f"it has no {name}")
        if output is not None and len(output) != count:
            raise ValueError(f"{len(output)} rows of {name} for {count} inputs")
        if output is None:
            continue
        numbers = _numbers(output)
        if 0 in numbers.shape[1:]:
            raise ValueError(f"{name} has no columns")
        if not np.isfinite(numbers).all():
            raise ValueError(f"{name} has numbers that are NaN or infinite")
    return outputs


def _numbers(output: Float32Array | Sparse | Ragged) -> Float32Array:
    if isinstance(output, Sparse):
        return output.weights_X
    return output.rows_XD if isinstance(output, Ragged) else output


def _array(arrays: _Arrays, name: str, kind: str = "float32", num_dimensions: int = 2) -> NDArray[Any] | None:
    array = arrays.get(name)
    if array is not None and (array.dtype.name, array.ndim) != (kind, num_dimensions):
        raise ValueError(f"{name} is {array.dtype} of shape {list(array.shape)}")
    return array


def _sparse(arrays: _Arrays) -> Sparse | None:
    ids, weights = _array(arrays, "sparse.ids", "int32", 1), _array(arrays, "sparse.weights", num_dimensions=1)
    if ids is None or weights is None:
        return None
    return Sparse(ids, weights, _offsets(arrays, "sparse", len(ids), len(weights)))


def _ragged(arrays: _Arrays, name: str) -> Ragged | None:
    rows = _array(arrays, f"{name}.rows")
    return None if rows is None else Ragged(rows, _offsets(arrays, name, len(rows)))


def _offsets(arrays: _Arrays, name: str, *counts: int) -> NDArray[np.int64]:
    """Where texts begin and end in lists of so many."""
    offsets_N1 = _array(arrays, f"{name}.offsets", "int64", 1)
    if offsets_N1 is None or not offsets_N1.size or offsets_N1[0] != 0 or (np.diff(offsets_N1) < 0).any():
        raise ValueError(f"{name} has no offsets")
    if any(offsets_N1[-1] != count for count in counts):
        raise ValueError(f"offsets up to {offsets_N1[-1]} in a list of {counts[0]}")
    return offsets_N1


def in_order(rows: list[T], count: int) -> list[T]:
    """Rows that say their places, one for each of so many inputs."""
    ordered = sorted(rows, key=lambda row: row.index)
    if [row.index for row in ordered] != list(range(count)):
        raise ValueError(f"{len(rows)} rows for {count} inputs, or their places are wrong")
    return ordered


def floats(rows: Sequence[Any], num_dimensions: int) -> Float32Array:
    """Lists of numbers, of one length, as an array. What float32 cannot hold is infinite."""
    with np.errstate(over="ignore"):
        found = np.array(rows, np.float32)
    if found.ndim != num_dimensions:
        raise ValueError("rows of unequal width, or empty")
    return found


def join_scores(parts: list[Float32Array]) -> Float32Array:
    """Also of none."""
    return np.concatenate([np.empty(0, np.float32), *parts])


def scores_of(rows: Sequence[_Scored]) -> Float32Array:
    """Finite ones."""
    found = floats([row.score for row in rows], 1)
    if not np.isfinite(found).all():
        raise ValueError("scores that are infinite")
    return found


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
    return in_order(msgspec.json.decode(reply.content, type=_ScoreAnswer).data, count)


def read_scores(reply: Reply, count: int) -> Float32Array:
    """The scores of /v1/score."""
    return scores_of(_scores(reply, count))


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
    return Classes(found.labels, floats(found.scores, 2).reshape(count, len(found.labels)))


class _EntitiesAnswer(msgspec.Struct):
    entities: list[list[Entity]]


def read_entities(reply: Reply, count: int) -> list[list[Entity]]:
    """The answer of /v1/token_classify."""
    found = msgspec.json.decode(reply.content, type=_EntitiesAnswer).entities
    if len(found) != count:
        raise ValueError(f"{len(found)} rows for {count} inputs")
    return found


def flatten(parts: list[list[Any]]) -> list[Any]:
    """One list after another."""
    return [each for part in parts for each in part]


def offsets_of(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Where lists of so many begin and end, one after another."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def join_classes(parts: list[Classes]) -> Classes:
    """Of one model."""
    if any(part.labels != parts[0].labels for part in parts):
        raise ValueError("they have other labels")
    return Classes(parts[0].labels, np.concatenate([part.scores_NC for part in parts]))


def join_outputs(parts: list[Outputs]) -> Outputs:
    """The same outputs of all."""
    if len(parts) == 1:
        return parts[0]
    return Outputs(**{name: _joined([getattr(part, name) for part in parts]) for name in Outputs.__slots__})


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if any((part is None) != (first is None) for part in parts):
        raise ValueError("they have other outputs")
    if first is None:
        return None
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    ends = offsets_of(np.concatenate([np.diff(part.offsets_N1) for part in parts]))
    if isinstance(first, Ragged):
        return Ragged(np.concatenate([part.rows_XD for part in parts]), ends)
    return Sparse(np.concatenate([part.ids_X for part in parts]), np.concatenate([part.weights_X for part in parts]), ends)
