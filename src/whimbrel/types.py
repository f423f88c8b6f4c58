"""The frozen nouns that the stages pass to one another. No torch, no I/O.

Shapes in names: T tokens of a batch, B seqs of a batch, N texts of a request, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest
from whimbrel.late_options import MuveraParameters, TokenPooling
from whimbrel.request_checks import check_fields

if TYPE_CHECKING:
    from whimbrel.card import Card
    from whimbrel.condense import Condense
    from whimbrel.outputs import Places
    from whimbrel.parts import Merge, Repeat
    from whimbrel.plan import Plan

Float32Array: TypeAlias = NDArray[np.float32]
Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]

Truncate: TypeAlias = Literal["right", "left", "never"]
"""Which end of an over-long text is cut; "never" makes it an error."""


def read_truncate(given: object) -> Truncate | None:
    """What a caller may say of truncation: an end, "never" or False, and True or None for the model's own way."""
    for word in ("right", "left", "never"):
        if given == word:
            return word
    if given is None or isinstance(given, bool):
        return "never" if given is False else None
    raise InvalidRequest(f"{given!r} is not known; it takes right, left, never, true or false.", param="truncate")


def read_prompt(given: object) -> tuple[str | None, str | None]:
    """(name, text): a word is the name of a prompt; with a space or a colon in it, or empty, it is the text itself."""
    if given is None:
        return None, None
    if not isinstance(given, str):
        raise InvalidRequest(f"must be a string, is {type(given).__name__}.", param="prompt")
    is_text = given == "" or any(character.isspace() or character == ":" for character in given)
    return (None, given) if is_text else (given, None)


OutputName: TypeAlias = Literal["dense", "sparse", "multi_vector", "scores", "token_scores", "hidden", "token_dense"]
"""What a model may give: a vector per text, weights of vocabulary entries, a vector per token for late interaction, a score per
class (of a text or of a pair), a score per class for each token; and of models with dense vectors the hidden state of each
token, and what a dense vector would be of that token alone."""

InputType: TypeAlias = Literal["query", "document"]
"""What a text is, for models that treat questions and what answers them differently."""

Pair: TypeAlias = tuple[str, str]
"""A query and a document, or any two texts of which one score is asked."""

Vectors: TypeAlias = "NDArray[Any] | tuple[Int32Array, Float32Array]"
"""What a caller sends in place of a text that is compared: its dense vector (D,), its token vectors (T, D), or the entries and
the weights of its sparse one. Which types there are: `given`."""

Compared: TypeAlias = "tuple[str | Vectors, str | Vectors]"
"""A pair of which either part may be vectors."""

