"""A request for the scores of many pairs, for several engines: each gets a share of the documents. numpy only.

Where engines keep documents' vectors (document_cache.py), a document always goes to the same one; else shares are about equal
in tokens. Every engine computes the queries of its share.

Shapes: P pairs of a request, S pairs of a share, N texts of a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from whimbrel.engine.prepared import EngineRequest
from whimbrel.errors import Location, WhimbrelError
from whimbrel.outputs.layout import plan_layout
from whimbrel.outputs.merge import ChunkMerge
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.stored_vectors import StoredVectors, entry_bounds
from whimbrel.types.arrays import Int32Array, Int64Array, ranges
from whimbrel.types.card import Card
from whimbrel.types.result import Outputs, Ragged

_ROWS_PER_TOKEN: Final = 64
"""So many vectors that are there cost what a token to compute costs, about."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A part of a request that is a request of its own."""

    request: EngineRequest
    pairs_S: Int64Array
    """Which of the request's pairs it scores."""
    engine: int | None
    """Which engine keeps its documents; None: any."""

    def map_error_location(self, error: WhimbrelError) -> WhimbrelError:
        """An error of the share, as one of the request."""

        def locate(location: Location) -> Location:
            pair = location.item
            return location if pair is None else Location("input", int(self.pairs_S[pair]), location.part)

        return error.relocated(locate)


def split_into_shards(prepared: EngineRequest, card: Card, num_engines: int, *, least_tokens: int, fixed: bool) -> list[Shard]:
    """The request in shares of at least `least_tokens`, at most one for each engine; none: it stays whole.

    `fixed`: each document that is compared by token vectors has an engine of its own."""
    if num_engines < 2 or not _can_be_shared(prepared):
        return []
    documents_P, tokens_N, key_N = _documents(prepared)
    fixed = fixed and prepared.pair_scoring is not None and prepared.pair_scoring.output == "multi_vector"
    if fixed:
        engine_N = key_N % num_engines
    else:
        count = min(num_engines, int(tokens_N.sum() // max(1, least_tokens)))
        if count < 2:
            return []
        middle_N = np.cumsum(tokens_N) - tokens_N / 2
        engine_N = (middle_N * count / tokens_N.sum()).astype(np.int64)
    engine_P = engine_N[documents_P]
    chosen = [(engine, np.flatnonzero(engine_P == engine)) for engine in np.unique(engine_P).tolist()]
    if len(chosen) == 1:
        return [Shard(prepared, np.arange(engine_P.size), chosen[0][0])] if fixed else []
    return [Shard(_part(prepared, card, pairs), pairs, engine if fixed else None) for engine, pairs in chosen]


def merge_shards(outputs: Sequence[Outputs], given: Sequence[Shard]) -> Outputs:
    """The scores of all shares, in the order of the request's pairs."""
    num_pairs = sum(share.pairs_S.size for share in given)
    first = outputs[0].scores
    assert first is not None
    scores_PC = np.empty((num_pairs, first.shape[1]), np.float32)
    for each, share in zip(outputs, given, strict=True):
        scores_PC[share.pairs_S] = each.scores
    return Outputs(scores=scores_PC, token_matches=_joined_matches(outputs, given, num_pairs))


def _can_be_shared(prepared: EngineRequest) -> bool:
    """Whether it asks for nothing but scores of pairs, or of texts."""
    if prepared.pair_scoring is not None:
        return bool(prepared.pair_scoring.num_pairs)
    return (
        list(prepared.layout.by_name) == ["scores"]
        and not isinstance(prepared.merge, ChunkMerge)
        and prepared.token_offsets is None
    )


def _documents(prepared: EngineRequest) -> tuple[Int64Array, NDArray[np.float64], Int64Array]:
    """(which document each pair has, what each costs, a number that is its own): each text of a request without comparison."""
    tokens = np.array([seq.ids.size for seq in prepared.seqs], np.float64)
    keys = np.array([crc32(seq.ids.tobytes()) for seq in prepared.seqs], np.int64)
    comparison = prepared.pair_scoring
    if comparison is None:
        return np.arange(tokens.size), tokens, keys
    rows = [np.diff(given.offsets_N1) / _ROWS_PER_TOKEN for given in comparison.stored]
    tokens = np.concatenate([tokens, *rows])
    keys = np.concatenate([keys, np.arange(len(keys), tokens.size)])
    numbers_N, documents_P = np.unique(comparison.documents_P, return_inverse=True)
    return documents_P, tokens[numbers_N], keys[numbers_N]


def _part(prepared: EngineRequest, card: Card, pairs_S: Int64Array) -> EngineRequest:
    """The request for some of its pairs."""
    comparison, seqs = prepared.pair_scoring, prepared.seqs
    if comparison is None:
        chosen_N, given = pairs_S, None
    else:
        texts_N = np.unique(np.concatenate((comparison.queries_P[pairs_S], comparison.documents_P[pairs_S])))
        chosen_N = texts_N[texts_N < len(seqs)]
        number = np.full(int(texts_N[-1]) + 1, -1, np.int32)
        number[texts_N] = np.arange(texts_N.size, dtype=np.int32)
        given = _comparison_of(comparison, pairs_S, number, texts_N, len(seqs))
    chosen = [replace(seqs[old], index=new) for new, old in enumerate(cast(list[int], chosen_N.tolist()))]
    return replace(
        prepared,
        seqs=chosen,
        layout=plan_layout(card.tower(chosen[0].tower if chosen else 0), chosen, prepared.layout.specs),
        num_tokens=sum(seq.ids.size for seq in chosen),
        num_truncated=sum(seq.truncated for seq in chosen),
        pair_scoring=given,
        merge=None,
        pair_tokens=None,
    )


def _comparison_of(
    comparison: PairScoring, pairs_S: Int64Array, number: Int32Array, texts_N: NDArray[np.integer], num_seqs: int
) -> PairScoring:
    given: list[StoredVectors] = []
    for first, block in zip(entry_bounds(comparison.stored, num_seqs)[:-1].tolist(), comparison.stored, strict=True):
        own = texts_N[(texts_N >= first) & (texts_N < first + len(block))] - first
        if own.size:
            given.append(_some(block, own))
    return replace(
        comparison,
        queries_P=number[comparison.queries_P[pairs_S]],
        documents_P=number[comparison.documents_P[pairs_S]],
        stored=tuple(given),
    )


def _some(block: StoredVectors, texts_N: NDArray[np.integer]) -> StoredVectors:
    """Some of the texts, in their order."""
    starts, ends = block.offsets_N1[texts_N], block.offsets_N1[texts_N + 1]
    rows: Any = slice(int(starts[0]), int(ends[-1])) if np.array_equal(starts[1:], ends[:-1]) else ranges(starts, ends)
    ids = None if block.ids_X is None else block.ids_X[rows]
    return StoredVectors(block.rows_XD[rows], np.concatenate(([0], np.cumsum(ends - starts))), ids)


def _joined_matches(outputs: Sequence[Outputs], given: Sequence[Shard], num_pairs: int) -> Ragged | None:
    if outputs[0].token_matches is None:
        return None
    found: list[Any] = [None] * num_pairs
    for each, share in zip(outputs, given, strict=True):
        assert each.token_matches is not None
        for index, pair in enumerate(share.pairs_S.tolist()):
            found[pair] = each.token_matches[index]
    return Ragged(np.concatenate(found), np.cumsum([0, *map(len, found)], dtype=np.int64))
