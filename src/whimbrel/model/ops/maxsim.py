"""MaxSim: for each pair, the sum over query tokens of the greatest similarity to a document token.

Vectors are neither padded nor copied: a padding vector would compete with similarities below 0. Ranges of rows assign tokens to
texts. Sums are float32. A document without tokens scores EMPTY, below all others, as in Sentence Transformers.
Source: Khattab and Zaharia, "ColBERT" (2004.12832), 3.3.

On a GPU `maxsim_device.py` launches all pairs at once. On a CPU, document tokens are computed in tiles that fit into a core's
cache. A tile is first read into it, because products read rows in an order that is slow from memory. A product computes the
similarities of its tokens to those of the queries, and one pass over them updates the maxima of each document. A thread that
waits for Python's lock may lose milliseconds to the scheduler. So all is prepared before the first tile, and a tile takes
three calls. Products run in shapes whose bits agree, so a score has the same bits alone and with any others.

Shapes: Q query tokens, T document tokens, M queries, N documents, P pairs, D width.
"""

from collections.abc import Callable, Iterator
from typing import Final, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.ops.maxsim_device import matches, start_sums
from whimbrel.model.ops.tile_products import find_tile_products
from whimbrel.model.ops.token_vectors import EMPTY, NO_MATCH, TokenVectors
from whimbrel.types.arrays import Float32Array, Int64Array, IntArray
from whimbrel.types.batch import ranges
from whimbrel.types.result import Ragged

Reduce: TypeAlias = Literal["sum", "mean"]
"""Reduction of the maxima of a query's tokens."""

_TILE: Final = 2**19
"""Elements of a tile: 2 MiB."""
_TOKENS: Final = 16
"""Multiple of document tokens in a tile."""
_MAX_BLOCK_TOKENS: Final = 512
"""Limit of tokens of queries that are scored together, because they have the same documents."""
_SLAB: Final = 2**18
"""Limit of document tokens in a part, which bounds the memory."""

_SIGNS: Final = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) * np.float32(2) - 1).astype(np.float32)


def maxsim(
    queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray, *, reduce: Reduce = "sum"
) -> Float32Array:
    """Return the score of each pair (query_P[i], document_P[i]), (P,) on the host. A query without tokens scores 0.

    Raises ValueError if widths differ.
    """
    return start_maxsim(queries, documents, query_P, document_P, reduce=reduce)()


def start_maxsim(
    queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray, *, reduce: Reduce = "sum"
) -> Callable[[], Float32Array]:
    """Launch all pairs on a GPU's current stream, and return a function that waits for their scores; on a CPU, compute them."""
    if queries.width != documents.width:
        raise ValueError(f"query vectors have width {queries.width}, document vectors {documents.width}")
    start = start_sums if queries.rows_TD.is_cuda else _start_on_cpu
    wait_for_sums = start(queries, documents, query_P, document_P)

    def scores() -> Float32Array:
        scores_P = wait_for_sums()
        if reduce == "mean":
            scores_P /= np.maximum(queries.lengths, 1)[query_P]
        scores_P[documents.lengths[document_P] == 0] = EMPTY
        return scores_P

    return scores


def best_matches(queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray) -> Ragged:
    """Return the greatest similarity of each query token, and the index of the first document token that has it.

    (Q, 2) for each pair, on the host; NO_MATCH for a document without tokens. On a CPU, pairs are computed one by one.
    """
    if queries.rows_TD.is_cuda:
        matches_X2 = matches(queries, documents, query_P, document_P)
    else:
        pairs = zip(query_P.tolist(), document_P.tolist(), strict=True)
        found = [_best_matches(queries.of_text(query), documents.of_text(document)) for query, document in pairs]
        matches_X2 = np.concatenate(found) if found else np.empty((0, 2), np.float32)
    return Ragged(matches_X2, np.concatenate(([0], np.cumsum(queries.lengths[query_P]))))


def _best_matches(query_QD: Tensor, document_TD: Tensor) -> Float32Array:
    if not len(document_TD):
        return np.tile(np.array(NO_MATCH, np.float32), (len(query_QD), 1))
    best_Q, token_Q = (query_QD @ document_TD.T).max(dim=1)
    return np.stack((best_Q.numpy(), token_Q.numpy()), axis=1, dtype=np.float32, casting="same_kind")


def _start_on_cpu(
    queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray
) -> Callable[[], Float32Array]:
    scores_P = _maxsim_cpu(queries, documents, query_P, document_P)
    return lambda: scores_P