Similarity: TypeAlias = Literal["cosine", "dot", "euclidean", "manhattan", "maxsim", "meanmaxsim"]
"""How vectors are compared. Distances are negative; of token vectors the sum, or the mean, of each query token's best match."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for, in no dialect.

    `texts` holds strings, pairs of strings or arrays of token ids, not mixed; in pairs that are compared vectors may stand for
    texts. Ids are taken as they are: nothing is put around them. None means "as the checkpoint says" for `prompt_name`,
    `normalize`, `activate`, `dimensions` and `truncate`. Raises InvalidRequest where a field is not of its type, or two
    contradict each other.
    """

    texts: Sequence[str] | Sequence[Pair] | Sequence[Compared] | Sequence[Int64Array]
    outputs: tuple[OutputName, ...] = ()
    """What is asked for, all from one pass; none: what the model is made for."""
    prompt: str | None = None
    """Literal text put before each text."""
    prompt_name: str | None = None
    """The name of one of the card's prompts. At most one of `prompt` and `prompt_name` is given."""
    input_type: InputType | None = None
    """Whether the texts are queries or documents."""
    instruction: str | None = None
    """What a reranker with a template is told to judge; None: the template's own."""
    score_by: OutputName | None = None
    """Of models that give no scores of their own: by which output pairs are compared; None: what the model is made for."""
    explain: bool = False
    """Of token vectors that are compared: the answer says which tokens they are, and what each token of a query matches."""
    dimensions: int | None = None
    normalize: bool | None = None
    """Of vectors: whether they are divided by their Euclidean norm."""
    activate: bool | None = None
    """Of scores: whether the card's activation is applied."""
    max_active_dims: int | None = None
    """Of sparse vectors: so many entries are kept, the largest."""
    token_pooling: TokenPooling | None = None
    """Of documents' token vectors: how they become fewer; a factor of 1: not at all. None: as the checkpoint says."""
    muvera: MuveraParameters | None = None
    """Of token vectors: how they become one, given in their place. It takes `input_type`."""
    truncate: Truncate | None = None
    max_tokens: int | None = None
    """A limit per text below that of the model; of late-interaction models, in place of the usual one of such texts."""
    max_query_tokens: int | None = None
    """Of pairs: a query is cut to so many tokens of its own, before anything is put around it,"""
    max_document_tokens: int | None = None
    """and a document to so many."""
    late_chunking: bool = False
    """The texts are consecutive parts of one document, run in one pass; each part's vector is the mean of its own tokens.

    They are joined as they are, so a space between them belongs to one. Dense vectors only, of models that pool by the mean."""
    locate: bool = False
    """The answer says which characters each token is of."""
    split_long: bool = False
    """A text that is too long is run in parts; its vector is their mean, weighted by their tokens. Dense vectors only."""
    priority: int = 0
    """Lower numbers run first (as in vLLM)."""
    deadline: float = inf
    """When the answer is of no more use (time.perf_counter): what has not run by then does not run."""
    owner: str = ""
    """Whose request it is: owners share an engine evenly, and so do the requests of an owner."""

    def __post_init__(self) -> None:
        check_fields(self)

    def enter(self, *, owner: str, deadline: float) -> None:
        """Say whose it is, and until when it is wanted; of a request that nobody else has seen yet."""
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "deadline", deadline)


@dataclass(frozen=True, slots=True)
class Tokenize:
    """What the tokens of some texts are, whole: nothing is cut."""

    texts: Sequence[str]
    special: bool = True
    """Whether special tokens are put around them."""
    prompt_name: str | None = None
    """Of the card's prompts, put before each text."""


@dataclass(frozen=True, slots=True)
class Decode:
    """What texts some token ids are."""

    rows: Sequence[Sequence[int]]
    special: bool = True
    """Whether special tokens are written too."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a text, prompt and special tokens included."""

    ids_T: Int32Array
    names: tuple[str, ...]
    """How they stand in the vocabulary."""
    special_T: NDArray[np.bool_]
    chars_T2: Int32Array
    """Of which characters of prompt + text they are."""


@dataclass(frozen=True, slots=True, eq=False)
class Seq:
    """One tokenised text, or pair: the unit that is scheduled and packed."""

    ids: Int32Array
    index: int
    """Position among the seqs of its request."""
    prompt_tokens: int = 0
    """Leading tokens that pooling leaves out (models with include_prompt=False)."""
    type_id: int = 0
    second: int = 0
    """Where the second text of a pair begins, if its tokens have a type of their own (type_id + 1); 0: nowhere."""
    num_keys: int = 0
    """Only so many leading tokens are attended to, by all; 0: every token is."""
    is_query: bool = False
    truncated: bool = False
    spans_S2: Int32Array | None = None
    """Ranges of tokens, in order, each of which is pooled to a row of its own; None: the text as a whole."""
    adapter: int = -1
    """Which of the model's adapters is added to its weights; -1: none."""
    tower: int = 0
    """Which of the card's towers runs it."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSpans:
    """Of which characters of a text its tokens are."""

    chars_T2: Int32Array
    special_T: NDArray[np.bool_]
    """Which tokens are none of the text's own: put around it, or of a prompt."""
    inner_T: NDArray[np.bool_]
    """Which tokens go on with the word of the token before."""

    def __getitem__(self, places: slice | Int32Array) -> TokenSpans:
        return TokenSpans(self.chars_T2[places], self.special_T[places], self.inner_T[places])


