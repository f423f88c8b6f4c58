"""Sharding of a request for the scores of many pairs over several engines. numpy only.

Each engine gets some of the documents and computes the queries of its shard. If engines cache the vectors of documents
(document_cache.py), a document always goes to the same engine. Otherwise shards have about as many tokens.

Shapes: P pairs of a request, S pairs of a shard, N texts of a side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from whimbrel.engine.engine_request import EngineRequest
from whimbrel.errors import Location, WhimbrelError
from whimbrel.outputs.finishers import locate_error
from whimbrel.outputs.layout import plan_layout
from whimbrel.outputs.merge import Deduplication, ReturnRows
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.stored_vectors import StoredVectors, entry_bounds
from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.batch import ranges
from whimbrel.types.card import Card
from whimbrel.types.result import Outputs, Ragged

_ROWS_PER_TOKEN: Final = 64
"""Stored vectors that cost about as much as the computation of one token."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    request: EngineRequest
    pairs_S: Int64Array
    """The pairs of the whole request that it scores."""
    engine: int | None
    """The engine that caches its documents; None for any."""

    def locate_error(self, error: WhimbrelError) -> WhimbrelError:
        """Return an error of the shard as one of the whole request."""

        def locate(location: Location) -> Location:
            pair = location.item
            return location if pair is None else Location("input", int(self.pairs_S[pair]), location.part)

        return locate_error(error, self.request.finish).relocated(locate)


def split_into_shards(request: EngineRequest, card: Card, num_engines: int, *, least_tokens: int, sticky: bool) -> list[Shard]:
    """Split a request into shards of at least `least_tokens`, at most one for each engine. Empty if it stays whole.

    With `sticky`, a document that is scored by late interaction always goes to the same engine.
    """
    if num_engines < 2 or not _can_be_sharded(request):
        return []
    documents_P, tokens_N, key_N = _documents(request)
    sticky = sticky and isinstance(request.finish, PairScoring) and request.finish.output == "multi_vector"
    if sticky:
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
        return [Shard(request, np.arange(engine_P.size), chosen[0][0])] if sticky else []
    return [Shard(_select_pairs(request, card, pairs), pairs, engine if sticky else None) for engine, pairs in chosen]


def merge_shards(outputs: Sequence[Outputs], shards: Sequence[Shard]) -> Outputs:
    """Merge the scores of all shards in the order of the request's pairs."""
    pairs_P = np.concatenate([shard.pairs_S for shard in shards])

    def merge(parts: Sequence[Float32Array | None]) -> Float32Array | None:
        present = [each for each in parts if each is not None]
        if len(present) < len(parts):
            return None
        merged_PC = np.empty((pairs_P.size, present[0].shape[1]), np.float32)
        merged_PC[pairs_P] = np.concatenate(present)
        return merged_PC

    return Outputs(
        scores=merge([each.scores for each in outputs]),
        logits=merge([each.logits for each in outputs]),
        token_matches=_merge_matches(outputs, shards, pairs_P.size),
    )


def _can_be_sharded(request: EngineRequest) -> bool:
    if isinstance(request.finish, PairScoring):
        return bool(request.finish.num_pairs)
    return list(request.layout.by_name) == ["scores"] and type(request.finish) in (ReturnRows, Deduplication)


def _documents(request: EngineRequest) -> tuple[Int64Array, NDArray[np.float64], Int64Array]:
    """Return the document of each pair, and the tokens and a key of each document. Without pairs, texts are documents."""
    tokens = np.array([seq.ids.size for seq in request.seqs], np.float64)
    keys = np.array([crc32(seq.ids.tobytes()) for seq in request.seqs], np.int64)
    if not isinstance(request.finish, PairScoring):
        return np.arange(tokens.size), tokens, keys
    rows = [np.diff(stored.offsets_N1) / _ROWS_PER_TOKEN for stored in request.finish.stored]
    tokens = np.concatenate([tokens, *rows])
    keys = np.concatenate([keys, np.arange(len(keys), tokens.size)])
    texts_N, documents_P = np.unique(request.finish.documents_P, return_inverse=True)
    return documents_P, tokens[texts_N], keys[texts_N]


def _select_pairs(request: EngineRequest, card: Card, pairs_S: Int64Array) -> EngineRequest:
    pairs, seqs = request.finish, request.seqs
    if isinstance(pairs, PairScoring):
        texts_N = np.unique(np.concatenate((pairs.queries_P[pairs_S], pairs.documents_P[pairs_S])))
        chosen_N = texts_N[texts_N < len(seqs)]
        numbers = np.full(int(texts_N[-1]) + 1, -1, np.int32)
        numbers[texts_N] = np.arange(texts_N.size, dtype=np.int32)
        finish = _renumber(pairs, pairs_S, numbers, texts_N, len(seqs))
    else:
        chosen_N, finish = pairs_S, ReturnRows()
    chosen = [replace(seqs[old], index=new) for new, old in enumerate(cast(list[int], chosen_N.tolist()))]
    tower = card.tower(chosen[0].tower if chosen else 0)
    layout, num_truncated = plan_layout(tower, chosen, request.layout.specs), sum(seq.truncated for seq in chosen)
    return replace(request, seqs=chosen, layout=layout, finish=finish, num_truncated=num_truncated)


def _renumber(
    pairs: PairScoring, pairs_S: Int64Array, numbers: Int32Array, texts_N: NDArray[np.integer], num_seqs: int
) -> PairScoring:
    """Return the scoring of some pairs; `numbers` has the new number of each text."""
    stored: list[StoredVectors] = []
    for first, block in zip(entry_bounds(pairs.stored, num_seqs)[:-1].tolist(), pairs.stored, strict=True):
        own = texts_N[(texts_N >= first) & (texts_N < first + len(block))] - first
        if own.size:
            stored.append(_select_texts(block, own))
    queries_S, documents_S = numbers[pairs.queries_P[pairs_S]], numbers[pairs.documents_P[pairs_S]]
    return replace(pairs, queries_P=queries_S, documents_P=documents_S, stored=tuple(stored), pair_tokens=None)


def _select_texts(block: StoredVectors, texts_N: NDArray[np.integer]) -> StoredVectors:
    starts, ends = block.offsets_N1[texts_N], block.offsets_N1[texts_N + 1]
    rows: Any = slice(int(starts[0]), int(ends[-1])) if np.array_equal(starts[1:], ends[:-1]) else ranges(starts, ends)
    ids = None if block.ids_X is None else block.ids_X[rows]
    return StoredVectors(block.rows_XD[rows], np.concatenate(([0], np.cumsum(ends - starts))), ids)


def _merge_matches(outputs: Sequence[Outputs], shards: Sequence[Shard], num_pairs: int) -> Ragged | None:
    if outputs[0].token_matches is None:
        return None
    matches: list[Any] = [None] * num_pairs
    for each, shard in zip(outputs, shards, strict=True):
        assert each.token_matches is not None
        for index, pair in enumerate(shard.pairs_S.tolist()):
            matches[pair] = each.token_matches[index]
    return Ragged(np.concatenate(matches), np.cumsum([0, *map(len, matches)], dtype=np.int64))
