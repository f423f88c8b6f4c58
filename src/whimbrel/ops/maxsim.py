"""MaxSim over flat token vectors: for each pair, the sum over query tokens of the best match among the document's tokens.

Nothing is padded and no document is copied: a vector that is not there would compete with similarities below 0. Which tokens
are whose is said by ranges of rows, so that documents may lie anywhere in a larger store. Sums are float32, whatever the
vectors are. A document without tokens scores EMPTY, below all others, as in Sentence Transformers.

On a CPU it is made in tiles (maxsim_cpu.py), and a score has the same bits alone and with any others; on a GPU by a Triton
kernel (maxsim_triton.py).

`maxsim_reference` is the plain formula that both are tested against. Source of the formula: Khattab and Zaharia,
"ColBERT" (2004.12832), 3.3.

Shapes: Q query tokens, T document tokens, M queries, N documents, P pairs, D width.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whimbrel.types import Float32Array, Int64Array, Ragged

EMPTY: Final = -1e9
"""The score of a document without tokens: finite, and below what vectors can reach."""

NO_MATCH: Final = (0.0, -1.0)
"""The greatest similarity to a token of a document without tokens, and where that is."""

Reduce: TypeAlias = Literal["sum", "mean"]
"""What becomes of the maxima of a query's tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenVectors:
    """Vectors of many texts in one array: text i has rows starts_N[i] to ends_N[i]."""

    rows_TD: Tensor
    """float32, float16, bfloat16; int8; or uint8, which is bits: 8 columns to a byte, the first the highest, 1 for 1 and 0 for
    -1."""
    starts_N: Int64Array
    ends_N: Int64Array
    scales_T: Tensor | None = None
    """What each row is multiplied by."""

    @classmethod
    def of(cls, rows_TD: Tensor, offsets_N1: NDArray[np.integer], scales_T: Tensor | None = None) -> TokenVectors:
        """Of texts that lie one after another."""
        offsets = np.asarray(offsets_N1, np.int64)
        return cls(rows_TD, offsets[:-1], offsets[1:], scales_T)

    @classmethod
    def from_array(cls, rows_TD: NDArray[Any], starts_N: NDArray[np.integer], ends_N: NDArray[np.integer]) -> TokenVectors:
        """Of rows on the host, which are not copied."""
        return cls(torch.from_numpy(rows_TD), np.asarray(starts_N, np.int64), np.asarray(ends_N, np.int64))  # pyright: ignore[reportUnknownMemberType]

    def __len__(self) -> int:
        return self.starts_N.size

    @property
    def width(self) -> int:
        return self.rows_TD.shape[1] * (8 if self.rows_TD.dtype == torch.uint8 else 1)

    @property
    def lengths(self) -> Int64Array:
        return self.ends_N - self.starts_N

    def of_text(self, text: int) -> Tensor:
        """The rows of a text, float32."""
        return self.floats(slice(int(self.starts_N[text]), int(self.ends_N[text])))

    def floats(self, rows: slice | Tensor) -> Tensor:
        """Some rows, float32."""
        x_TD = self.rows_TD[rows]
        x_TD = _signs(x_TD) if x_TD.dtype == torch.uint8 else x_TD.float()
        return x_TD if self.scales_T is None else x_TD * self.scales_T[rows, None]


def maxsim(
    queries: TokenVectors,
    documents: TokenVectors,
    query_P: NDArray[np.integer],
    document_P: NDArray[np.integer],
    *,
    reduce: Reduce = "sum",
    threads: Executor | None = None,
    num_threads: int = 1,
) -> Float32Array:
    """The score of each pair (query_P[i], document_P[i]), on the host: (P,). A query without tokens scores 0.

    On a CPU `threads` run the parts, about `num_threads` at a time; the bits are the same with any number. Raises ValueError if
    widths differ.
    """
    if queries.width != documents.width:
        raise ValueError(f"query vectors have width {queries.width}, document vectors {documents.width}")
    if queries.rows_TD.is_cuda:
        from whimbrel.ops.maxsim_triton import maxsim_triton

        scores_P = maxsim_triton(queries, documents, query_P, document_P)
    else:
        from whimbrel.ops.maxsim_cpu import maxsim_cpu

        scores_P = maxsim_cpu(queries, documents, query_P, document_P, threads=threads, num_threads=num_threads)
    if reduce == "mean":
        scores_P /= np.maximum(queries.lengths, 1)[query_P]
    scores_P[documents.lengths[document_P] == 0] = EMPTY
    return scores_P


def maxsim_reference(query_QD: Tensor, document_TD: Tensor) -> float:
    """The formula for one pair, in float64."""
    if not len(document_TD):
        return EMPTY
    return (query_QD.double() @ document_TD.double().T).amax(dim=1).sum().item()


def best_matches(
    queries: TokenVectors, documents: TokenVectors, query_P: NDArray[np.integer], document_P: NDArray[np.integer]
) -> Ragged:
    """For each token of each pair's query its greatest similarity, and the first token of the document that has it, from 0 on.

    (Q, 2) for each pair, on the host. Of a document without tokens 0 and -1. This is for explanations: on a CPU pairs are taken
    one by one."""
    if queries.rows_TD.is_cuda:
        from whimbrel.ops.maxsim_triton import matches_triton

        matches_X2 = matches_triton(queries, documents, query_P, document_P)
    else:
        pairs = zip(query_P.tolist(), document_P.tolist(), strict=True)
        found = [_best_matches(queries.of_text(query), documents.of_text(document)) for query, document in pairs]
        matches_X2 = np.concatenate(found) if found else np.empty((0, 2), np.float32)
    return Ragged(matches_X2, np.concatenate(([0], np.cumsum(queries.lengths[query_P]))))


def _best_matches(query_QD: Tensor, document_TD: Tensor) -> Float32Array:
    if not len(document_TD):
        return np.tile(np.array(NO_MATCH, np.float32), (len(query_QD), 1))
    best_Q, where_Q = (query_QD @ document_TD.T).max(dim=1)
    return np.stack((best_Q.numpy(), where_Q.numpy()), axis=1, dtype=np.float32, casting="same_kind")


def _signs(bits_TB: Tensor) -> Tensor:
    """Packed bits -> 1 and -1, float32."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits_TB.device)
    bits = (bits_TB[..., None] >> shifts) & 1
    return bits.flatten(-2).float() * 2 - 1
