"""Late interaction: the scores of a request's pairs, made as soon as both sides are there.

Theory of operation. Texts are computed in batches that end in any order. What a batch gave of documents is scored where it
lies, against the queries that are there; only queries are kept, and documents that come before their queries. So a rerank of
ten thousand documents takes the memory of a few. Knows no lanes and no jobs; safe to use from several threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.ops.maxsim import Reduce, TokenVectors, maxsim
from whimbrel.outputs import ranges
from whimbrel.types import Comparison, Float32Array, Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class _Lying:
    """Where the rows of some seqs lie."""

    seqs_N: NDArray[np.integer]
    rows_XD: Float32Array
    starts_N: NDArray[np.integer]
    ends_N: NDArray[np.integer]

    @property
    def vectors(self) -> TokenVectors:
        return TokenVectors.from_array(self.rows_XD, self.starts_N, self.ends_N)

    def only(self, some_N: NDArray[np.bool_]) -> _Lying:
        return _Lying(self.seqs_N[some_N], self.rows_XD, self.starts_N[some_N], self.ends_N[some_N])

    def copied(self) -> dict[int, Float32Array]:
        rows = zip(self.seqs_N.tolist(), self.starts_N.tolist(), self.ends_N.tolist(), strict=True)
        return {seq: self.rows_XD[start:end].copy() for seq, start, end in rows}


class Matcher:
    """The scores of one request."""

    def __init__(self, comparison: Comparison) -> None:
        self.scores = np.empty(comparison.num_pairs, np.float32)
        self._query_P, self._document_P = comparison.queries_P, comparison.documents_P
        self._reduce: Reduce = "mean" if comparison.similarity == "meanmaxsim" else "sum"
        self._by_query, self._by_document = _Index(self._query_P), _Index(self._document_P)
        num_seqs = 1 + max(self._query_P.max(initial=-1), self._document_P.max(initial=-1))
        self._is_there, self._waits = np.zeros(num_seqs, np.bool_), np.zeros(num_seqs, np.bool_)
        """Which queries are there, and which documents wait."""
        self._lock = Lock()
        self._queries: dict[int, Float32Array] = {}
        self._waiting: dict[int, Float32Array] = {}
        """Documents whose queries are not all there."""

    def add(
        self, rows_XD: Float32Array, seqs: NDArray[np.integer], starts: NDArray[np.integer], ends: NDArray[np.integer]
    ) -> None:
        """Seqs that were computed, each once: seqs[i] has rows starts[i] to ends[i]. The rows are not kept."""
        lying = _Lying(seqs, rows_XD, starts, ends)
        is_query_N = self._by_query.has(seqs)
        with self._lock:
            if is_query_N.any():
                self._add_queries(lying.only(is_query_N).copied())
            if not is_query_N.all():
                self._add_documents(lying.only(~is_query_N))

    def _add_queries(self, queries: dict[int, Float32Array]) -> None:
        """They meet the documents that came before them."""
        self._queries |= queries
        seqs = np.array(list(queries))
        self._is_there[seqs] = True
        pairs = self._by_query.places(seqs)
        pairs = pairs[self._waits[self._document_P[pairs]]]
        if pairs.size:
            documents = np.unique(self._document_P[pairs])
            self._match(pairs, _stacked(documents, self._waiting))
            for seq in documents.tolist():
                if self._is_there[self._query_P[self._by_document.places(np.array([seq]))]].all():
                    del self._waiting[seq]
                    self._waits[seq] = False

    def _add_documents(self, documents: _Lying) -> None:
        """They meet the queries that are there, and wait for the others."""
        pairs = self._by_document.places(documents.seqs_N)
        there = self._is_there[self._query_P[pairs]]
        if there.any():
            self._match(pairs[there], documents)
        if not there.all():
            self._waits[self._document_P[pairs[~there]]] = True
            self._waiting |= documents.only(self._waits[documents.seqs_N]).copied()

    def _match(self, pairs: Int64Array, documents: _Lying) -> None:
        queries_M, query_P = np.unique(self._query_P[pairs], return_inverse=True)
        queries = _stacked(queries_M, self._queries)
        order = np.argsort(documents.seqs_N)
        document_P = order[np.searchsorted(documents.seqs_N, self._document_P[pairs], sorter=order)]
        self.scores[pairs] = maxsim(queries.vectors, documents.vectors, query_P, document_P, reduce=self._reduce)


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


def _stacked(seqs_N: NDArray[np.integer], rows: dict[int, Float32Array]) -> _Lying:
    """Some seqs one after another."""
    found = [rows[seq] for seq in cast(list[int], seqs_N.tolist())]
    ends_N = np.cumsum([len(each) for each in found])
    rows_XD = found[0] if len(found) == 1 else np.concatenate(found)
    return _Lying(seqs_N, rows_XD, np.concatenate(([0], ends_N[:-1])), ends_N)
