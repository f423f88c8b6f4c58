"""MaxSim over flat token vectors: for each pair, the sum over query tokens of the best match among the document's tokens.

Nothing is padded and no document is copied: a vector that is not there would compete with similarities below 0. Which tokens
are whose is said by ranges of rows, so that documents may lie anywhere in a larger store. Sums are float32, whatever the
vectors are. A document without tokens scores EMPTY, below all others, as in Sentence Transformers.

- CPU: tiles of about a thousand tokens, small enough for the cache of a core, cut wherever they end. A matrix product gives
  the similarities of a tile, and one pass along them the maximum of each piece of a document in it. From `_QUERY_TOKENS` by
  `_MIN_TOKENS` on a product has the same bits in any shape, so a score does not depend on what it is computed with.
- GPU: a Triton kernel (maxsim_triton.py).

`maxsim_reference` is the plain formula that both are tested against. Source of the formula: Khattab and Zaharia,
"ColBERT" (2004.12832), 3.3.

Shapes: Q query tokens, T document tokens, M queries, N documents, P pairs, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from whimbrel.outputs import ranges
from whimbrel.types import Float32Array, Int64Array

EMPTY: Final = -1e9
"""The score of a document without tokens: finite, and below what vectors can reach."""

Reduce: TypeAlias = Literal["sum", "mean"]
"""What becomes of the maxima of a query's tokens."""

_TILE: Final = 1024
_QUERY_TOKENS: Final = 4
_MIN_TOKENS: Final = 16
_MAX_QUERY_TOKENS: Final = 64
"""So many meet a tile at a time: their similarities stay in the cache with it."""
_MAX_BLOCK_TOKENS: Final = 512
"""Queries that have the same documents are scored together up to so many tokens."""
_SLAB: Final = 64 * _TILE
"""So many document tokens at a time: what is kept of them does not grow with their number."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenVectors:
    """Vectors of many texts in one array: text i has rows starts_N[i] to ends_N[i]."""

    rows_TD: Tensor
    """float32, float16, bfloat16; int8; or uint8, which is bits: 8 columns to a byte, the first the highest, 1 for 1 and 0 for
    -1."""
    starts_N: Int64Array
    ends_N: Int64Array
    scales_T: Tensor | None = None
    """What each row is multiplied by."""

    @classmethod
    def of(cls, rows_TD: Tensor, offsets_N1: NDArray[np.integer], scales_T: Tensor | None = None) -> TokenVectors:
        """Of texts that lie one after another."""
        offsets = np.asarray(offsets_N1, np.int64)
        return cls(rows_TD, offsets[:-1], offsets[1:], scales_T)

    @classmethod
    def from_array(cls, rows_TD: NDArray[Any], starts_N: NDArray[np.integer], ends_N: NDArray[np.integer]) -> TokenVectors:
        """Of rows on the host, which are not copied."""
        return cls(torch.from_numpy(rows_TD), np.asarray(starts_N, np.int64), np.asarray(ends_N, np.int64))  # pyright: ignore[reportUnknownMemberType]

    def __len__(self) -> int:
        return self.starts_N.size

    @property
    def width(self) -> int:
        return self.rows_TD.shape[1] * (8 if self.rows_TD.dtype == torch.uint8 else 1)

    @property
    def lengths(self) -> Int64Array:
        return self.ends_N - self.starts_N

    def floats(self, rows: slice | Tensor) -> Tensor:
        """Some rows, float32."""
        x_TD = self.rows_TD[rows]
        x_TD = _signs(x_TD) if x_TD.dtype == torch.uint8 else x_TD.float()
        return x_TD if self.scales_T is None else x_TD * self.scales_T[rows, None]


def maxsim(
    queries: TokenVectors,
    documents: TokenVectors,
    query_P: NDArray[np.integer],
    document_P: NDArray[np.integer],
    *,
    reduce: Reduce = "sum",
    threads: Executor | None = None,
    num_threads: int = 1,
) -> Float32Array:
    """The score of each pair (query_P[i], document_P[i]), on the host: (P,). A query without tokens scores 0.

    On a CPU `threads` run the parts, about `num_threads` at a time; the bits are the same with any number. Raises ValueError if
    widths differ.
    """
    if queries.width != documents.width:
        raise ValueError(f"query vectors have width {queries.width}, document vectors {documents.width}")
    if queries.rows_TD.is_cuda:
        from whimbrel.ops.maxsim_triton import maxsim_triton

        scores_P = maxsim_triton(queries, documents, query_P, document_P)
    else:
        scores_P = np.zeros(query_P.size, np.float32)
        parts = list(_parts(queries, documents, query_P, document_P, num_threads))
        run = partial(_score, queries, documents, scores_P)
        for _ in map(run, parts) if threads is None or len(parts) == 1 else threads.map(run, parts):
            pass
    if reduce == "mean":
        scores_P /= np.maximum(queries.lengths, 1)[query_P]
    scores_P[documents.lengths[document_P] == 0] = EMPTY
    return scores_P


def maxsim_reference(query_QD: Tensor, document_TD: Tensor) -> float:
    """The formula for one pair, in float64."""
    if not len(document_TD):
        return EMPTY
    return (query_QD.double() @ document_TD.double().T).amax(dim=1).sum().item()


def best_matches(queries: TokenVectors, documents: TokenVectors, query: int, document: int) -> tuple[Float32Array, Int64Array]:
    """For each token of a query its greatest similarity, and the first token of a document that has it, from 0 on: (Q,) each.

    Of a document without tokens 0 and -1. One pair at a time: this is for explanations."""
    query_QD, document_TD = (
        vectors.floats(slice(int(vectors.starts_N[i]), int(vectors.ends_N[i])))
        for vectors, i in ((queries, query), (documents, document))
    )
    if not len(document_TD):
        return np.zeros(len(query_QD), np.float32), np.full(len(query_QD), -1)
    best_Q, where_Q = (query_QD @ document_TD.T).cpu().max(dim=1)
    return best_Q.numpy(), where_Q.numpy()


# On a CPU


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Queries, each of which meets each of some documents."""

    queries_M: Int64Array
    documents_N: Int64Array
    places_MN: Int64Array
    """Which pair each is."""


