"""Random token vectors in every precision, and MaxSim of their pairs by the formula."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from whimbrel.model.ops.token_vectors import EMPTY, TokenVectors


def random_vectors(lengths: list[int], width: int, *, seed: int, dtype: torch.dtype = torch.float32) -> TokenVectors:
    """Return random unit vectors, rounded to the dtype."""
    generator = torch.Generator().manual_seed(seed)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    rows = torch.nn.functional.normalize(torch.randn(int(offsets[-1]), width, generator=generator), dim=-1)
    return vectors_of(rows.to(dtype), offsets)


def vectors_of(rows: torch.Tensor, offsets: NDArray[np.integer]) -> TokenVectors:
    offsets = np.asarray(offsets, np.int64)
    return TokenVectors(rows, offsets[:-1], offsets[1:])


def quantised(texts: TokenVectors) -> TokenVectors:
    """Quantize to int8."""
    scales = texts.rows_TD.abs().amax(dim=1) / 127
    rows = (texts.rows_TD / scales[:, None]).round().to(torch.int8)
    return TokenVectors(rows, texts.starts_N, texts.ends_N)


def binary(texts: TokenVectors) -> TokenVectors:
    """Quantize to bits."""
    rows = torch.from_numpy(np.packbits(texts.rows_TD.numpy() > 0, axis=1))
    return TokenVectors(rows, texts.starts_N, texts.ends_N)


def maxsim_reference(query_QD: torch.Tensor, document_TD: torch.Tensor) -> float:
    """Return the score of one pair by the plain formula, in float64."""
    if not len(document_TD):
        return EMPTY
    return (query_QD.double() @ document_TD.double().T).amax(dim=1).sum().item()


def one(texts: TokenVectors, index: int) -> torch.Tensor:
    return texts.floats(slice(int(texts.starts_N[index]), int(texts.ends_N[index])))


def reference_scores(
    queries: TokenVectors, documents: TokenVectors, query_P: NDArray[np.int64], document_P: NDArray[np.int64]
) -> NDArray[np.float64]:
    return np.array([maxsim_reference(one(queries, q), one(documents, d)) for q, d in zip(query_P, document_P, strict=True)])


def all_pairs(queries: TokenVectors, documents: TokenVectors) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    query_P, document_P = np.divmod(np.arange(len(queries) * len(documents)), len(documents))
    return query_P, document_P
