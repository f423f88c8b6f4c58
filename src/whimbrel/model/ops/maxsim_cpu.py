"""MaxSim on a CPU, in tiles of document tokens that fit into a core's cache.

A tile is first read into the cache, because products read rows in an order that is slow from memory. float32 is read once;
other types are converted on the way. A product computes the similarities of its tokens to those of the queries. One pass over
them updates the maxima of each document, also across tiles. Several threads share the tiles; each has its own maxima, of which
the greatest count.

Threads share Python's lock, and a thread that waits for it may lose milliseconds to the scheduler. So one thread prepares
everything before the first tile, and a tile takes three calls.

A similarity has the same bits in any batch: products run in shapes whose bits agree, found for each width.

Shapes: Q query tokens, T document tokens, M queries, N documents, P pairs, D width.
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
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.batch import ranges

_TILE: Final = 2**19
"""Elements of a tile: 2 MiB."""
_TOKENS: Final = 16
"""Multiple of document tokens in a tile."""
_MAX_BLOCK_TOKENS: Final = 512
"""Limit of tokens of queries that are scored together, because they have the same documents."""
_SLAB: Final = 2**18
"""Limit of document tokens in a part, which bounds the memory."""
_MANY: Final = 16
"""Number of parts per thread from which each part runs in one thread."""


_SIGNS: Final = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) * np.float32(2) - 1).astype(np.float32)
"""Signs of the eight bits of a byte."""


def maxsim_cpu(
    queries: TokenVectors,
    documents: TokenVectors,
    query_P: NDArray[np.integer],
    document_P: NDArray[np.integer],
    *,
    threads: Executor | None,
    num_threads: int,
) -> Float32Array:
    """Return the sum of each pair, (P,); 0 if one side has no tokens."""
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
    """Queries and documents that are all paired with each other."""

    queries_M: Int64Array
    documents_N: Int64Array
    pairs_MN: Int64Array
    """Index of each pair."""


def _parts(
    queries: TokenVectors,
    documents: TokenVectors,
    query_P: NDArray[np.integer],
    document_P: NDArray[np.integer],
) -> Iterator[_PairTile]:
    """Yield the pairs with tokens on both sides, in parts of about `_SLAB` document tokens."""
    lengths_N, query_lengths_M = documents.lengths, queries.lengths
    pairs_P = np.flatnonzero((lengths_N[document_P] > 0) & (query_lengths_M[query_P] > 0))
    order = np.lexsort((documents.starts_N[document_P[pairs_P]], query_P[pairs_P]))
    pairs_P = pairs_P[order]
    by_query = np.split(pairs_P, np.flatnonzero(np.diff(query_P[pairs_P])) + 1) if pairs_P.size else []
    for group in _group_by_documents(by_query, document_P, query_lengths_M[query_P]):
        pairs_MN = np.stack(group)
        documents_N = document_P[pairs_MN[0]]
        ends_N = np.cumsum(lengths_N[documents_N])
        cuts = np.searchsorted(ends_N, np.arange(_SLAB, int(ends_N[-1]), _SLAB)) + 1
        for part_MN in np.split(pairs_MN, np.unique(cuts[cuts < documents_N.size]), axis=1):
            yield _PairTile(query_P[part_MN[:, 0]].astype(np.int64), document_P[part_MN[0]].astype(np.int64), part_MN)


def _group_by_documents(
    by_query: list[Int64Array], document_P: NDArray[np.integer], query_length_P: Int64Array
) -> Iterator[list[Int64Array]]:
    """Yield groups of consecutive queries that have the same documents."""
    group: list[Int64Array] = []
    num_tokens = 0
    for pairs in by_query:
        length = int(query_length_P[pairs[0]])
        same = group and np.array_equal(document_P[pairs], document_P[group[0]])
        if group and (not same or num_tokens + length > _MAX_BLOCK_TOKENS):
            yield group
            group, num_tokens = [], 0
        group.append(pairs)
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
    """Compute the scores of a part."""
    starts_M, ends_M = queries.starts_N[part.queries_M], queries.ends_N[part.queries_M]
    products = _PairProducts.of(queries.floats(_rows(starts_M, ends_M)), documents, part.documents_N)
    tiles = iter(products.tiles)
    num_threads = min(num_threads, len(products.tiles))
    if threads is None or num_threads == 1:
        maxima_NQ = products.maxima(tiles)
    else:
        maxima_NQ = reduce(np.maximum, threads.map(products.maxima, [tiles] * num_threads))
    with np.errstate(all="ignore"):  # the caller checks that scores are finite
        scores_P[part.pairs_MN.T] = np.add.reduceat(maxima_NQ, _begins(ends_M - starts_M), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """Consecutive document tokens."""

    rows_TD: Tensor
    """Vectors of the tokens (T, D) if they are contiguous, else their rows (T,)."""
    scales_T: Tensor | None
    document_TQ: Tensor
    """Document of each token."""


@dataclass(frozen=True, slots=True, eq=False)
class _PairProducts:
    """Products of the tokens of some queries and documents, none of which is empty."""

    products: TileProducts
    blocks: list[Tensor]
    """Query tokens in blocks, (D, Q) each."""
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

    def maxima(self, tiles: Iterator[_Tile]) -> Float32Array:
        """Return the greatest similarity of each query token to each document in the tiles that this thread takes, (N, Q)."""
        width, step = self.blocks[0].shape
        maxima = [torch.full((self.num_documents, step), -torch.inf, dtype=torch.float32) for _ in self.blocks]
        least = self.products.least(step)
        size = max(least, len(self.tiles[0].document_TQ))
        buffer_TD, similarities_TQ = torch.empty(size, width, dtype=torch.float32), torch.empty(size, step, dtype=torch.float32)
        with np.errstate(all="ignore"):
            for tile in tiles:
                x_TD = self._read(tile, buffer_TD, least)
                count = len(tile.document_TQ)
                for query_DQ, maxima_NQ in zip(self.blocks, maxima, strict=True):
                    tile_TQ = similarities_TQ if len(x_TD) == size else similarities_TQ[: len(x_TD)]
                    self.products.multiply(x_TD, query_DQ, tile_TQ)
                    if count < least:
                        tile_TQ = tile_TQ[:count]
                    if tile.scales_T is not None:
                        tile_TQ *= tile.scales_T[:, None]
                    maxima_NQ.scatter_reduce_(0, tile.document_TQ, tile_TQ, "amax")
        return torch.cat(maxima, dim=1).numpy()[:, : self.num_query_tokens]

    def _read(self, tile: _Tile, out_TD: Tensor, least: int) -> Tensor:
        """Return a tile, read into the cache, as float32 without its scales, with at least `least` rows."""
        x_TD = tile.rows_TD if tile.rows_TD.ndim == 2 else self.documents.rows_TD.index_select(0, tile.rows_TD)
        count = len(x_TD)
        if x_TD.dtype == torch.float32 and count >= least and x_TD.is_contiguous():
            x_TD.sum()  # reads it into the cache
            return x_TD
        if x_TD.dtype == torch.uint8:
            np.take(_SIGNS, x_TD.numpy(), axis=0, out=out_TD[:count].numpy().reshape(count, -1, 8), mode="clip")
        else:
            out_TD[:count] = x_TD
        out_TD[count:least] = 0
        return out_TD[: max(count, least)]


def _blocks(query_QD: Tensor, products: TileProducts) -> list[Tensor]:
    """Split query tokens into the fewest blocks of equal width, padded with zeros."""
    step = products.num_columns(len(query_QD))
    query_DQ = F.pad(query_QD, (0, 0, 0, -len(query_QD) % step)).T
    return [query_DQ[:, start : start + step].contiguous() for start in range(0, query_DQ.shape[1], step)]


def _tile_size(width: int) -> int:
    return max(_TILE // width // _TOKENS, 1) * _TOKENS


def _split(rows: Tensor, size: int) -> list[Tensor]:
    return list(rows.split(size))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _rows(starts_N: Int64Array, ends_N: Int64Array) -> slice | Tensor:
    """Return the rows of several texts, as a slice if they are contiguous."""
    if np.array_equal(starts_N[1:], ends_N[:-1]):
        return slice(int(starts_N[0]), int(ends_N[-1]))
    return _tensor(ranges(starts_N, ends_N))


def _begins(lengths_N: Int64Array) -> Int64Array:
    return np.cumsum(lengths_N) - lengths_N


def _tensor(array: Int64Array) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
