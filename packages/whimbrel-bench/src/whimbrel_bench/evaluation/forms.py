"""Forms of vectors: the arrays that a store keeps of a block of documents, and the scores of all queries. numpy only.

Every score is exact, by products of matrices. A form keeps documents as a store would, in the bytes that it would take, so that
a result is about these and not about float32. Queries stay in float32; only dense bits are compared with bits.

Shapes: Q queries, B documents of a block, D columns, T query tokens, X tokens or entries of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import SetupError
from whimbrel.outputs.muvera import encode_muvera
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.late_interaction import MuveraParameters
from whimbrel.types.request import InputType
from whimbrel.types.result import Ragged, Sparse
from whimbrel.wire.dtypes import to_bits, to_int8
from whimbrel_bench.evaluation.variants import Precision

Vectors: TypeAlias = "Float32Array | Sparse | Ragged"

_NUMBERS: Final = 2**24
"""Numbers of the products that are held at a time, 64 MiB."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to store documents and to score them."""

    store: Callable[[Any], Any]
    """Returns the documents of a block as they are kept: arrays with `nbytes`."""
    score: Callable[[Any], Float32Array]
    """Returns the scores of all queries with documents as they are kept, (Q, B)."""


def normalized(rows_ND: Float32Array) -> Float32Array:
    """Divide rows by their norm, except zeros; in float64, whose squares neither overflow nor underflow."""
    wide_ND = rows_ND.astype(np.float64)
    norms_N1 = np.linalg.norm(wide_ND, axis=1, keepdims=True)
    return (wide_ND / np.where(norms_N1 > 0, norms_N1, 1)).astype(np.float32)


def dense_form(queries_QD: Float32Array, similarity: str, precision: Precision = "float32") -> Form:
    """Return the form of dense vectors. In fewer bits they keep their directions alone: raises SetupError if lengths matter."""
    if precision == "float32":
        return Form(lambda block_BD: block_BD, _comparison(queries_QD, similarity))
    if similarity != "cosine" and not (similarity == "dot" and has_unit_norm(queries_QD)):
        kind = "dot product of vectors of any length" if similarity == "dot" else f"{similarity} distance"
        raise SetupError(f"this model compares by {kind}, and int8-vectors and binary keep no lengths.")
    if precision == "int8":
        cosine = _comparison(queries_QD, "cosine")
        return Form(to_int8, lambda codes: cosine(codes.astype(np.float32)))
    signs_QD = _signs(to_bits(queries_QD), queries_QD.shape[1])
    return Form(to_bits, lambda bits: signs_QD @ _signs(bits, signs_QD.shape[1]).T)


def has_unit_norm(rows_ND: Float32Array) -> bool:
    return bool(np.allclose(np.linalg.norm(rows_ND, axis=1), 1, atol=1e-3))


def _signs(bits: NDArray[np.uint8], width: int) -> Float32Array:
    """Return 1 and -1 for bits. Their product is the width minus twice the Hamming distance."""
    return np.unpackbits(bits, axis=1, count=width).astype(np.float32) * np.float32(2) - np.float32(1)


def _comparison(queries_QD: Float32Array, similarity: str) -> Callable[[Float32Array], Float32Array]:
    """Return the function that scores a block, (Q, B)."""
    if similarity == "cosine":
        unit_QD = normalized(queries_QD)
        return lambda block_BD: unit_QD @ normalized(block_BD).T
    compare = _COMPARE[similarity]
    return lambda block_BD: compare(queries_QD, block_BD)


def _by_distance(distance: Callable[[Float32Array], Float32Array]) -> Callable[[Float32Array, Float32Array], Float32Array]:
    def compare(queries_QD: Float32Array, block_BD: Float32Array) -> Float32Array:
        return np.stack([-distance(block_BD - query_D) for query_D in queries_QD]).astype(np.float32, copy=False)

    return compare


_COMPARE: Final[Mapping[str, Callable[[Float32Array, Float32Array], Float32Array]]] = {
    "dot": lambda a_QD, b_BD: a_QD @ b_BD.T,
    "euclidean": _by_distance(lambda difference_BD: np.sqrt(np.square(difference_BD).sum(axis=1))),
    "manhattan": _by_distance(lambda difference_BD: np.abs(difference_BD).sum(axis=1)),
}


