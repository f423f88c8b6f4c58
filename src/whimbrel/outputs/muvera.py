"""Token vectors -> one vector, whose dot products are about the scores of late interaction: MUVERA. numpy only.

In each repetition, random planes through the origin sort a text's vectors into 2**k_sim buckets. A query's bucket is the sum of
its vectors, a document's their mean; into an empty bucket of a document goes the first vector of the nearest one that is not
(across the fewest planes, and of equally near ones the lowest). Every bucket is projected to dim_proj numbers by random signs,
and all buckets of all repetitions lie one after another. Sources: arXiv 2405.19504; for the numbers, to the random draws,
fastembed/postprocess/muvera.py (0.9), with its defaults.

Such vectors are compared by dot product, not cosine, and only if made with the same parameters, of which the seed is one.

This is a first stage: what it finds is to be ranked by the token vectors. Many late models of today are anisotropic (cosines
between their tokens up to 0.95): no random plane parts such vectors, most buckets are empty, and the ranking falls apart.
Taking a corpus' mean off all token vectors beforehand helps. Measure the recall of your model before you rely on it.

Theory of operation: projecting is linear, so tokens are projected first, all repetitions in one product, and only dim_proj
numbers of each are added up in buckets, which are counted through all texts and repetitions. The nearest bucket is found plane
by plane: the cost, "planes crossed, then number", is a sum over planes, so its minimum over all buckets is that over the two
sides of each plane in turn.
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
"""So many projected numbers are worked on at once, 2 MiB, unless a text alone has more."""
_CHUNK_BUCKETS: Final = 2**16
"""And so many buckets."""


@dataclass(frozen=True, slots=True)
class Muvera:
    """The parameters, and what is drawn with them. Raises InvalidRequest."""

    width: int
    """Of the token vectors."""
    k_sim: int = 5
    """Planes: 2**k_sim buckets."""
    dim_proj: int = 16
    """Numbers of a bucket; where it is the width, buckets are not projected."""
    r_reps: int = 20
    """Repetitions, with planes and signs of their own."""
    seed: int = 42
    _planes_DK: _Float64Array = field(init=False, repr=False, compare=False)
    """The planes of all repetitions, side by side."""
    _signs_DP: _Float64Array = field(init=False, repr=False, compare=False)
    """And the projections, scaled."""

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
        """Of an encoded text."""
        return self.r_reps * self.num_buckets * self.dim_proj

    def encode(self, texts: Ragged, input_type: InputType) -> Float32Array:
        """One vector for each text, (N, num_numbers). The token vectors are finite.

        Raises InvalidRequest where they are of another width, or a text has none."""
        _check_texts(texts, self.width)
        encoded_NE = np.empty((len(texts), self.num_dims), np.float32)
        for first, end in self._chunks(texts.offsets_N1):
            offsets_N1 = texts.offsets_N1[first : end + 1]
            rows_TD = texts.rows_XD[offsets_N1[0] : offsets_N1[-1]].astype(np.float64)
            encoded_NE[first:end] = self._encode_chunk(rows_TD, np.diff(offsets_N1), input_type)
        return encoded_NE

    def _chunks(self, offsets_N1: Int64Array) -> Iterator[tuple[int, int]]:
        """Ranges of texts: as many as memory is to hold, one at least."""
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
        """X: tokens times repetitions; C: buckets of all texts and repetitions."""
        num_cells = len(lengths_N) * self.r_reps * self.num_buckets
        cell_X, values_XP = self._cells(rows_TD, lengths_N), self._projected(rows_TD)
        places_X = (cell_X[:, None] * self.dim_proj + np.arange(self.dim_proj)).ravel()
        sums = np.bincount(places_X, weights=values_XP.ravel(), minlength=num_cells * self.dim_proj)
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
        """Of each token and repetition: the bucket that it falls into, counted through all texts and repetitions."""
        above_XK = (rows_TD @ self._planes_DK > 0).reshape(-1, self.k_sim)
        bucket_X = sum((above_XK[:, plane].astype(np.int64) << plane for plane in range(self.k_sim)), np.int64(0))
        text_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
        repetition_X = (text_T[:, None] * self.r_reps + np.arange(self.r_reps)).ravel()
        return repetition_X * self.num_buckets + bucket_X

    def _projected(self, rows_TD: _Float64Array) -> _Float64Array:
        if self.dim_proj == self.width:
            return np.repeat(rows_TD, self.r_reps, axis=0)
        return (rows_TD @ self._signs_DP).reshape(-1, self.dim_proj)


@lru_cache(maxsize=_CACHED)
def make_muvera(width: int, parameters: MuveraParameters) -> Muvera:
    """The same draws again, for some that were used last."""
    return Muvera(width, parameters.k_sim, parameters.dim_proj, parameters.r_reps, parameters.seed)


def _nearest(is_used_C: NDArray[np.bool_], k_sim: int) -> Int64Array:
    """For each bucket the nearest of its text and repetition that holds something: itself, if it does."""
    num_buckets = 1 << k_sim
    bucket_B = np.arange(num_buckets)
    cost_GB = np.where(is_used_C.reshape(-1, num_buckets), bucket_B, (k_sim + 1) * num_buckets)
    for plane in range(k_sim):
        sides = cost_GB.reshape(len(cost_GB), -1, 2, 1 << plane)
        cost_GB = np.minimum(sides, sides[:, :, ::-1] + num_buckets).reshape(cost_GB.shape)
    return (np.arange(len(cost_GB))[:, None] * num_buckets + cost_GB % num_buckets).ravel()


def _check_texts(texts: Ragged, width: int) -> None:
    given: tuple[int, ...] = texts.rows_XD.shape
    if given[1:] != (width,):
        raise InvalidRequest(f"token vectors have {given[-1]:,} numbers; these parameters are for {width:,}.", param="input")
    empty: Any = np.flatnonzero(np.diff(texts.offsets_N1) == 0)
    if len(empty):
        raise InvalidRequest("the text has no token vectors, so it has no encoding.", item=int(empty[0]))
