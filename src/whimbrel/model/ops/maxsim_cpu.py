"""MaxSim on a CPU: tiles of document tokens that fit into a core's cache, cut wherever they end.

A tile is brought into the cache first, as the order in which products read rows is slow from memory: float32 is read once,
other types are converted on their way. A product gives the similarities of its tokens to those of the queries, and one pass
over them the maxima of each document, with which the next tile goes on. Several threads take tiles from one another until
there are none, each with maxima of its own, of which the greatest count.

Threads share Python's lock, and one that waits for it may lose milliseconds to the scheduler: all that can be made before the
first tile is made by one thread, and a tile is three calls.

A similarity has the same bits in any company: products run in shapes that agree, which are found for each width.

Shapes: as in maxsim.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial, reduce
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from whimbrel.model.ops.tile_products import TileProducts, find_tile_products
from whimbrel.model.ops.token_vectors import TokenVectors
from whimbrel.types.arrays import Float32Array, Int64Array, ranges

_TILE: Final = 2**19
"""Numbers in a tile: two megabytes."""
_TOKENS: Final = 16
_MAX_BLOCK_TOKENS: Final = 512
"""Queries that have the same documents are scored together up to so many tokens."""
_SLAB: Final = 2**18
"""So many document tokens at a time: what is kept of them does not grow with their number."""
_MANY: Final = 16
"""From so many parts for each thread on, a part is left to one thread."""


_SIGNS: Final = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) * np.float32(2) - 1).astype(np.float32)
"""What the eight bits of a byte stand for."""


def maxsim_cpu(
    queries: TokenVectors,
    documents: TokenVectors,
    query_P: NDArray[np.integer],
    document_P: NDArray[np.integer],
    *,
    threads: Executor | None,
    num_threads: int,
) -> Float32Array:
    """The sum of each pair; 0 where one side has no tokens."""
    scores_P = np.zeros(query_P.size, np.float32)
    parts = list(_parts(queries, documents, query_P, document_P))
    score = partial(_score, queries, documents, scores_P)
    if threads is not None and len(parts) >= _MANY * num_threads:
        for _ in threads.map(score, parts):
            pass
    else:
        for part in parts:
            score(part, threads=threads, num_threads=num_threads)
    return scores_P


@dataclass(frozen=True, slots=True, eq=False)
class _PairTile:
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
) -> Iterator[_PairTile]:
    """The pairs whose document has tokens, in parts of about `_SLAB` document tokens."""
    lengths_N, query_lengths_M = documents.lengths, queries.lengths
    places_P = np.flatnonzero((lengths_N[document_P] > 0) & (query_lengths_M[query_P] > 0))
    order = np.lexsort((documents.starts_N[document_P[places_P]], query_P[places_P]))
    places_P = places_P[order]
    by_query = np.split(places_P, np.flatnonzero(np.diff(query_P[places_P])) + 1) if places_P.size else []
    for group in _alike(by_query, document_P, query_lengths_M[query_P]):
        places_MN = np.stack(group)
        documents_N = document_P[places_MN[0]]
        ends_N = np.cumsum(lengths_N[documents_N])
        cuts = np.searchsorted(ends_N, np.arange(_SLAB, int(ends_N[-1]), _SLAB)) + 1
        for places in np.split(places_MN, np.unique(cuts[cuts < documents_N.size]), axis=1):
            yield _PairTile(query_P[places[:, 0]].astype(np.int64), document_P[places[0]].astype(np.int64), places)


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


def _score(
    queries: TokenVectors,
    documents: TokenVectors,
    scores_P: Float32Array,
    part: _PairTile,
    *,
    threads: Executor | None = None,
    num_threads: int = 1,
) -> None:
    """Write the scores of a part."""
    starts_M, ends_M = queries.starts_N[part.queries_M], queries.ends_N[part.queries_M]
    meeting = _PairProducts.of(queries.floats(_rows(starts_M, ends_M)), documents, part.documents_N)
    left = iter(meeting.tiles)
    num_threads = min(num_threads, len(meeting.tiles))
    if threads is None or num_threads == 1:
        maxima_NQ = meeting.maxima(left)
    else:
        maxima_NQ = reduce(np.maximum, threads.map(meeting.maxima, [left] * num_threads))
    with np.errstate(all="ignore"):  # numpy would warn of what is not finite; who asks looks at the scores
        scores_P[part.places_MN.T] = np.add.reduceat(maxima_NQ, _begins(ends_M - starts_M), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """Some document tokens, one after another."""

    rows_TD: Tensor
    """Their vectors where those lie one after another, else which they are: (T,)."""
    scales_T: Tensor | None
    document_TQ: Tensor
    """Whose they are."""


@dataclass(frozen=True, slots=True, eq=False)
class _PairProducts:
    """The tokens of some queries and of some documents, none of which is empty."""

    products: TileProducts
    blocks: list[Tensor]
    """Of the queries: (D, Q) each."""
    num_query_tokens: int
    documents: TokenVectors
    num_documents: int
    tiles: list[_Tile]

    @classmethod
    def of(cls, query_QD: Tensor, documents: TokenVectors, documents_N: Int64Array) -> _PairProducts:
        starts_N, ends_N = documents.starts_N[documents_N], documents.ends_N[documents_N]
        products = find_tile_products(documents.width).result()
        blocks = _blocks(query_QD, products)
        most = _tile_size(documents.width)
        multiple = max((size for size in products.rows[blocks[0].shape[1]].sizes if size <= most), default=_TOKENS)
        size = max(most // multiple, 1) * multiple
        document_T = _tensor(np.repeat(np.arange(documents_N.size), ends_N - starts_N))
        document_TQ = document_T[:, None].expand(-1, blocks[0].shape[1])
        rows = _rows(starts_N, ends_N)
        rows_TD = documents.rows_TD[rows] if isinstance(rows, slice) else rows
        scales_T = [None] * -(-len(rows_TD) // size) if documents.scales_T is None else _split(documents.scales_T[rows], size)
        tiles = list(map(_Tile, _split(rows_TD, size), scales_T, _split(document_TQ, size)))
        return cls(products, blocks, len(query_QD), documents, documents_N.size, tiles)

    def maxima(self, left: Iterator[_Tile]) -> Float32Array:
        """The greatest similarity of each query token to a document's, in the tiles that this thread takes: (N, Q)."""
        width, step = self.blocks[0].shape
        maxima = [torch.full((self.num_documents, step), -torch.inf, dtype=torch.float32) for _ in self.blocks]
        least = self.products.least(step)
        size = max(least, len(self.tiles[0].document_TQ))
        buffer_TD, similarities_TQ = torch.empty(size, width, dtype=torch.float32), torch.empty(size, step, dtype=torch.float32)
        with np.errstate(all="ignore"):
            for tile in left:
                x_TD = self._read(tile, buffer_TD, least)
                count = len(tile.document_TQ)
                for query_DQ, maxima_NQ in zip(self.blocks, maxima, strict=True):
                    found_TQ = similarities_TQ if len(x_TD) == size else similarities_TQ[: len(x_TD)]
                    self.products.multiply(x_TD, query_DQ, found_TQ)
                    if count < least:
                        found_TQ = found_TQ[:count]
                    if tile.scales_T is not None:
                        found_TQ *= tile.scales_T[:, None]
                    maxima_NQ.scatter_reduce_(0, tile.document_TQ, found_TQ, "amax")
        return torch.cat(maxima, dim=1).numpy()[:, : self.num_query_tokens]

    def _read(self, tile: _Tile, out_TD: Tensor, least: int) -> Tensor:
        """A tile in the cache, float32 and without its scales; at least `least` rows."""
        x_TD = tile.rows_TD if tile.rows_TD.ndim == 2 else self.documents.rows_TD.index_select(0, tile.rows_TD)
        count = len(x_TD)
        if x_TD.dtype == torch.float32 and count >= least and x_TD.is_contiguous():
            x_TD.sum()  # reads them
            return x_TD
        if x_TD.dtype == torch.uint8:
            np.take(_SIGNS, x_TD.numpy(), axis=0, out=out_TD[:count].numpy().reshape(count, -1, 8), mode="clip")
        else:
            out_TD[:count] = x_TD
        out_TD[count:least] = 0
        return out_TD[: max(count, least)]


def _blocks(query_QD: Tensor, products: TileProducts) -> list[Tensor]:
    """Query tokens in as few blocks as can be, all of them as wide, with zeros at the end."""
    step = products.num_columns(len(query_QD))
    query_DQ = F.pad(query_QD, (0, 0, 0, -len(query_QD) % step)).T
    return [query_DQ[:, start : start + step].contiguous() for start in range(0, query_DQ.shape[1], step)]


def _tile_size(width: int) -> int:
    return max(_TILE // width // _TOKENS, 1) * _TOKENS


def _split(rows: Tensor, size: int) -> list[Tensor]:
    return list(rows.split(size))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _rows(starts_N: Int64Array, ends_N: Int64Array) -> slice | Tensor:
    """The rows of several texts: a slice if they lie one after another."""
    if np.array_equal(starts_N[1:], ends_N[:-1]):
        return slice(int(starts_N[0]), int(ends_N[-1]))
    return _tensor(ranges(starts_N, ends_N))


def _begins(lengths_N: Int64Array) -> Int64Array:
    return np.cumsum(lengths_N) - lengths_N


def _tensor(array: Int64Array) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
