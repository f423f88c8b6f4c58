"""Results of requests.

Shapes: N texts, X rows of all texts, D columns, C classes, Q query tokens, E columns of an encoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.seq import PairTokens, TokenOffsets


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in each stage. `compute` is the sum over all batches with tokens of the request."""

    tokenize: float = 0.0
    queue: float = 0.0
    compute: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of several texts in one array: text i has rows offsets_N1[i] to offsets_N1[i + 1]. A sequence of (rows, D)."""

    rows_XD: Float32Array
    offsets_N1: Int64Array

    @property
    def nbytes(self) -> int:
        return self.rows_XD.nbytes + self.offsets_N1.nbytes

    def __len__(self) -> int:
        return self.offsets_N1.size - 1

    def __getitem__(self, index: int) -> Float32Array:
        index = range(len(self))[index]
        return self.rows_XD[self.offsets_N1[index] : self.offsets_N1[index + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Weights of vocabulary entries, by ascending id; text i has offsets_N1[i] to offsets_N1[i + 1]. A sequence like Ragged."""

    ids_X: Int32Array
    weights_X: Float32Array
    offsets_N1: Int64Array

    @property
    def nbytes(self) -> int:
        return self.ids_X.nbytes + self.weights_X.nbytes + self.offsets_N1.nbytes

    def __len__(self) -> int:
        return self.offsets_N1.size - 1

    def __getitem__(self, index: int) -> tuple[Int32Array, Float32Array]:
        index = range(len(self))[index]
        entries = slice(int(self.offsets_N1[index]), int(self.offsets_N1[index + 1]))
        return self.ids_X[entries], self.weights_X[entries]


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Requested outputs in the order of the texts, float32 and finite. None for outputs that were not requested."""

    dense: Float32Array | None = None
    """Dense vectors: (N, D)."""
    sparse: Sparse | None = None
    multi_vector: Ragged | None = None
    scores: Float32Array | None = None
    """Scores of texts or pairs: (N, C)."""
    logits: Float32Array | None = None
    """Scores before their activation, which makes large ones equal: (N, C). None: `scores` have no activation."""
    token_scores: Ragged | None = None
    token_matches: Ragged | None = None
    """(Q, 2) for each explained pair: the greatest similarity of each query token to a document token, and that token's index;
    0 and -1 if the document has no tokens."""
    muvera: Float32Array | None = None
    """(N, E); replaces `multi_vector`."""
    hidden: Ragged | None = None
    token_dense: Ragged | None = None

    @property
    def order(self) -> Float32Array:
        """Numbers by which scores are ordered, the greatest first: (N, C)."""
        order_NC = self.scores if self.logits is None else self.logits
        assert order_NC is not None
        return order_NC


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """Explanation of a late-interaction score: the best match of each query token."""

    score: float
    query_tokens: tuple[str, ...] | None
    """Tokens with a vector, special ones included, as the vocabulary spells them. None: the query came as vectors."""
    document_tokens: tuple[str, ...] | None
    maxima_Q: Float32Array
    """Greatest similarity of each query token to a document token."""
    places_Q: Int32Array
    """Index of that document token, the first of equals; -1 if the document has no tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """Classes of texts and their scores."""

    labels: tuple[str, ...]
    scores_NC: Float32Array
    """Probabilities; logits if the checkpoint has no activation or the request turns it off."""
    order_NC: Int64Array
    """Indices of the classes of each text, best first. Equal scores may differ before they are rounded."""

    @property
    def best(self) -> list[str]:
        return [self.labels[index] for index in self.order_NC[:, 0]]

    @property
    def ranked(self) -> list[list[tuple[str, float]]]:
        """Labels and scores of each text, best first."""
        rows = zip(self.order_NC.tolist(), self.scores_NC.tolist(), strict=True)
        return [[(self.labels[index], scores[index]) for index in order] for order, scores in rows]


@dataclass(frozen=True, slots=True)
class Ranked:
    index: int
    score: float


@dataclass(frozen=True, slots=True)
class Entity:
    label: str
    score: float
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Result of one request."""

    outputs: Outputs
    num_tokens: int
    num_truncated: int
    timings: Timings
    token_offsets: Sequence[TokenOffsets] | None = None
    """Token offsets of each text, if requested."""
    pair_tokens: Sequence[PairTokens] | None = None
    """Tokens of each pair, if an explanation was requested."""
    listwise: bool = False
    """True if the scores of a list depend on all its documents."""

    @property
    def dense(self) -> Float32Array:
        """Dense vectors of a request for them."""
        assert self.outputs.dense is not None
        return self.outputs.dense


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of a server, by one of its names."""

    name: str
    max_length: int | None
    """Limit in tokens per text; None if the server does not say."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tokens of one text."""

    ids: Int32Array
    texts: tuple[str, ...]
    """The piece of the text of each token; of special tokens their names."""
    special: NDArray[np.bool_]
    """True for special tokens."""
    chars: Int32Array
    """First character of each token in its text, and the one after its last: (T, 2); 0 and 0 of special tokens."""

    def __len__(self) -> int:
        return len(self.ids)
