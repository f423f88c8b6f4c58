"""MUVERA: one vector per text whose dot products approximate late-interaction scores. numpy only.

In each repetition, random planes through the origin sort a text's vectors into 2**k_sim buckets. A query's bucket is the sum of
its vectors, a document's bucket their mean. An empty bucket of a document gets the first vector of the nearest bucket that is
not empty (across the fewest planes, then the lowest index). Random signs project every bucket to dim_proj columns, and the
buckets of all repetitions are concatenated. Sources: arXiv 2405.19504; the values, down to the random draws, and the defaults
are those of fastembed/postprocess/muvera.py (0.9).

Compare these vectors by dot product, not by cosine, and only if all parameters are equal, the seed included.

Use this as a first stage, and rerank its results by the token vectors. Many current late-interaction models are anisotropic
(cosines between their tokens up to 0.95): random planes do not separate such vectors, most buckets are empty, and the ranking
fails. Subtracting the mean of a corpus from all token vectors beforehand helps. Measure the recall of your model first.

Theory of operation: the projection is linear, so tokens are projected first, all repetitions in one product. Only dim_proj
columns of each token are summed in buckets, which are numbered through all texts and repetitions. The nearest bucket is found
plane by plane: the cost, "planes crossed, then index", is a sum over planes. Its minimum over all buckets is the minimum over
the two sides of each plane in turn.

Shapes: N texts, T tokens, D width, K planes of all repetitions, P projected columns of all repetitions, E columns of an
encoding, X tokens times repetitions, C buckets of all texts and repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.late_interaction import MuveraParameters
from whimbrel.types.request import InputType
from whimbrel.types.result import Ragged

_Float64Array = NDArray[np.float64]

_MAX_WIDTH: Final = 2**16
_CACHED: Final = 4
_CHUNK_NUMBERS: Final = 2**18
"""Number of projected values of a chunk of texts, 2 MiB, unless one text has more."""
_CHUNK_BUCKETS: Final = 2**16
"""Number of buckets of a chunk of texts, unless one text has more."""


@dataclass(frozen=True, slots=True)
class Muvera:
    """MUVERA encoder with its random draws. Raises InvalidRequest."""

    width: int
    k_sim: int = 5
    dim_proj: int = 16
    """Columns of a bucket; if this is the width, buckets are not projected."""
    r_reps: int = 20
    seed: int = 42
    _planes_DK: _Float64Array = field(init=False, repr=False, compare=False)
    _signs_DP: _Float64Array = field(init=False, repr=False, compare=False)
    """Projections of all repetitions, scaled."""

    def __post_init__(self) -> None:
        if isinstance(width := cast(object, self.width), bool) or not isinstance(width, int) or not 1 <= width <= _MAX_WIDTH:
            raise InvalidRequest(f"must be an integer from 1 to {_MAX_WIDTH:,}, is {width!r:.80}.", param="width")
        MuveraParameters(self.k_sim, self.dim_proj, self.r_reps, self.seed).check_width(self.width)
        generator = np.random.default_rng(self.seed)
        planes_RDK = generator.normal(size=(self.r_reps, self.width, self.k_sim))
        signs_RDP = generator.choice([-1, 1], size=(self.r_reps, self.width, self.dim_proj)) / math.sqrt(self.dim_proj)
        object.__setattr__(self, "_planes_DK", planes_RDK.transpose(1, 0, 2).reshape(self.width, -1))
        object.__setattr__(self, "_signs_DP", signs_RDP.transpose(1, 0, 2).reshape(self.width, -1))

    @property
    def num_buckets(self) -> int:
        return 1 << self.k_sim

    @property
    def num_dims(self) -> int:
        """Dimension of an encoded text."""
        return self.r_reps * self.num_buckets * self.dim_proj

    def encode(self, texts: Ragged, input_type: InputType) -> Float32Array:
        """Return one vector per text, (N, num_dims), from finite token vectors.

        Raises InvalidRequest if token vectors have another width, or if a text has none."""
        _check_texts(texts, self.width)
        encoded_NE = np.empty((len(texts), self.num_dims), np.float32)
        for first, end in self._chunks(texts.offsets_N1):
            offsets_N1 = texts.offsets_N1[first : end + 1]
            rows_TD = texts.rows_XD[offsets_N1[0] : offsets_N1[-1]].astype(np.float64)
            encoded_NE[first:end] = self._encode_chunk(rows_TD, np.diff(offsets_N1), input_type)
        return encoded_NE

    def _chunks(self, offsets_N1: Int64Array) -> Iterator[tuple[int, int]]:
        """Yield ranges of texts that fit the limits of a chunk, at least one text each."""
        num_texts = len(offsets_N1) - 1
        max_texts = max(1, _CHUNK_BUCKETS // (self.r_reps * self.num_buckets))
        max_tokens = _CHUNK_NUMBERS // (self.r_reps * self.dim_proj)
        first = 0
        while first < num_texts:
            fitting = int(np.searchsorted(offsets_N1, int(offsets_N1[first]) + max_tokens, side="right")) - 1
            end = min(max(fitting, first + 1), first + max_texts, num_texts)
            yield first, end
            first = end

    def _encode_chunk(self, rows_TD: _Float64Array, lengths_N: Int64Array, input_type: InputType) -> _Float64Array:
        num_cells = len(lengths_N) * self.r_reps * self.num_buckets
        cell_X, values_XP = self._cells(rows_TD, lengths_N), self._project(rows_TD)
        indices_X = (cell_X[:, None] * self.dim_proj + np.arange(self.dim_proj)).ravel()
        sums = np.bincount(indices_X, weights=values_XP.ravel(), minlength=num_cells * self.dim_proj)
        cells_CP = cast(_Float64Array, sums).reshape(num_cells, self.dim_proj)
        if input_type == "document":
            counts_C = np.bincount(cell_X, minlength=num_cells)
            first_C = np.full(num_cells, len(cell_X))
            np.minimum.at(first_C, cell_X, np.arange(len(cell_X)))
            cells_CP /= np.maximum(counts_C, 1)[:, None]
            empty = np.flatnonzero(counts_C == 0)
            cells_CP[empty] = values_XP[first_C[_nearest(counts_C > 0, self.k_sim)[empty]]]
        return cells_CP.reshape(len(lengths_N), -1)

    def _cells(self, rows_TD: _Float64Array, lengths_N: Int64Array) -> Int64Array:
        """Return the bucket of each token and repetition, numbered through all texts and repetitions."""
        above_XK = (rows_TD @ self._planes_DK > 0).reshape(-1, self.k_sim)
        bucket_X = sum((above_XK[:, plane].astype(np.int64) << plane for plane in range(self.k_sim)), np.int64(0))
        text_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
        repetition_X = (text_T[:, None] * self.r_reps + np.arange(self.r_reps)).ravel()
        return repetition_X * self.num_buckets + bucket_X

    def _project(self, rows_TD: _Float64Array) -> _Float64Array:
        if self.dim_proj == self.width:
            return np.repeat(rows_TD, self.r_reps, axis=0)
        return (rows_TD @ self._signs_DP).reshape(-1, self.dim_proj)


@lru_cache(maxsize=_CACHED)
def make_muvera(width: int, parameters: MuveraParameters) -> Muvera:
    """Return a Muvera; the most recently used ones are cached, because their draws take time."""
    return Muvera(width, parameters.k_sim, parameters.dim_proj, parameters.r_reps, parameters.seed)


def _nearest(is_used_C: NDArray[np.bool_], k_sim: int) -> Int64Array:
    """Return for each bucket the nearest used bucket of its text and repetition, itself if it is used."""
    num_buckets = 1 << k_sim
    bucket_B = np.arange(num_buckets)
    cost_GB = np.where(is_used_C.reshape(-1, num_buckets), bucket_B, (k_sim + 1) * num_buckets)
    for plane in range(k_sim):
        sides = cost_GB.reshape(len(cost_GB), -1, 2, 1 << plane)
        cost_GB = np.minimum(sides, sides[:, :, ::-1] + num_buckets).reshape(cost_GB.shape)
    return (np.arange(len(cost_GB))[:, None] * num_buckets + cost_GB % num_buckets).ravel()


def _check_texts(texts: Ragged, width: int) -> None:
    shape: tuple[int, ...] = texts.rows_XD.shape
    if shape[1:] != (width,):
        raise InvalidRequest(f"token vectors have {shape[-1]:,} numbers; these parameters are for {width:,}.", param="input")
    empty: Any = np.flatnonzero(np.diff(texts.offsets_N1) == 0)
    if len(empty):
        raise InvalidRequest("the text has no token vectors, so it has no encoding.", item=int(empty[0]))