def _maxsim_cpu(queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray) -> Float32Array:
    """Return the sum of each pair, (P,); 0 if one side has no tokens."""
    scores_P = np.zeros(query_P.size, np.float32)
    for pairs_MN in _parts(queries, documents, query_P, document_P):
        queries_M = query_P[pairs_MN[:, 0]]
        starts_M, ends_M = queries.starts_N[queries_M], queries.ends_N[queries_M]
        maxima_NQ = _maxima(queries.floats(_rows(starts_M, ends_M)), documents, document_P[pairs_MN[0]])
        with np.errstate(all="ignore"):  # the caller checks that scores are finite
            firsts_M = np.cumsum(ends_M - starts_M) - (ends_M - starts_M)
            scores_P[pairs_MN.T] = np.add.reduceat(maxima_NQ, firsts_M, axis=1)
    return scores_P


def _parts(queries: TokenVectors, documents: TokenVectors, query_P: IntArray, document_P: IntArray) -> Iterator[Int64Array]:
    """Yield the pairs with tokens on both sides, (M, N), in parts of about `_SLAB` document tokens."""
    lengths_N, query_lengths_M = documents.lengths, queries.lengths
    pairs_P = np.flatnonzero((lengths_N[document_P] > 0) & (query_lengths_M[query_P] > 0))
    order = np.lexsort((documents.starts_N[document_P[pairs_P]], query_P[pairs_P]))
    pairs_P = pairs_P[order]
    by_query = np.split(pairs_P, np.flatnonzero(np.diff(query_P[pairs_P])) + 1) if pairs_P.size else []
    for group in _group_by_documents(by_query, document_P, query_lengths_M[query_P]):
        pairs_MN = np.stack(group)
        ends_N = np.cumsum(lengths_N[document_P[pairs_MN[0]]])
        cuts = np.searchsorted(ends_N, np.arange(_SLAB, int(ends_N[-1]), _SLAB)) + 1
        yield from np.split(pairs_MN, np.unique(cuts[cuts < ends_N.size]), axis=1)


def _group_by_documents(
    by_query: list[Int64Array], document_P: IntArray, query_length_P: Int64Array
) -> Iterator[list[Int64Array]]:
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


def _maxima(query_QD: Tensor, documents: TokenVectors, documents_N: IntArray) -> Float32Array:
    """Return the greatest similarity of each query token to each document, (N, Q)."""
    starts_N, ends_N = documents.starts_N[documents_N], documents.ends_N[documents_N]
    products = find_tile_products(documents.width).result()
    step = products.num_columns(len(query_QD))
    padded_DQ = F.pad(query_QD, (0, 0, 0, -len(query_QD) % step)).T
    blocks = [padded_DQ[:, start : start + step].contiguous() for start in range(0, padded_DQ.shape[1], step)]
    width = documents.width
    most = max(_TILE // width // _TOKENS, 1) * _TOKENS
    multiple = max((size for size in products.rows[step].sizes if size <= most), default=_TOKENS)
    size = max(most // multiple, 1) * multiple
    rows = _rows(starts_N, ends_N)
    tiles = torch.split(documents.rows_TD[rows] if isinstance(rows, slice) else rows, size)
    document_T = torch.as_tensor(np.repeat(np.arange(documents_N.size), ends_N - starts_N))
    document_tiles = torch.split(document_T[:, None].expand(-1, step), size)
    maxima = [torch.full((documents_N.size, step), -torch.inf, dtype=torch.float32) for _ in blocks]
    least = products.least(step)
    longest = max(least, len(tiles[0]))
    buffer_TD, similarities_TQ = (torch.empty(longest, columns, dtype=torch.float32) for columns in (width, step))
    with np.errstate(all="ignore"):
        for tile, document_TQ in zip(tiles, document_tiles, strict=True):
            x_TD = _read(documents, tile, buffer_TD, least)
            tile_TQ = similarities_TQ if len(x_TD) == longest else similarities_TQ[: len(x_TD)]
            known_TQ = tile_TQ if len(tile) >= least else tile_TQ[: len(tile)]
            for query_DQ, maxima_NQ in zip(blocks, maxima, strict=True):
                products.multiply(x_TD, query_DQ, tile_TQ)
                maxima_NQ.scatter_reduce_(0, document_TQ, known_TQ, "amax")
    return torch.cat(maxima, dim=1).numpy()[:, : len(query_QD)]


def _read(documents: TokenVectors, tile: Tensor, out_TD: Tensor, least: int) -> Tensor:
    """Return a tile of vectors, or of the numbers of rows, read into the cache, as at least `least` rows in float32."""
    x_TD = tile if tile.ndim == 2 else documents.rows_TD.index_select(0, tile)
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


def _rows(starts_N: Int64Array, ends_N: Int64Array) -> slice | Tensor:
    if np.array_equal(starts_N[1:], ends_N[:-1]):
        return slice(int(starts_N[0]), int(ends_N[-1]))
    return torch.as_tensor(ranges(starts_N, ends_N))
