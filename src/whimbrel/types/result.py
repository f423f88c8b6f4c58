"""TODO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.seq import PairTokens, TokenOffsets


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in each stage; `compute` sums over the batches a request took part in."""

    tokenize: float = 0.0
    queue: float = 0.0
    compute: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of several texts one after another: text i has rows offsets_N1[i] to offsets_N1[i + 1]. A sequence of (rows, D)."""

    rows_XD: Float32Array
    offsets_N1: Int64Array

    def __len__(self) -> int:
        return self.offsets_N1.size - 1

    def __getitem__(self, index: int) -> Float32Array:
        index = range(len(self))[index]
        return self.rows_XD[self.offsets_N1[index] : self.offsets_N1[index + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Weights of vocabulary entries: text i has entries offsets_N1[i] to offsets_N1[i + 1], by ascending id. A sequence of
    (ids, weights)."""

    ids_X: Int32Array
    weights_X: Float32Array
    offsets_N1: Int64Array

    def __len__(self) -> int:
        return self.offsets_N1.size - 1

    def __getitem__(self, index: int) -> tuple[Int32Array, Float32Array]:
        index = range(len(self))[index]
        entries = slice(int(self.offsets_N1[index]), int(self.offsets_N1[index + 1]))
        return self.ids_X[entries], self.weights_X[entries]


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What was asked for, in the order of the texts, float32 and finite; None is what was not."""

    dense: Float32Array | None = None
    """(N, D)"""
    sparse: Sparse | None = None
    multi_vector: Ragged | None = None
    scores: Float32Array | None = None
    """(N, C)"""
    token_scores: Ragged | None = None
    token_matches: Ragged | None = None
    """Of pairs that are explained: for each token vector of the query its greatest similarity to one of the document, and
    where that stands, from 0 on; 0 and -1 if the document has none. (Q, 2) for each pair."""
    muvera: Float32Array | None = None
    """(N, E), in place of `multi_vector`."""
    hidden: Ragged | None = None
    token_dense: Ragged | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """Why a document has its score: what each token of the query found in it."""

    score: float
    query_tokens: tuple[str, ...] | None
    """As they stand in the vocabulary, special ones included: those that have a vector. None: the query came as vectors."""
    document_tokens: tuple[str, ...] | None
    maxima_Q: Float32Array
    """For each token of the query its greatest similarity to a token of the document."""
    places_Q: Int32Array
    """Which token of the document that is, the first of equals; -1 where the document has none."""


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """What a classifier says of texts."""

    labels: tuple[str, ...]
    """The names of the classes."""
    scores_NC: Float32Array
    """Of each text and class: probabilities, unless the checkpoint's activation is none, or logits are asked for."""

    @property
    def best(self) -> list[str]:
        """The class with the highest score, for each text."""
        return [self.labels[best] for best in self.scores_NC.argmax(axis=1)]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document among those that were ranked."""

    index: int
    """Its place among those that were given."""
    score: float


@dataclass(frozen=True, slots=True)
class Entity:
    """A piece of a text, and what it is."""

    label: str
    score: float
    start: int
    """In characters,"""
    end: int
    """one after the last."""
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The answer to one request."""

    outputs: Outputs
    num_tokens: int
    num_truncated: int
    timings: Timings
    token_offsets: Sequence[TokenOffsets] | None = None
    """For each text which characters its tokens are of, if the request asked for it."""
    pair_tokens: Sequence[PairTokens] | None = None
    """Of each pair, if the request asked for an explanation."""

    @property
    def dense(self) -> Float32Array:
        """The dense vectors, of a request that asked for them."""
        assert self.outputs.dense is not None
        return self.outputs.dense
