"""MUVERA: one vector per text whose dot products approximate late-interaction scores. numpy only.

In each repetition, random planes through the origin sort a text's vectors into 2**k_sim buckets. A query's bucket is the sum of
its vectors, a document's bucket their mean. An empty bucket of a document gets the first vector of the nearest bucket that is
not empty (across the fewest planes, then the lowest index). Random signs project every bucket to dim_proj columns, and the
buckets of all repetitions are concatenated. Sources: arXiv 2405.19504; the values, down to the random draws, and the defaults
are those of fastembed/postprocess/muvera.py (0.9).

Many late-interaction models are anisotropic (cosines between their tokens up to 0.95): random planes do not separate such
vectors, most buckets are empty, and the ranking fails. docs/guides/late-interaction.md says how to use the vectors.

Theory of operation: the projection is linear, so tokens are projected first, all repetitions in one product. Only dim_proj
columns of each token are summed in buckets, which are numbered through all texts and repetitions. The nearest bucket is found
plane by plane: the cost, "planes crossed, then index", is a sum over planes. Its minimum over all buckets is the minimum over
the two sides of each plane in turn.

Shapes: N texts, T tokens, D width, K planes of all repetitions, P projected columns of all repetitions, E columns of an
encoding, X tokens times repetitions, C buckets of all texts and repetitions.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.late_interaction import MuveraParameters
from whimbrel.types.request import InputType
from whimbrel.types.result import Ragged

_Float64Array = NDArray[np.float64]

_CHUNK_NUMBERS: Final = 2**18
"""Number of projected values of a chunk of texts, 2 MiB, unless one text has more."""
_CHUNK_BUCKETS: Final = 2**16
"""Number of buckets of a chunk of texts, unless one text has more."""


def encode_muvera(texts: Ragged, parameters: MuveraParameters, input_type: InputType) -> Float32Array:
    """Return one vector per text, (N, E), from finite token vectors. Raises InvalidRequest if a text has none."""
    if (empty := np.flatnonzero(np.diff(texts.offsets_N1) == 0)).size:
        raise InvalidRequest("the text has no token vectors, so it has no encoding.", item=int(empty[0]))
    encoded_NE = np.empty((len(texts), parameters.num_dims), np.float32)
    for first, end in _chunks(texts.offsets_N1, parameters):
        offsets_N1 = texts.offsets_N1[first : end + 1]
        rows_TD = texts.rows_XD[offsets_N1[0] : offsets_N1[-1]].astype(np.float64)
        encoded_NE[first:end] = _encode_chunk(rows_TD, np.diff(offsets_N1), parameters, input_type)
    return encoded_NE


@lru_cache(maxsize=4)
def draw(width: int, parameters: MuveraParameters) -> tuple[_Float64Array, _Float64Array]:
    """Return the planes (D, K), and the signs (D, P), scaled. The most recent draws are cached, because they take time."""
    generator = np.random.default_rng(parameters.seed)
    planes_RDK = generator.normal(size=(parameters.r_reps, width, parameters.k_sim))
    signs_RDP = generator.choice([-1, 1], size=(parameters.r_reps, width, parameters.dim_proj))
    signs_RDP = signs_RDP / math.sqrt(parameters.dim_proj)
    return planes_RDK.transpose(1, 0, 2).reshape(width, -1), signs_RDP.transpose(1, 0, 2).reshape(width, -1)


def _chunks(offsets_N1: Int64Array, parameters: MuveraParameters) -> Iterator[tuple[int, int]]:
    """Yield ranges of texts that fit the limits of a chunk, at least one text each."""
    num_texts = len(offsets_N1) - 1
    max_texts = max(1, _CHUNK_BUCKETS // (parameters.r_reps << parameters.k_sim))
    max_tokens = _CHUNK_NUMBERS // (parameters.r_reps * parameters.dim_proj)
    first = 0
    while first < num_texts:
        fitting = int(np.searchsorted(offsets_N1, int(offsets_N1[first]) + max_tokens, side="right")) - 1
        end = min(max(fitting, first + 1), first + max_texts, num_texts)
        yield first, end
        first = end


def _encode_chunk(
    rows_TD: _Float64Array, lengths_N: Int64Array, parameters: MuveraParameters, input_type: InputType
) -> _Float64Array:
    num_reps, dim_proj = parameters.r_reps, parameters.dim_proj
    planes_DK, signs_DP = draw(rows_TD.shape[1], parameters)
    cell_X = _cells(rows_TD @ planes_DK > 0, lengths_N, parameters)
    is_plain = dim_proj == rows_TD.shape[1]
    values_XP = np.repeat(rows_TD, num_reps, axis=0) if is_plain else (rows_TD @ signs_DP).reshape(-1, dim_proj)
    num_cells = len(lengths_N) * num_reps << parameters.k_sim
    indices_X = (cell_X[:, None] * dim_proj + np.arange(dim_proj)).ravel()
    sums = np.bincount(indices_X, weights=values_XP.ravel(), minlength=num_cells * dim_proj)
    cells_CP = cast(_Float64Array, sums).reshape(num_cells, dim_proj)
    if input_type == "document":
        counts_C = np.bincount(cell_X, minlength=num_cells)
        first_C = np.full(num_cells, len(cell_X))
        np.minimum.at(first_C, cell_X, np.arange(len(cell_X)))
        cells_CP /= np.maximum(counts_C, 1)[:, None]
        empty = np.flatnonzero(counts_C == 0)
        cells_CP[empty] = values_XP[first_C[_nearest(counts_C > 0, parameters.k_sim)[empty]]]
    return cells_CP.reshape(len(lengths_N), -1)


def _cells(above_TK: NDArray[np.bool_], lengths_N: Int64Array, parameters: MuveraParameters) -> Int64Array:
    """Return the bucket of each token and repetition, numbered through all texts and repetitions: (X,)."""
    num_reps, k_sim = parameters.r_reps, parameters.k_sim
    above_XK = above_TK.reshape(-1, k_sim)
    bucket_X = sum((above_XK[:, plane].astype(np.int64) << plane for plane in range(k_sim)), np.int64(0))
    text_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
    repetition_X = (text_T[:, None] * num_reps + np.arange(num_reps)).ravel()
    return (repetition_X << k_sim) + bucket_X


def _nearest(is_used_C: NDArray[np.bool_], k_sim: int) -> Int64Array:
    """Return for each bucket the nearest used bucket of its text and repetition, itself if it is used."""
    num_buckets = 1 << k_sim
    bucket_B = np.arange(num_buckets)
    cost_GB = np.where(is_used_C.reshape(-1, num_buckets), bucket_B, (k_sim + 1) * num_buckets)
    for plane in range(k_sim):
        sides = cost_GB.reshape(len(cost_GB), -1, 2, 1 << plane)
        cost_GB = np.minimum(sides, sides[:, :, ::-1] + num_buckets).reshape(cost_GB.shape)
    return (np.arange(len(cost_GB))[:, None] * num_buckets + cost_GB % num_buckets).ravel()
