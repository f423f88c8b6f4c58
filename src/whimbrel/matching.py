"""Late interaction: the scores of a request's pairs, made as soon as both sides are there.

Theory of operation. Texts are computed in batches that end in any order. What a batch gave of documents is scored where it lies,
against the queries that are there; only queries are kept, and documents that come before their queries. So a rerank of ten
thousand documents takes the memory of a few. Knows no lanes and no jobs; safe to use from several threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.ops.maxsim import TokenVectors, maxsim
from whimbrel.outputs import ranges
from whimbrel.types import Comparison, Float32Array, Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class _Lying:
    """Where the rows of seqs lie."""

    rows_XD: Float32Array
    starts_N: Int64Array
    ends_N: Int64Array


class Matcher:
    """The scores of one request."""

    def __init__(self, comparison: Comparison) -> None:
        self.scores_P = np.empty(comparison.num_pairs, np.float32)
        self._comparison = comparison
        self._lock = Lock()
        self._queries: dict[int, Float32Array] = {}
        self._waiting: dict[int, Float32Array] = {}
        """Documents whose queries are not all there."""
        self._by_query = _Index(comparison.queries_P)
        self._by_document = _Index(comparison.documents_P)

    def add(
        self,
        rows_XD: Float32Array,
        seqs: NDArray[np.integer],
        starts_N: NDArray[np.integer],
        ends_N: NDArray[np.integer],
    ) -> None:
        """Seqs that were computed, each once: seqs[i] has rows starts_N[i] to ends_N[i]. The rows are not kept."""
        with self._lock:
            is_query_N = self._by_query.has(seqs)
            rows = zip(seqs.tolist(), starts_N.tolist(), ends_N.tolist(), is_query_N.tolist(), strict=True)
            come = {seq: rows_XD[start:end].copy() for seq, start, end, is_query in rows if is_query}
            self._queries |= come
            self._score_waiting(list(come))
            documents_N = self._by_document.has(seqs)
            self._score(
                _Lying(rows_XD, starts_N[documents_N].astype(np.int64), ends_N[documents_N].astype(np.int64)), seqs[documents_N]
            )

    def _score(self, lying: _Lying, documents_N: NDArray[np.integer]) -> None:
        """Documents that were computed, against the queries that are there."""
        places = {seq: i for i, seq in enumerate(cast(list[int], documents_N.tolist()))}
        pairs = self._by_document.places(documents_N)
        there = np.fromiter(
            (query in self._queries for query in self._comparison.queries_P[pairs].tolist()), np.bool_, pairs.size
        )
        self._match(pairs[there], lying, places)
        for seq in set(self._comparison.documents_P[pairs[~there]].tolist()):
            place = places[seq]
            self._waiting[seq] = lying.rows_XD[lying.starts_N[place] : lying.ends_N[place]].copy()

    def _score_waiting(self, queries: list[int]) -> None:
        """Queries that have come, against documents that were there before."""
        pairs = self._by_query.places(np.array(queries, np.int64))
        known = np.fromiter(
            (seq in self._waiting for seq in self._comparison.documents_P[pairs].tolist()), np.bool_, pairs.size
        )
        pairs = pairs[known]
        seqs = sorted(set(cast(list[int], self._comparison.documents_P[pairs].tolist())))
        if not seqs:
            return
        self._match(pairs, _joined([self._waiting[seq] for seq in seqs]), {seq: i for i, seq in enumerate(seqs)})
        for seq in seqs:
            if all(
                query in self._queries
                for query in self._comparison.queries_P[self._by_document.places(np.array([seq]))].tolist()
            ):
                del self._waiting[seq]

    def _match(self, pairs: Int64Array, documents: _Lying, places: dict[int, int]) -> None:
        if not pairs.size:
            return
        query_P: list[int] = self._comparison.queries_P[pairs].tolist()
        queries = sorted(set(query_P))
        number = {seq: i for i, seq in enumerate(queries)}
        lying = _joined([self._queries[seq] for seq in queries])
        document_P: list[int] = self._comparison.documents_P[pairs].tolist()
        self.scores_P[pairs] = maxsim(
            TokenVectors.from_array(lying.rows_XD, lying.starts_N, lying.ends_N),
            TokenVectors.from_array(documents.rows_XD, documents.starts_N, documents.ends_N),
            np.fromiter((number[seq] for seq in query_P), np.int64, pairs.size),
            np.fromiter((places[seq] for seq in document_P), np.int64, pairs.size),
            reduce="mean" if self._comparison.similarity == "meanmaxsim" else "sum",
        )


class _Index:
    """Which pairs a seq is in."""

    def __init__(self, seqs_P: NDArray[np.integer]) -> None:
        self._order_P = np.argsort(seqs_P, kind="stable")
        self._sorted_P = seqs_P[self._order_P]

    def has(self, seqs_N: NDArray[np.integer]) -> NDArray[np.bool_]:
        starts_N, ends_N = self._bounds(seqs_N)
        return ends_N > starts_N

    def places(self, seqs_N: NDArray[np.integer]) -> Int64Array:
        """The pairs of these seqs, seq by seq."""
        return self._order_P[ranges(*self._bounds(seqs_N))]

    def _bounds(self, seqs_N: NDArray[np.integer]) -> tuple[Int64Array, Int64Array]:
        return np.searchsorted(self._sorted_P, seqs_N, "left"), np.searchsorted(self._sorted_P, seqs_N, "right")


def _joined(rows: list[Float32Array]) -> _Lying:
    ends = np.cumsum([len(each) for each in rows])
    return _Lying(rows[0] if len(rows) == 1 else np.concatenate(rows), np.concatenate(([0], ends[:-1])), ends)