def _parts(
    queries: TokenVectors,
    documents: TokenVectors,
    query_P: NDArray[np.integer],
    document_P: NDArray[np.integer],
    num_threads: int,
) -> Iterator[_Part]:
    """The pairs whose document has tokens, in parts of some thousand document tokens."""
    lengths_N, query_lengths_M = documents.lengths, queries.lengths
    places_P = np.flatnonzero((lengths_N[document_P] > 0) & (query_lengths_M[query_P] > 0))
    order = np.lexsort((documents.starts_N[document_P[places_P]], query_P[places_P]))
    places_P = places_P[order]
    by_query = np.split(places_P, np.flatnonzero(np.diff(query_P[places_P])) + 1) if places_P.size else []
    total = int(lengths_N[document_P[places_P]].sum())
    slab = min(_SLAB, max(_TILE, -(-total // (4 * num_threads))))
    for group in _alike(by_query, document_P, query_lengths_M[query_P]):
        places_MN = np.stack(group)
        documents_N = document_P[places_MN[0]]
        ends_N = np.cumsum(lengths_N[documents_N])
        cuts = np.searchsorted(ends_N, np.arange(slab, int(ends_N[-1]), slab)) + 1
        for places in np.split(places_MN, np.unique(cuts[cuts < documents_N.size]), axis=1):
            yield _Part(query_P[places[:, 0]].astype(np.int64), document_P[places[0]].astype(np.int64), places)


def _alike(
    by_query: list[Int64Array], document_P: NDArray[np.integer], query_length_P: Int64Array
) -> Iterator[list[Int64Array]]:
    """Runs of queries that have the same documents."""
    group: list[Int64Array] = []
    num_tokens = 0
    for places in by_query:
        length = int(query_length_P[places[0]])
        same = group and np.array_equal(document_P[places], document_P[group[0]])
        if group and (not same or num_tokens + length > _MAX_BLOCK_TOKENS):
            yield group
            group, num_tokens = [], 0
        group.append(places)
        num_tokens += length
    if group:
        yield group


def _score(queries: TokenVectors, documents: TokenVectors, scores_P: Float32Array, part: _Part) -> None:
    """Write the scores of a part."""
    starts_M, ends_M = queries.starts_N[part.queries_M], queries.ends_N[part.queries_M]
    query_QD = queries.floats(_rows(starts_M, ends_M))
    num_tokens = query_QD.shape[0]
    query_QD = F.pad(query_QD, (0, 0, 0, -num_tokens % _QUERY_TOKENS))
    maxima_QN = _maxima(query_QD, documents, documents.starts_N[part.documents_N], documents.ends_N[part.documents_N])
    scores_P[part.places_MN] = np.add.reduceat(maxima_QN[:num_tokens], _begins(ends_M - starts_M), axis=0)


def _maxima(query_QD: Tensor, documents: TokenVectors, starts_N: Int64Array, ends_N: Int64Array) -> Float32Array:
    """The greatest similarity of each query token to a token of each document, none of which is empty: (Q, N)."""
    rows = _rows(starts_N, ends_N)
    first_N = _begins(ends_N - starts_N)
    num_tokens = int((ends_N - starts_N).sum())
    tiles = np.arange(0, num_tokens, _TILE)
    cuts_X = np.union1d(first_N, tiles)
    """Where a document or a tile begins."""
    maxima_QX = np.empty((query_QD.shape[0], cuts_X.size), np.float32)
    cuts: list[int] = [*np.searchsorted(cuts_X, tiles).tolist(), cuts_X.size]
    buffer = torch.empty(_MAX_QUERY_TOKENS * _TILE)
    for (first, last), start in zip(pairwise(cuts), tiles.tolist(), strict=True):
        end = min(start + _TILE, num_tokens)
        x_TD = documents.floats(_part_of(rows, start, end))
        if end - start < _MIN_TOKENS:
            x_TD = F.pad(x_TD, (0, 0, 0, _MIN_TOKENS - (end - start)))
        for q in range(0, query_QD.shape[0], _MAX_QUERY_TOKENS):
            some_QD = query_QD[q : q + _MAX_QUERY_TOKENS]
            shape = (some_QD.shape[0], x_TD.shape[0])
            similarities_QT = torch.mm(some_QD, x_TD.T, out=buffer[: shape[0] * shape[1]].view(shape))
            np.maximum.reduceat(
                similarities_QT.numpy()[:, : end - start],
                cuts_X[first:last] - start,
                axis=1,
                out=maxima_QX[q : q + _MAX_QUERY_TOKENS, first:last],
            )
    return np.maximum.reduceat(maxima_QX, np.searchsorted(cuts_X, first_N), axis=1)


def _rows(starts_N: Int64Array, ends_N: Int64Array) -> slice | Tensor:
    """The rows of several texts: a slice if they lie one after another."""
    if np.array_equal(starts_N[1:], ends_N[:-1]):
        return slice(int(starts_N[0]), int(ends_N[-1]))
    return torch.from_numpy(ranges(starts_N, ends_N))  # pyright: ignore[reportUnknownMemberType]


def _part_of(rows: slice | Tensor, start: int, end: int) -> slice | Tensor:
    return slice(rows.start + start, rows.start + end) if isinstance(rows, slice) else rows[start:end]


def _begins(lengths_N: Int64Array) -> Int64Array:
    return np.cumsum(lengths_N) - lengths_N


def _signs(bits_TB: Tensor) -> Tensor:
    """Packed bits -> 1 and -1, float32."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits_TB.device)
    bits = (bits_TB[..., None] >> shifts) & 1
    return bits.flatten(-2).float() * 2 - 1
