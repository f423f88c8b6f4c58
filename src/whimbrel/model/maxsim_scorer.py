"""Late interaction: the scores of a request's pairs, made as soon as both sides are there.

Theory of operation. Texts are computed in batches that end in any order. What a batch gave of documents is scored where it
lies, against the queries that are there; only queries are kept, and documents that come before their queries. So a rerank of
ten thousand documents takes the memory of a few. Documents whose vectors are there from the beginning, as they came with the
request or were kept from an earlier one, are scored in parts once all queries are there; parts may run at the same time. Knows
no lanes and no jobs; safe to use from several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whimbrel.model.ops.maxsim import Reduce, best_matches, maxsim
from whimbrel.model.ops.memory import memory_errors
from whimbrel.model.ops.token_vectors import TokenVectors
from whimbrel.outputs.finishers import Step
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.stored_vectors import StoredVectors, entry_bounds, quantization_scale, to_float32
from whimbrel.types.arrays import Float32Array, Int64Array, ranges
from whimbrel.types.result import Ragged

_STEP_BYTES: Final = 8 * 2**20
"""Of vectors that are there already: a few milliseconds' work,"""
_STEP_TEXTS: Final = 128
"""unless they are of so many documents."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Where the rows of some texts lie."""

    texts_N: NDArray[np.integer]
    rows_XD: Tensor
    starts_N: NDArray[np.integer]
    ends_N: NDArray[np.integer]
    scale: float = 1.0
    """What its rows are multiplied by."""

    def to_device(self, device: torch.device) -> TokenVectors:
        return TokenVectors(self.rows_XD.to(device), np.asarray(self.starts_N, np.int64), np.asarray(self.ends_N, np.int64))

    def select(self, some_N: NDArray[np.bool_]) -> TokenRows:
        return replace(self, texts_N=self.texts_N[some_N], starts_N=self.starts_N[some_N], ends_N=self.ends_N[some_N])

    def copy(self) -> dict[int, Tensor]:
        rows = zip(self.texts_N.tolist(), self.starts_N.tolist(), self.ends_N.tolist(), strict=True)
        return {text: self.rows_XD[start:end].clone() for text, start, end in rows}


