"""Responses: their checks, those of Whimbrel's own dialect as arrays, and the join of partial results.

Nothing a server sends is trusted: types, shapes, offsets and finite values are checked. Functions raise ValueError.
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from whimbrel.client.task import Reply
from whimbrel.outputs.scoring import classes_of
from whimbrel.types.arrays import Float32Array
from whimbrel.types.batch import offsets_of
from whimbrel.types.result import Classes, Entity, Explanation, Outputs, Ragged, Ranked, Sparse
from whimbrel.wire.raw import Block, read_blocks
from whimbrel.wire.whole_numbers import decode_json

T = TypeVar("T")
Row = TypeVar("Row", bound="IndexedRow")
Rows = TypeVar("Rows", bound=Sized)
_Arrays: TypeAlias = Mapping[str, NDArray[Any]]


class IndexedRow(msgspec.Struct):
    index: int
    """Index of its input."""


class ScoredRow(IndexedRow):
    score: float


class Data(msgspec.Struct, Generic[T]):
    """Body with its rows in a field `data`."""

    data: list[T]


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Scores of documents, in the order of the documents, and what orders them."""

    scores_N: Float32Array
    order_N: Float32Array
    """Numbers by which the documents are ordered, the greatest first."""
    places_N: NDArray[np.int64]
    """Places of the documents in the server's order, which decide where these numbers are equal."""

    def ranked(self, top_n: int | None) -> list[Ranked]:
        """Return the index and the score of each document, best first, at most `top_n`."""
        best = np.lexsort((self.places_N, -self.order_N))[:top_n]
        return [Ranked(*each) for each in zip(best.tolist(), self.scores_N[best].tolist(), strict=True)]


class _Metadata(msgspec.Struct):
    arrays: list[Block]


def read_outputs(requested: Sequence[str], reply: Reply, count: int) -> Outputs:
    """Return the outputs of a binary response of /v1/embed. The arrays are views of its bytes."""
    if "metadata" not in reply.headers:
        raise ValueError("it has no header 'metadata', as Whimbrel's have")
    metadata = decode_json(_Metadata, reply.headers["metadata"])
    arrays = read_blocks(metadata.arrays, reply.content)
    rows: dict[str, Any] = {name: _array(arrays, name) for name in ("dense", "scores", "muvera")}
    tokens: dict[str, Any] = {name: _ragged(arrays, name) for name in ("multi_vector", "token_scores", "hidden", "token_dense")}
    return check_outputs(Outputs(**rows, **tokens, sparse=_sparse(arrays)), requested, count)


def check_outputs(outputs: Outputs, requested: Sequence[str], count: int) -> Outputs:
    """Return the outputs. Raise ValueError unless the requested ones are there, have `count` rows and finite values."""
    for name in Outputs.__slots__:
        if (output := getattr(outputs, name)) is None:
            if name in requested:
                raise ValueError(f"it has no {name}")
            continue
        values = _values(check_count(output, count, f" of {name}"))
        if 0 in values.shape[1:]:
            raise ValueError(f"{name} has no columns")
        if not np.isfinite(values).all():
            raise ValueError(f"{name} has numbers that are NaN or infinite")
    return outputs


def check_count(rows: Rows, count: int, kind: str = "") -> Rows:
    if len(rows) != count:
        raise ValueError(f"{len(rows)} rows{kind} for {count} inputs")
    return rows


def _values(output: Float32Array | Sparse | Ragged) -> Float32Array:
    if isinstance(output, Sparse):
        return output.weights_X
    return output.rows_XD if isinstance(output, Ragged) else output


def _array(arrays: _Arrays, name: str, dtype: str = "float32", num_dimensions: int = 2) -> NDArray[Any] | None:
    array = arrays.get(name)
    if array is not None and (array.dtype.name, array.ndim) != (dtype, num_dimensions):
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
    """Return checked offsets, whose last must equal each of `counts`."""
    offsets_N1 = _array(arrays, f"{name}.offsets", "int64", 1)
    if offsets_N1 is None or not offsets_N1.size or offsets_N1[0] != 0 or (np.diff(offsets_N1) < 0).any():
        raise ValueError(f"{name} has no offsets")
    if any(offsets_N1[-1] != count for count in counts):
        raise ValueError(f"offsets up to {offsets_N1[-1]} in a list of {counts[0]}")
    return offsets_N1


def sort_by_index(rows: list[Row], count: int) -> list[Row]:
    """Return the rows in the order of their `index`. There must be one for each of `count` inputs."""
    ordered = sorted(rows, key=lambda row: row.index)
    if [row.index for row in ordered] != list(range(count)):
        raise ValueError(f"{len(rows)} rows for {count} inputs, or their places are wrong")
    return ordered


