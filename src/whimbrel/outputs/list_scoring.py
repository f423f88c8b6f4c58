"""Listwise scoring: scores of documents that one prompt judges together with their query. numpy only.

A prompt ends each document, and the query after them, with a marker token. The row of a marker is the vector of its text. A
score is the cosine of the document's vector and the query's. A list that is too long for one prompt runs in several blocks; its
query is then the mean of the blocks' query vectors. The weight of a block is (1 + c) / 2 for its best cosine c.

Source: `rerank` in modeling.py of jinaai/jina-reranker-v3.

Shapes: N documents, B blocks (the seqs of the request), L lists, D columns.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import Location, NonFinite
from whimbrel.outputs.merge import ReturnRows
from whimbrel.types.arrays import Int64Array
from whimbrel.types.batch import offsets_of
from whimbrel.types.result import Outputs, Ragged

_Rows: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ListScoring(ReturnRows):
    """Scoring of lists of documents by the rows of their blocks."""

    documents_B1: Int64Array
    """Documents documents_B1[i] to documents_B1[i + 1] of the request are in block i."""
    blocks_L1: Int64Array
    """Blocks blocks_L1[i] to blocks_L1[i + 1] belong to list i."""
    returns_vectors: bool = False
    """Return the vectors of each list, the query's last, in place of the scores."""
    normalized: bool = False
    """Divide the vectors that are returned by their norms."""

    def apply(self, outputs: Outputs) -> Outputs:
        """Return the scores of all documents, or the vectors of each list. Raises NonFinite."""
        assert outputs.multi_vector is not None
        rows_XD = outputs.multi_vector.rows_XD.astype(np.float64)
        is_query_X = np.zeros(len(rows_XD), np.bool_)
        is_query_X[outputs.multi_vector.offsets_N1[1:] - 1] = True
        documents_ND, queries_BD = rows_XD[~is_query_X], rows_XD[is_query_X]
        if not (lengths_N := np.linalg.norm(documents_ND, axis=1)).all():
            raise NonFinite("a score is NaN: the document's vector has no length.", item=int(lengths_N.argmin()), part=1)
        queries_LD = self._merge_queries(documents_ND, queries_BD)
        documents_L1 = self.documents_B1[self.blocks_L1]
        scores_N = _cosines(documents_ND, np.repeat(queries_LD, np.diff(documents_L1), axis=0))
        if not np.isfinite(scores_N).all():
            raise NonFinite("a score is NaN: the query's vector has no length.", item=int(np.isnan(scores_N).argmax()), part=0)
        if self.returns_vectors:
            rows_XD = np.insert(documents_ND, documents_L1[1:], queries_LD, axis=0)
            if self.normalized:
                rows_XD /= np.linalg.norm(rows_XD, axis=1, keepdims=True)
            return Outputs(multi_vector=Ragged(rows_XD.astype(np.float32), offsets_of(np.diff(documents_L1) + 1)))
        return Outputs(scores=scores_N[:, None].astype(np.float32))

    def locate(self, seq: int, location: Location) -> Location:
        """Return the location of a text, which was located where it was read, or of the first document of a prompt."""
        return location if location.part is not None else Location("input", int(self.documents_B1[seq]), 1)

    def _merge_queries(self, documents_ND: _Rows, queries_BD: _Rows) -> _Rows:
        """Return the query vector of each list: (L, D)."""
        if len(self.blocks_L1) == len(self.documents_B1):  # every list is one block, or there is none
            return queries_BD
        cosines_N = _cosines(documents_ND, np.repeat(queries_BD, np.diff(self.documents_B1), axis=0))
        weights_B1 = ((1.0 + np.maximum.reduceat(cosines_N, self.documents_B1[:-1])) / 2.0)[:, None]
        starts_L = self.blocks_L1[:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            merged_LD = np.add.reduceat(queries_BD * weights_B1, starts_L) / np.add.reduceat(weights_B1, starts_L)
        return np.where((np.diff(self.blocks_L1) == 1)[:, None], queries_BD[starts_L], merged_LD)


def _cosines(first_ND: _Rows, second_ND: _Rows) -> _Rows:
    norms_N = np.linalg.norm(first_ND, axis=1) * np.linalg.norm(second_ND, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.einsum("nd,nd->n", first_ND, second_ND) / norms_N