class MaxSimScorer:
    """The scores of one request."""

    def __init__(
        self,
        comparison: PairScoring,
        num_seqs: int,
        kept: Mapping[int, Tensor] | None = None,
        keep: Callable[[int, Tensor], None] | None = None,
        matches: Ragged | None = None,
    ) -> None:
        """`num_seqs`: the texts that are no given vectors. `kept`: documents among them whose vectors are known, by number;
        `keep` is told those of the others. `matches`, as in Outputs, is filled in."""
        self.known_documents: Collection[int] = frozenset(kept or ())
        self._keep = keep
        self.token_matches = matches
        self.scores: Float32Array = np.empty(comparison.num_pairs, np.float32)
        self._query_P, self._document_P = comparison.queries_P, comparison.documents_P
        self._reduce: Reduce = "mean" if comparison.similarity == "meanmaxsim" else "sum"
        self._by_query, self._by_document = _Index(self._query_P), _Index(self._document_P)
        num_texts = int(entry_bounds(comparison.stored, num_seqs)[-1])
        self._is_there, self._waits = np.zeros(num_texts, np.bool_), np.zeros(num_texts, np.bool_)
        """Which queries are there, and which documents wait."""
        self._lock = Lock()
        self._queries: dict[int, Tensor] = {}
        self._waiting: dict[int, Tensor] = {}
        """Documents whose queries are not all there."""
        self._steps = [*self._known_steps(kept or {}), *self._stored_steps(comparison.stored, num_seqs)]
        self.num_steps = len(self._steps)
        self._num_missing = np.unique(self._query_P).size - len(self._queries)
        """Queries that are not there."""

    def take_steps(self) -> list[Step]:
        """The parts that may run, if all queries are there; each is given out once, as it holds this object."""
        if self._num_missing:
            return []
        parts, self._steps = self._steps, []
        return parts

    @memory_errors()
    def add(
        self, rows_XD: Any, texts: NDArray[np.integer], starts: NDArray[np.integer], ends: NDArray[np.integer]
    ) -> list[Step]:
        """Texts that were computed, each once: texts[i] has rows starts[i] to ends[i], which are not kept.

        They are an array, or a tensor on any device; comparing is done on a GPU if one side is there. Returns the parts that
        may run from now on. Raises MemoryError."""
        lying = TokenRows(texts, torch.as_tensor(rows_XD), starts, ends)
        is_query_N = self._by_query.has(texts)
        with self._lock:
            parts, before = self._add_queries(lying.select(is_query_N).copy()) if is_query_N.any() else ([], [])
            now = self._score_documents(lying.select(~is_query_N)) if not is_query_N.all() else []
        for pairs, documents in (*before, *now):
            self._score_pairs(pairs, documents)
        if self._keep is not None:
            with suppress(MemoryError), memory_errors():  # the scores are there
                for text, rows in lying.select(~is_query_N).copy().items():
                    self._keep(text, rows)
        return parts

    def _add_queries(self, queries: dict[int, Tensor]) -> tuple[list[Step], list[tuple[Int64Array, TokenRows]]]:
        """They meet the documents that came before them."""
        self._queries |= queries
        self._num_missing -= len(queries)
        parts = self.take_steps()
        texts = np.array(list(queries))
        self._is_there[texts] = True
        pairs = self._by_query.places(texts)
        pairs = pairs[self._waits[self._document_P[pairs]]]
        if not pairs.size:
            return parts, []
        documents = np.unique(self._document_P[pairs])
        lying = _stacked(documents, self._waiting)
        for text in documents.tolist():
            if self._is_there[self._query_P[self._by_document.places(np.array([text]))]].all():
                del self._waiting[text]
                self._waits[text] = False
        return parts, [(pairs, lying)]

    def _score_documents(self, documents: TokenRows) -> list[tuple[Int64Array, TokenRows]]:
        """They meet the queries that are there, and wait for the others."""
        pairs = self._by_document.places(documents.texts_N)
        there = self._is_there[self._query_P[pairs]]
        if not there.all():
            self._waits[self._document_P[pairs[~there]]] = True
            self._waiting |= documents.select(self._waits[documents.texts_N]).copy()
        return [(pairs[there], documents)] if there.any() else []

    def _score_pairs(self, pairs: Int64Array, documents: TokenRows) -> None:
        queries_M, query_P = np.unique(self._query_P[pairs], return_inverse=True)
        queries = _stacked(queries_M, self._queries, documents.scale)
        order = np.argsort(documents.texts_N)
        document_P = order[np.searchsorted(documents.texts_N, self._document_P[pairs], sorter=order)]
        devices = documents.rows_XD.device, queries.rows_XD.device
        device = devices[0] if devices[0].type != "cpu" else devices[1]
        of_queries, of_documents = queries.to_device(device), documents.to_device(device)
        self.scores[pairs] = maxsim(of_queries, of_documents, query_P, document_P, reduce=self._reduce)
        if self.token_matches is not None:
            found = best_matches(of_queries, of_documents, query_P, document_P)
            starts_P, ends_P = self.token_matches.offsets_N1[pairs], self.token_matches.offsets_N1[pairs + 1]
            self.token_matches.rows_XD[ranges(starts_P, ends_P)] = found.rows_XD

    # What is there from the beginning

    def _stored_steps(self, given: tuple[StoredVectors, ...], num_seqs: int) -> Iterable[Step]:
        """Take over the queries among what is given; the parts of the documents."""
        for first, block in zip(entry_bounds(given, num_seqs)[:-1].tolist(), given, strict=True):
            texts_N = np.arange(first, first + len(block), dtype=np.int64)
            starts_N, ends_N = block.offsets_N1[:-1], block.offsets_N1[1:]
            if len(block) and self._by_query.has(texts_N[:1])[0]:
                self._queries |= TokenRows(texts_N, _tensor(to_float32(block)), starts_N, ends_N).copy()
                self._is_there[texts_N] = True
                continue
            for some in _cut(block.offsets_N1, block.rows_XD.nbytes // max(1, len(block.rows_XD))):
                lying = TokenRows(
                    texts_N[some], _tensor(block.rows_XD), starts_N[some], ends_N[some], float(quantization_scale(block))
                )
                yield partial(self._score_all, lying)

    def _known_steps(self, kept: Mapping[int, Tensor]) -> Iterable[Step]:
        if kept:
            texts_N = np.array(list(kept))
            offsets_N1 = np.cumsum([0, *(rows.nbytes for rows in kept.values())])
            for some in _cut(offsets_N1, 1):
                yield partial(self._score_kept, texts_N[some], kept)

    @memory_errors()
    def _score_kept(self, texts_N: Int64Array, kept: Mapping[int, Tensor]) -> None:
        self._score_all(_stacked(texts_N, kept))

    @memory_errors()
    def _score_all(self, documents: TokenRows) -> None:
        """Documents, all of whose queries are there."""
        self._score_pairs(self._by_document.places(documents.texts_N), documents)


def _cut(offsets_N1: NDArray[np.integer], row_bytes: int) -> list[slice]:
    """Texts in runs of about `_STEP_BYTES`, and of `_STEP_TEXTS` at most."""
    ends = offsets_N1[1:] * row_bytes
    if not ends.size:
        return []
    by_bytes = np.searchsorted(ends, np.arange(_STEP_BYTES, int(ends[-1]), _STEP_BYTES)) + 1
    cuts = np.union1d(by_bytes[by_bytes < ends.size], np.arange(_STEP_TEXTS, ends.size, _STEP_TEXTS))
    return [slice(*run) for run in pairwise([0, *cuts.tolist(), ends.size])]


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


def _stacked(texts_N: NDArray[np.integer], rows: Mapping[int, Tensor], scale: float = 1.0) -> TokenRows:
    """Some texts one after another, where the first lies, their rows multiplied by a number."""
    found = [rows[text] for text in cast(list[int], texts_N.tolist())]
    ends_N = np.cumsum([len(each) for each in found])
    rows_XD = found[0] if len(found) == 1 else torch.cat([each.to(found[0].device) for each in found])
    return TokenRows(texts_N, rows_XD if scale == 1 else rows_XD * scale, np.concatenate(([0], ends_N[:-1])), ends_N)


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