def sparse_form(queries: Sparse) -> Form:
    """Return the form of sparse vectors, compared by dot product."""
    width = int(queries.ids_X.max(initial=-1)) + 1

    def score(block: Sparse) -> Float32Array:
        known_X = block.ids_X < width
        ids_X = np.where(known_X, block.ids_X, 0)
        weights_X = np.where(known_X, block.weights_X, np.float32(0))
        scores_QB = np.zeros((len(queries), len(block)), np.float32)
        step = max(1, _NUMBERS // max(1, ids_X.size, width))
        for start in range(0, len(queries) if width else 0, step):
            rows = range(start, min(start + step, len(queries)))
            spread_qV = np.zeros((len(rows), width), np.float32)
            for row, query in enumerate(rows):
                ids, weights = queries[query]
                spread_qV[row, ids] = weights
            scores_QB[start : rows.stop] = _reduce(np.add, spread_qV[:, ids_X] * weights_X, block.offsets_N1)
        return scores_QB

    return Form(lambda block: block, score)


def late_form(queries: Ragged, similarity: str, precision: Precision = "float32") -> Form:
    """Return the form of token vectors, compared by MaxSim; documents may be in fewer bits, as stored vectors are."""
    store, load = _TOKENS[precision]
    width = queries.rows_XD.shape[1]

    def score(kept: tuple[NDArray[Any], Int64Array]) -> Float32Array:
        rows_XD, offsets_N1 = load(kept[0], width), kept[1]
        scores_QB = np.zeros((len(queries), offsets_N1.size - 1), np.float32)
        for first, end in _spans(queries.offsets_N1, max(1, _NUMBERS // max(1, len(rows_XD)))):
            own_N1 = queries.offsets_N1[first : end + 1]
            products_TX = queries.rows_XD[own_N1[0] : own_N1[-1]] @ rows_XD.T
            maxima_TB = _reduce(np.maximum, products_TX, offsets_N1)
            scores_QB[first:end] = _reduce(np.add, maxima_TB.T, own_N1 - own_N1[0]).T
        if similarity == "meanmaxsim":
            scores_QB /= np.maximum(np.diff(queries.offsets_N1), 1)[:, None].astype(np.float32)
        return scores_QB

    return Form(lambda block: _Kept((store(block.rows_XD), block.offsets_N1)), score)


class _Kept(tuple[NDArray[Any], Int64Array]):
    """Token vectors of documents as they are stored, and the offsets of documents."""

    @property
    def nbytes(self) -> int:
        return self[0].nbytes


def _to_127ths(rows_XD: Float32Array) -> NDArray[np.int8]:
    if np.abs(rows_XD).max(initial=0) > 1 + 1e-3:
        raise SetupError("int8-vectors are for token vectors of norm 1, and this model's are longer.")
    return np.rint(np.clip(rows_XD, -1, 1) * np.float32(127)).astype(np.int8)


_TOKENS: Final[Mapping[str, tuple[Callable[[Any], Any], Callable[[Any, int], Float32Array]]]] = {
    "float32": (lambda rows: rows, lambda rows, _: rows),
    "int8": (_to_127ths, lambda codes, _: codes.astype(np.float32) / np.float32(127)),
    "binary": (to_bits, lambda bits, width: _signs(bits, width) / np.sqrt(np.float32(width))),
}
"""Functions that store token vectors and read them again, as `outputs/stored_vectors.py` has it."""


def muvera_form(queries: Ragged) -> Form:
    """Return the form of one MUVERA encoding in place of token vectors, compared by dot product."""
    form = dense_form(_encodings(queries, "query"), "dot")
    return Form(lambda block: _encodings(block, "document"), form.score)


def _encodings(texts: Ragged, role: InputType) -> Float32Array:
    """Return MUVERA's encodings, (N, E); zeros for a text without token vectors, which has none."""
    parameters, lengths_N = MuveraParameters(), np.diff(texts.offsets_N1)
    found_NE = np.zeros((len(texts), parameters.num_dims), np.float32)
    if texts.rows_XD.size:
        filled = Ragged(texts.rows_XD, np.cumsum([0, *lengths_N[lengths_N > 0]]))
        found_NE[lengths_N > 0] = encode_muvera(filled, parameters, role)
    return found_NE


def _reduce(operation: np.ufunc, values_RX: Float32Array, offsets_N1: Int64Array) -> Float32Array:
    """Return the sum or maximum of each text's columns, (R, N); 0 for a text that has none."""
    is_filled_N = np.diff(offsets_N1) > 0
    result_RN = np.zeros((len(values_RX), offsets_N1.size - 1), np.float32)
    if is_filled_N.any():
        result_RN[:, is_filled_N] = operation.reduceat(values_RX, offsets_N1[:-1][is_filled_N], axis=1)
    return result_RN


def _spans(offsets_N1: Int64Array, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of texts with at most `most` tokens together, at least one text each."""
    first, count = 0, offsets_N1.size - 1
    while first < count:
        fitting = int(np.searchsorted(offsets_N1, int(offsets_N1[first]) + most, side="right")) - 1
        end = min(max(fitting, first + 1), count)
        yield first, end
        first = end
