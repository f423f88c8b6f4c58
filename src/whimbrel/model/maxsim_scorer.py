"""The finisher that scores pairs by late interaction, as soon as both sides exist. Safe to use from several threads.

Theory of operation: batches end in any order. Documents of a batch are scored in place, against the queries that exist. Only
queries are kept, and documents that precede their queries, so a rerank of ten thousand documents takes the memory of a few.
Documents whose vectors came with the request or from the document cache are scored in steps once all queries exist.

Rows that stay on a GPU are taken for all requests of a batch together: one copy of its queries, then one launch for all pairs
of one dtype and width, and one wait for their scores. A launch that fails is repeated request by request.

Shapes: N texts, M queries, P pairs, X rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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

from whimbrel.errors import Unavailable
from whimbrel.model.ops.maxsim import Reduce, best_matches, maxsim, start_maxsim
from whimbrel.model.ops.maxsim_device import scoring_stream
from whimbrel.model.ops.memory import memory_errors
from whimbrel.model.ops.staging import put
from whimbrel.model.ops.token_vectors import TokenVectors
from whimbrel.outputs.finishers import Addition, AddTogether, Finisher, Step, checked_scores, stored_bytes
from whimbrel.outputs.multi_vector import pool_all
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.rows import BatchOutput, DeviceRows
from whimbrel.outputs.stored_vectors import StoredVectors, entry_bounds, quantization_scale, to_float32
from whimbrel.types.arrays import Float32Array, Int64Array, IntArray
from whimbrel.types.batch import offsets_of, ranges
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.result import Outputs, Ragged

_STEP_BYTES: Final = 8 * 2**20
"""Bytes of existing vectors in a step: a few milliseconds of work."""
_STEP_TEXTS: Final = 128
"""Limit of documents in a step."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Token vectors of some texts: texts_N[i] has rows starts_N[i] to ends_N[i]."""

    texts_N: IntArray
    rows_XD: Tensor
    starts_N: IntArray
    ends_N: IntArray
    scale: float = 1.0

    def to_device(self, device: torch.device) -> TokenVectors:
        return TokenVectors(self.rows_XD.to(device), np.asarray(self.starts_N, np.int64), np.asarray(self.ends_N, np.int64))

    def select(self, mask_N: NDArray[np.bool_]) -> TokenRows:
        return replace(self, texts_N=self.texts_N[mask_N], starts_N=self.starts_N[mask_N], ends_N=self.ends_N[mask_N])

    def copy(self) -> dict[int, Tensor]:
        rows = zip(self.texts_N.tolist(), self.starts_N.tolist(), self.ends_N.tolist(), strict=True)
        return {text: self.rows_XD[start:end].clone() for text, start, end in rows}


@dataclass(frozen=True, slots=True, eq=False)
class _Comparison:
    """Pairs of a scorer that can be scored: pair i is of query query_P[i] and document document_P[i], both on one device."""

    scorer: MaxSimScorer
    pairs: Int64Array
    queries: TokenVectors
    documents: TokenVectors
    query_P: IntArray
    document_P: IntArray
    reduce: Reduce

    @property
    def launch_key(self) -> tuple[object, ...]:
        """Key of comparisons that may share a launch: they read the same rows in the same way."""
        rows_XD = self.documents.rows_TD
        return rows_XD.data_ptr(), rows_XD.shape, self.queries.rows_TD.dtype, self.reduce