def float_array(rows: Sequence[Any], num_dimensions: int) -> Float32Array:
    """Return lists of numbers of one length as an array. Numbers beyond float32 become infinite."""
    with np.errstate(over="ignore"):
        array = np.array(rows, np.float32)
    if array.ndim != num_dimensions:
        raise ValueError("rows of unequal width, or empty")
    return array


def join_scores(parts: list[Float32Array]) -> Float32Array:
    """Return the scores of all parts, also of no parts."""
    return np.concatenate([np.empty(0, np.float32), *parts])


def join_rankings(parts: list[Ranking]) -> Ranking:
    """Return the ranking of all parts, also of no parts. Of equals those of an earlier part come first."""
    starts = np.cumsum([0, *(len(part.scores_N) for part in parts)])
    places = [part.places_N + start for part, start in zip(parts, starts, strict=False)]
    scores_N, order_N = (join_scores([getattr(part, name) for part in parts]) for name in ("scores_N", "order_N"))
    return Ranking(scores_N, order_N, np.concatenate([np.empty(0, np.int64), *places]))


def ranking_of(rows: Sequence[ScoredRow], count: int) -> Ranking:
    """Return the ranking of rows in the order of another server."""
    scores_N, places_N = scores_of(rows, count), np.empty(count, np.int64)
    places_N[[row.index for row in rows]] = np.arange(count)
    return Ranking(scores_N, scores_N, places_N)


def scores_of(rows: Sequence[ScoredRow], count: int) -> Float32Array:
    """Return the scores of `count` documents in their order. They must be finite."""
    scores_N = float_array([row.score for row in sort_by_index(list(rows), count)], 1)
    if not np.isfinite(scores_N).all():
        raise ValueError("scores that are infinite")
    return scores_N


class _Explanation(msgspec.Struct):
    query_tokens: tuple[str, ...] | None
    document_tokens: tuple[str, ...] | None
    maxima: list[float]
    places: list[int]


class _Score(ScoredRow):
    explanation: _Explanation | None = None
    logit: float | None = None


def read_scores(reply: Reply, count: int) -> Float32Array:
    return scores_of(decode_json(Data[_Score], reply.content).data, count)


def read_ranking(reply: Reply, count: int) -> Ranking:
    """Return the ranking by logits, or by scores where there are no others."""
    rows = sort_by_index(decode_json(Data[_Score], reply.content).data, count)
    scores_N, logits = scores_of(rows, count), [row.logit for row in rows if row.logit is not None]
    order_N = float_array(logits, 1) if len(logits) == count else scores_N
    return Ranking(scores_N, order_N, np.arange(count))


def read_explanations(reply: Reply, count: int) -> list[Explanation]:
    explanations: list[Explanation] = []
    for row in sort_by_index(decode_json(Data[_Score], reply.content).data, count):
        if (each := row.explanation) is None:
            raise ValueError("there is no explanation")
        maxima, places = np.array(each.maxima, np.float32), np.array(each.places, np.int32)
        score = float(np.float32(row.score))
        explanations.append(Explanation(score, each.query_tokens, each.document_tokens, maxima, places))
    return explanations


class _ClassifyResponse(msgspec.Struct):
    labels: tuple[str, ...]
    scores: list[list[float]]
    order: list[list[int]] | None = None


def read_classes(reply: Reply, count: int) -> Classes:
    response = decode_json(_ClassifyResponse, reply.content)
    scores = check_count(response.scores, count)
    classes = classes_of(response.labels, float_array(scores, 2).reshape(count, len(response.labels)))
    if response.order is None:
        return classes
    order_NC = np.array(response.order, np.int64)
    if not np.array_equal(np.sort(order_NC), np.sort(classes.order_NC)):
        raise ValueError("the order of the labels has not each of them once")
    return replace(classes, order_NC=order_NC)


class _TokenClassifyResponse(msgspec.Struct):
    entities: list[list[Entity]]


def read_entities(reply: Reply, count: int) -> list[list[Entity]]:
    entities = check_count(decode_json(_TokenClassifyResponse, reply.content).entities, count)
    return [[replace(each, score=float(np.float32(each.score))) for each in row] for row in entities]


def flatten(parts: list[list[Any]]) -> list[Any]:
    return [each for part in parts for each in part]


def join_classes(parts: list[Classes]) -> Classes:
    """Return the classes of all parts. They must have the same labels."""
    if any(part.labels != parts[0].labels for part in parts):
        raise ValueError("they have other labels")
    scores_NC, order_NC = (np.concatenate([getattr(part, name) for part in parts]) for name in ("scores_NC", "order_NC"))
    return Classes(parts[0].labels, scores_NC, order_NC)


def join_outputs(parts: list[Outputs]) -> Outputs:
    """Return the outputs of all parts. They must have the same ones."""
    if len(parts) == 1:
        return parts[0]
    return Outputs(**{name: _concat([getattr(part, name) for part in parts]) for name in Outputs.__slots__})


def _concat(parts: list[Any]) -> Any:
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
