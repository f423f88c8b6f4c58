"""Cosines between two lists of vectors, scores or token vectors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import SetupError
from whimbrel.types.arrays import Float32Array


def cosines(ours: Sequence[Float32Array], theirs: Sequence[Float32Array]) -> NDArray[np.float64]:
    """Return a cosine for each text: of its vector, the lowest of its token vectors; one for all scores. Raises SetupError."""
    if len(ours) != len(theirs):
        raise SetupError(f"one side has {len(ours)} results, the other {len(theirs)}.")
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape:
            raise SetupError(f"text {number} has shape {list(a.shape)} on one side, {list(b.shape)} on the other.")
    if ours and ours[0].size == 1:
        ours, theirs = ([np.array([row.ravel()[0] for row in rows], np.float32)] for rows in (ours, theirs))
    return np.array([_rows(a, b).min(initial=1.0) for a, b in zip(ours, theirs, strict=True)], np.float64)


def _rows(a: Float32Array, b: Float32Array) -> NDArray[np.float64]:
    a_ND, b_ND = (np.atleast_2d(each).astype(np.float64) for each in (a, b))
    norms_N = np.linalg.norm(a_ND, axis=1) * np.linalg.norm(b_ND, axis=1)
    same_N = (a_ND == b_ND).all(axis=1)  # two rows of zeros
    products_N: NDArray[np.float64] = (a_ND * b_ND).sum(axis=1)
    return np.where(same_N, 1.0, products_N / np.where(norms_N > 0, norms_N, 1.0))