class MaxSimScorer(Finisher):
    """Scorer of one request, whose rows it takes from the batches that end."""

    adds_slowly = True
    finishes_slowly = True

    def __init__(
        self,
        comparison: PairScoring,
        num_seqs: int,
        response: Outputs,
        cached: Mapping[int, Tensor] | None = None,
        keep: Callable[[int, Tensor], None] | None = None,
        *,
        width: int,
    ) -> None:
        """`num_seqs` counts the texts without stored vectors; `cached` holds documents' vectors from the cache, by index.

        `keep` is called with the vectors of the other documents. `response` holds the arrays that `result` writes the scores,
        and the token matches of an explanation, to. `width` is the number of columns to score by.
        """
        self.skipped_seqs = frozenset(cached or ())
        # Documents that are computed before their query would have to be kept.
        self.first_seqs = frozenset[int](comparison.queries_P.tolist())
        self.num_bytes = stored_bytes(comparison)
        self._comparison = comparison
        self._num_seqs = num_seqs
        self._response = response
        self._width = width
        self._keep = keep
        matches = response.token_matches
        self._matches = None if matches is None else Ragged(np.empty_like(matches.rows_XD), matches.offsets_N1)
        self.scores: Float32Array = np.empty(comparison.num_pairs, np.float32)
        self._query_P, self._document_P = comparison.queries_P, comparison.documents_P
        self._reduce: Reduce = "mean" if comparison.similarity == "meanmaxsim" else "sum"
        self._by_query, self._by_document = _Index(self._query_P), _Index(self._document_P)
        num_texts = int(entry_bounds(comparison.stored, num_seqs)[-1])
        self._has_query = np.zeros(num_texts, np.bool_)
        self._is_waiting = np.zeros(num_texts, np.bool_)
        """Mask of the documents that wait for a query; `_waiting` has their vectors."""
        self._lock = Lock()
        self._queries: dict[int, Tensor] = {}
        self._waiting: dict[int, Tensor] = {}
        self._steps = [*self._cached_steps(cached or {}), *self._stored_steps(comparison.stored, num_seqs)]
        self.num_steps = len(self._steps)
        self._num_missing = np.unique(self._query_P).size - len(self._queries)

    def take_steps(self) -> list[Step]:
        """Return the steps, once, if all queries exist; else none."""
        if self._num_missing:
            return []
        steps, self._steps = self._steps, []
        return steps

    def together(self, batch: BatchOutput) -> AddTogether | None:
        pools = self._comparison.poolings or self._comparison.query_poolings  # which is work of the host
        return None if pools or not isinstance(batch.rows["multi_vector"], DeviceRows) else MaxSimScorer._add_together

    @staticmethod
    @memory_errors()
    def _add_together(batch: BatchOutput, additions: Sequence[Addition]) -> list[Sequence[Step] | Exception]:
        """Add the rows of a batch, which stay on the device, to several scorers. Return the steps or the error of each."""
        rows_XD: Tensor = cast(DeviceRows, batch.rows["multi_vector"]).rows_PD
        offsets_B1 = batch.selections["multi_vector"].offsets_B1
        scorers = [cast(MaxSimScorer, scorer) for scorer, _, _ in additions]
        with scoring_stream(rows_XD):
            texts = [
                TokenRows(seqs_S, rows_XD[:, : scorer._width], offsets_B1[seqs_B], offsets_B1[seqs_B + 1])
                for scorer, (_, seqs_B, seqs_S) in zip(scorers, additions, strict=True)
            ]
            is_query = [scorer._by_query.has(each.texts_N) for scorer, each in zip(scorers, texts, strict=True)]
            queries = _copy_together(rows_XD, [each.select(mask_N) for each, mask_N in zip(texts, is_query, strict=True)])
            documents = [each.select(~mask_N) for each, mask_N in zip(texts, is_query, strict=True)]
            taken = [scorer._take(own, others) for scorer, own, others in zip(scorers, queries, documents, strict=True)]
            errors = _score_together([comparison for _, ready in taken for comparison in ready])
            for scorer, each in zip(scorers, documents, strict=True):
                scorer._keep_documents(each)
        return [errors.get(scorer, steps) for scorer, (steps, _) in zip(scorers, taken, strict=True)]

    def add(self, batch: BatchOutput, seqs_B: IntArray, seqs_S: IntArray) -> list[Step]:
        poolings, query_poolings = self._comparison.poolings, self._comparison.query_poolings
        if not poolings and not query_poolings:
            return self._add_pooled(batch, seqs_B, seqs_S, ())
        is_query = self._by_query.has(seqs_S)
        return [
            *self._add_pooled(batch, seqs_B[is_query], seqs_S[is_query], query_poolings),
            *self._add_pooled(batch, seqs_B[~is_query], seqs_S[~is_query], poolings),
        ]

    def _add_pooled(
        self, batch: BatchOutput, seqs_B: IntArray, seqs_S: IntArray, poolings: Sequence[TokenPooling]
    ) -> list[Step]:
        offsets_B1, rows = batch.selections["multi_vector"].offsets_B1, batch.rows["multi_vector"]
        vectors_XD: Any = (rows.rows_PD if isinstance(rows, DeviceRows) else cast(Float32Array, rows))[:, : self._width]
        starts, ends = offsets_B1[seqs_B], offsets_B1[seqs_B + 1]
        if poolings:
            index_X = ranges(starts, ends)
            if isinstance(rows, DeviceRows):
                with scoring_stream(vectors_XD):
                    host_XD = vectors_XD[put(index_X, vectors_XD.device)].float().cpu().numpy()
            else:
                host_XD = vectors_XD[index_X]
            fewer = pool_all(Ragged(host_XD, offsets_of(ends - starts)), poolings)
            vectors_XD, starts, ends = fewer.rows_XD, fewer.offsets_N1[:-1], fewer.offsets_N1[1:]
        return self.add_rows(vectors_XD, seqs_S, starts, ends)

    def result(self) -> Outputs:
        assert self._response.scores is not None
        self._response.scores[:, 0] = checked_scores(self._comparison, self.scores, self._num_seqs)
        if self._matches is not None and self._response.token_matches is not None:
            self._response.token_matches.rows_XD[:] = self._matches.rows_XD
        return self._response

    @memory_errors()
    def add_rows(self, rows_XD: Any, texts: IntArray, starts: IntArray, ends: IntArray) -> list[Step]:
        """Add computed texts: texts[i] has rows starts[i] to ends[i], which the caller may overwrite afterwards.

        Rows are an array, or a tensor on any device; scoring runs on a GPU if one side is on it. Each text is added once.
        Returns the steps that may run from now on. Raises MemoryError."""
        computed = TokenRows(texts, torch.as_tensor(rows_XD), starts, ends)
        with scoring_stream(self._rows_of_device(computed.rows_XD)):
            is_query_N = self._by_query.has(texts)
            documents = computed.select(~is_query_N)
            steps, ready = self._take(computed.select(is_query_N).copy(), documents)
            for comparison in ready:
                self.score(comparison)
            self._keep_documents(documents)
        return steps

    def _take(self, queries: dict[int, Tensor], documents: TokenRows) -> tuple[list[Step], list[_Comparison]]:
        """Take computed texts. Return the steps and the comparisons that may run from now on."""
        with self._lock:
            steps, ready = self._add_queries(queries) if queries else ([], [])
            ready += self._add_documents(documents) if documents.texts_N.size else []
        return steps, [self._compare(*pair) for pair in ready]

    def _keep_documents(self, documents: TokenRows) -> None:
        if self._keep is not None:
            with suppress(MemoryError), memory_errors():  # the scores are complete
                for text, rows in documents.copy().items():
                    self._keep(text, rows)

    def _add_queries(self, queries: dict[int, Tensor]) -> tuple[list[Step], list[tuple[Int64Array, TokenRows]]]:
        """Add queries. Return the steps that may run, and the pairs with documents that waited for them."""
        self._queries |= queries
        self._num_missing -= len(queries)
        steps = self.take_steps()
        texts = np.array(list(queries))
        self._has_query[texts] = True
        pairs = self._by_query.pairs_of(texts)
        pairs = pairs[self._is_waiting[self._document_P[pairs]]]
        if not pairs.size:
            return steps, []
        documents = np.unique(self._document_P[pairs])
        stacked = _stack(documents, self._waiting)
        for text in documents.tolist():
            if self._has_query[self._query_P[self._by_document.pairs_of(np.array([text]))]].all():
                del self._waiting[text]
                self._is_waiting[text] = False
        return steps, [(pairs, stacked)]

    def _add_documents(self, documents: TokenRows) -> list[tuple[Int64Array, TokenRows]]:
        """Return the pairs with queries that exist; keep documents that wait for others."""
        pairs = self._by_document.pairs_of(documents.texts_N)
        is_ready = self._has_query[self._query_P[pairs]]
        if not is_ready.all():
            self._is_waiting[self._document_P[pairs[~is_ready]]] = True
            self._waiting |= documents.select(self._is_waiting[documents.texts_N]).copy()
        return [(pairs[is_ready], documents)] if is_ready.any() else []

    def _compare(self, pairs: Int64Array, documents: TokenRows) -> _Comparison:
        queries_M, query_P = np.unique(self._query_P[pairs], return_inverse=True)
        queries = _stack(queries_M, self._queries, documents.scale)
        order = np.argsort(documents.texts_N)
        document_P = order[np.searchsorted(documents.texts_N, self._document_P[pairs], sorter=order)]
        devices = documents.rows_XD.device, queries.rows_XD.device
        device = devices[0] if devices[0].type != "cpu" else devices[1]
        vectors = queries.to_device(device), documents.to_device(device)
        return _Comparison(self, pairs, *vectors, query_P, document_P, self._reduce)

    def score(self, each: _Comparison) -> None:
        with scoring_stream(each.documents.rows_TD):
            scores_P = maxsim(each.queries, each.documents, each.query_P, each.document_P, reduce=each.reduce)
            self.write(each, scores_P)

    def write(self, each: _Comparison, scores_P: Float32Array) -> None:
        self.scores[each.pairs] = scores_P
        if self._matches is not None:
            matches = best_matches(each.queries, each.documents, each.query_P, each.document_P)
            starts_P, ends_P = self._matches.offsets_N1[each.pairs], self._matches.offsets_N1[each.pairs + 1]
            self._matches.rows_XD[ranges(starts_P, ends_P)] = matches.rows_XD

    def _stored_steps(self, blocks: tuple[StoredVectors, ...], num_seqs: int) -> Iterable[Step]:
        for first, block in zip(entry_bounds(blocks, num_seqs)[:-1].tolist(), blocks, strict=True):
            texts_N = np.arange(first, first + len(block), dtype=np.int64)
            starts_N, ends_N = block.offsets_N1[:-1], block.offsets_N1[1:]
            if len(block) and self._by_query.has(texts_N[:1])[0]:
                self._queries |= TokenRows(texts_N, torch.as_tensor(to_float32(block)), starts_N, ends_N).copy()
                self._has_query[texts_N] = True
                continue
            for texts in _split_steps(block.offsets_N1, block.rows_XD.nbytes // max(1, len(block.rows_XD))):
                scale = float(quantization_scale(block))
                load = partial(TokenRows, texts_N[texts], torch.as_tensor(block.rows_XD), starts_N[texts], ends_N[texts], scale)
                yield partial(self._score_all, load)

    def _cached_steps(self, cached: Mapping[int, Tensor]) -> Iterable[Step]:
        if cached:
            texts_N = np.array(list(cached))
            offsets_N1 = np.cumsum([0, *(rows.nbytes for rows in cached.values())])
            for texts in _split_steps(offsets_N1, 1):
                yield partial(self._score_all, partial(_stack, texts_N[texts], cached), cached[int(texts_N[texts][0])])

    @memory_errors()
    def _score_all(self, load: Callable[[], TokenRows], *rows: Tensor) -> None:
        """Score all pairs of some documents; `rows` are some of theirs."""
        with scoring_stream(self._rows_of_device(*rows)):
            documents = load()
            self.score(self._compare(self._by_document.pairs_of(documents.texts_N), documents))

    def _rows_of_device(self, *rows: Tensor) -> Tensor:
        """Return rows on the device that scores will run on: on a GPU if these rows or those of queries are there."""
        known = [*rows, *self._queries.values()]
        return next((each for each in known if each.is_cuda), known[0])


def _copy_together(rows_XD: Tensor, texts: Sequence[TokenRows]) -> list[dict[int, Tensor]]:
    """Return copies of the rows of several scorers' texts, by text. They share one tensor."""
    starts_N, ends_N = (np.concatenate([getattr(each, side) for each in texts]) for side in ("starts_N", "ends_N"))
    lengths: list[int] = (ends_N - starts_N).tolist()
    copied_XD = rows_XD[put(ranges(starts_N, ends_N), rows_XD.device)]
    copies = iter(torch.split(copied_XD, lengths) if lengths else ())
    return [{text: next(copies)[:, : each.rows_XD.shape[1]] for text in each.texts_N.tolist()} for each in texts]


def _score_together(comparisons: Sequence[_Comparison]) -> dict[MaxSimScorer, Exception]:
    """Score comparisons, with one launch for all that may share one, and one wait. Return errors of those that fail alone."""
    by_launch: dict[tuple[object, ...], list[_Comparison]] = {}
    for each in comparisons:
        by_launch.setdefault(each.launch_key, []).append(each)
    try:
        launched = [(group, _launch(group)) for group in by_launch.values()]
        for group, wait in launched:
            ends = np.cumsum([each.pairs.size for each in group])
            for each, scores_P in zip(group, np.split(wait(), ends[:-1]), strict=True):
                each.scorer.write(each, scores_P)
    except Unavailable:
        raise
    except Exception:
        return _score_alone(comparisons)
    return {}


def _score_alone(comparisons: Sequence[_Comparison]) -> dict[MaxSimScorer, Exception]:
    errors: dict[MaxSimScorer, Exception] = {}
    for each in comparisons:
        try:
            with memory_errors():
                each.scorer.score(each)
        except Unavailable:
            raise
        except Exception as error:
            errors[each.scorer] = error
    return errors


def _launch(group: Sequence[_Comparison]) -> Callable[[], Float32Array]:
    """Launch comparisons that have the rows of their documents in common."""
    rows_QD = torch.cat([each.queries.rows_TD for each in group])
    first_row = offsets_of(np.array([len(each.queries.rows_TD) for each in group]))
    first_query, first_document = (
        offsets_of(np.array([len(vectors) for vectors in side]))
        for side in ([each.queries for each in group], [each.documents for each in group])
    )
    queries = TokenVectors(
        rows_QD,
        np.concatenate([each.queries.starts_N + first for each, first in zip(group, first_row, strict=False)]),
        np.concatenate([each.queries.ends_N + first for each, first in zip(group, first_row, strict=False)]),
    )
    documents = TokenVectors(
        group[0].documents.rows_TD,
        np.concatenate([each.documents.starts_N for each in group]),
        np.concatenate([each.documents.ends_N for each in group]),
    )
    query_P = np.concatenate([each.query_P + first for each, first in zip(group, first_query, strict=False)])
    document_P = np.concatenate([each.document_P + first for each, first in zip(group, first_document, strict=False)])
    return start_maxsim(queries, documents, query_P, document_P, reduce=group[0].reduce)


def _split_steps(offsets_N1: IntArray, row_bytes: int) -> list[slice]:
    ends = offsets_N1[1:] * row_bytes
    if not ends.size:
        return []
    by_bytes = np.searchsorted(ends, np.arange(_STEP_BYTES, int(ends[-1]), _STEP_BYTES)) + 1
    cuts = np.union1d(by_bytes[by_bytes < ends.size], np.arange(_STEP_TEXTS, ends.size, _STEP_TEXTS))
    return [slice(*run) for run in pairwise([0, *cuts.tolist(), ends.size])]


class _Index:
    def __init__(self, texts_P: IntArray) -> None:
        self._order_P = np.argsort(texts_P, kind="stable")
        self._sorted_P = texts_P[self._order_P]

    def has(self, texts_N: IntArray) -> NDArray[np.bool_]:
        starts_N, ends_N = self._bounds(texts_N)
        return ends_N > starts_N

    def pairs_of(self, texts_N: IntArray) -> Int64Array:
        return self._order_P[ranges(*self._bounds(texts_N))]

    def _bounds(self, texts_N: IntArray) -> tuple[Int64Array, Int64Array]:
        return np.searchsorted(self._sorted_P, texts_N, "left"), np.searchsorted(self._sorted_P, texts_N, "right")


def _stack(texts_N: IntArray, rows: Mapping[int, Tensor], scale: float = 1.0) -> TokenRows:
    blocks = [rows[text] for text in cast(list[int], texts_N.tolist())]
    ends_N = np.cumsum([len(block) for block in blocks])
    rows_XD = blocks[0] if len(blocks) == 1 else torch.cat([block.to(blocks[0].device) for block in blocks])
    return TokenRows(texts_N, rows_XD if scale == 1 else rows_XD.float() * scale, np.concatenate(([0], ends_N[:-1])), ends_N)