Part: TypeAlias = "Callable[[], None]"
"""Comparing that may be done in any thread. Raises MemoryError."""


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Vectors of texts that came with a request, of one type: text i has rows offsets_N1[i] to offsets_N1[i + 1]."""

    rows_XD: NDArray[Any]
    """float32, float16, int8 or uint8 (bits); of sparse vectors weights (X, 1)."""
    offsets_N1: Int64Array
    ids_X: Int32Array | None = None
    """Of sparse vectors: the entries, ascending within a text."""

    def __len__(self) -> int:
        return self.offsets_N1.size - 1

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """What it is made of."""
        return [self.offsets_N1, self.rows_XD, *([] if self.ids_X is None else [self.ids_X])]


PairTokens: TypeAlias = "tuple[tuple[str, ...] | None, tuple[str, ...] | None]"
"""The tokens of a query and of a document that have a vector; None of those that came as vectors."""


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Scores of pairs, made of what the model gives for each text: of text queries_P[i] and text documents_P[i].

    The texts are the seqs of the request, and then those whose vectors are `given`."""

    output: OutputName
    similarity: Similarity
    queries_P: Int32Array
    documents_P: Int32Array
    given: tuple[Given, ...] = ()
    explain: bool = False
    """Of token vectors: whether the answer says what each token of a query matches."""

    @property
    def num_pairs(self) -> int:
        return self.queries_P.size


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A tokenised request and what is to become of it: the one message that goes to an engine."""

    seqs: Sequence[Seq]
    places: Places
    """What it asks of the model, and where each row lies."""
    num_tokens: int
    num_truncated: int
    received: float
    """When the request came (time.perf_counter)."""
    tokenize: float
    """Seconds that tokenising took."""
    priority: int = 0
    deadline: float = inf
    owner: str = ""
    comparison: Comparison | None = None
    """What the answer is made of it; None: it is the answer."""
    merge: Merge | Repeat | None = None
    """How what is given for seqs becomes the answer, where they are not the texts; it stays where the request came in."""
    condense: Condense | None = None
    """What becomes of token vectors: of documents that are compared in the engine, else where the request came in."""
    spans: Sequence[TokenSpans] | None = None
    """Of each text, if the request asked for them; they stay where it was tokenised."""
    tokens: Sequence[PairTokens] | None = None
    """Of each pair, if the request asked for an explanation; they stay here too."""
    suspects: Mapping[int, int] = field(default_factory=dict[int, int])
    """Seqs that were on the device when an engine died, by index: each may share a batch with so many seqs at most, and runs
    while nothing else does."""

    @property
    def pooling(self) -> TokenPooling | None:
        """Of documents that are compared."""
        return None if self.comparison is None or self.condense is None else self.condense.pooling


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
    matches: Ragged | None = None
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
    spans: Sequence[TokenSpans] | None = None
    """For each text which characters its tokens are of, if the request asked for it."""
    tokens: Sequence[PairTokens] | None = None
    """Of each pair, if the request asked for an explanation."""

    @property
    def dense(self) -> Float32Array:
        """The dense vectors, of a request that asked for them."""
        assert self.outputs.dense is not None
        return self.outputs.dense


class AsyncEmbedder(Protocol):
    """What a server serves: an engine in this process, or in others. Cancelling `run` drops what has not run yet."""

    @property
    def card(self) -> Card: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def ready(self) -> bool: ...
    @property
    def status(self) -> str: ...
    @property
    def queued_tokens(self) -> int: ...
    async def run(self, request: Request) -> Result: ...
    async def tokenize(self, asked: Tokenize) -> list[Tokens]: ...
    async def decode(self, asked: Decode) -> list[str]: ...
