"""Requests, independent of any API dialect, and the types of their fields. Their owners and deadlines are beside them
(scheduling.py).

A `Request` that exists has fields of valid types that do not contradict each other. Checks that need the model
(`outputs/requested.py`) or the texts (`tokenizer/validation.py`) come later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.late_interaction import MuveraParameters, TokenPooling
from whimbrel.types.seq import Pair, Truncate
from whimbrel.types.validation import fields_struct, validate

OutputName: TypeAlias = Literal["dense", "sparse", "multi_vector", "scores", "token_scores", "hidden", "token_dense"]
"""Outputs of a model.

- `dense`: a vector per text.
- `sparse`: weights of vocabulary entries per text.
- `multi_vector`: a vector per token, for late interaction.
- `scores`: a score per class of a text or pair.
- `token_scores`: a score per class of each token.
- `hidden`: the hidden state of each token, of models with dense vectors.
- `token_dense`: the dense vector of each token alone, of models with dense vectors.
"""

ScoringOutput: TypeAlias = Literal["dense", "sparse", "multi_vector"]
"""Outputs by which a pair of texts can be scored."""

InputType: TypeAlias = Literal["query", "document"]
"""Role of a text, for models that encode queries and documents differently."""

VectorInput: TypeAlias = NDArray[Any] | tuple[Int32Array, Float32Array]
"""Vectors in place of a text, as `outputs/stored_vectors.py` describes them."""

PairInput: TypeAlias = tuple[str | VectorInput, str | VectorInput]
"""A pair either side of which may be vectors."""

Similarity: TypeAlias = Literal["cosine", "dot", "euclidean", "manhattan", "maxsim", "meanmaxsim"]
"""Distances are negative. "maxsim" sums the best matches of a query's tokens; "meanmaxsim" takes their mean."""


def read_truncate(value: object) -> Truncate | None:
    """Return the truncation that a caller asked for: an end, "never" (also False), or None (also True) for the default."""
    for word in ("right", "left", "never"):
        if value == word:
            return word
    if value is None or isinstance(value, bool):
        return "never" if value is False else None
    raise InvalidRequest(f"{value!r} is not known; it takes right, left, never, true or false.", param="truncate")


def splits(split_long: bool | None, truncate: object) -> bool | None:
    """Return `split_long` of a request: False where it says nothing and `truncate` asks to cut as the model does."""
    return False if split_long is None and truncate is True else split_long


def read_prompt(value: object) -> tuple[str | None, str | None]:
    """Return (name, text) of a prompt. A word is a name; a string that is empty or has a space or a colon is the text."""
    if value is None:
        return None, None
    if not isinstance(value, str):
        raise InvalidRequest(f"must be a string, is {type(value).__name__}.", param="prompt")
    is_text = value == "" or any(character.isspace() or character == ":" for character in value)
    return (None, value) if is_text else (value, None)


@dataclass(frozen=True, slots=True)
class Request:
    """Texts, the outputs to compute, and how.

    `texts` holds strings, pairs of strings, or arrays of token ids, not mixed. In pairs that are scored by their vectors,
    vectors may stand for texts. Token ids are used as they are; no special tokens are added. None means the checkpoint's
    default for `prompt_name`, `normalize`, `activate`, `dimensions` and `truncate`. Fields that are options of the verbs are
    explained in options.py. Raises InvalidRequest if a field has a wrong type or value, or if two contradict each other.
    """

    texts: Sequence[str] | Sequence[Pair] | Sequence[PairInput] | Sequence[Int64Array]
    outputs: tuple[OutputName, ...] = ()
    """Outputs to compute in one pass; empty: the model's main output."""
    prompt: str | None = None
    """Text put before each text as it is."""
    prompt_name: str | None = None
    """Name of one of the card's prompts. Excludes `prompt`."""
    input_type: InputType | None = None
    adapter: str | None = None
    """None: that of the prompt, or none."""
    instruction: str | None = None
    """Instruction for a reranker with a template; None: the template's own."""
    listwise: bool = False
    """Judge the pairs, which have one query, as one list. Only listwise rerankers differ: they see all documents together."""
    score_by: ScoringOutput | None = None
    explain: bool = False
    """Return the tokens of pairs scored by token vectors, and the best match of each query token."""
    hypotheses: tuple[str, ...] = ()
    """Statements that an NLI model judges by each text. A text has the scores of its pairs with them, one after another. Of a
    pair above the limit the text is cut. Only for texts and the output `scores`."""
    labels: tuple[str, ...] = ()
    """Labels of the entities to find, of a model that takes them. Only for texts and the output `token_scores`."""
    dimensions: int | None = None
    normalize: bool | None = None
    activate: bool | None = None
    max_active_dims: Annotated[int, Meta(ge=1)] | None = None
    token_pooling: TokenPooling | None = None
    muvera: MuveraParameters | None = None
    truncate: Truncate | None = None
    max_tokens: int | None = None
    max_query_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_document_tokens: Annotated[int, Meta(ge=1)] | None = None
    late_chunking: bool = False
    """Chunks are concatenated as they are, so a space between two of them belongs to one. Only for mean pooling."""
    chunk_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Return the mean of every N tokens of each text, special tokens and the prompt included, in place of one vector (late
    chunking by length). Only for dense vectors with mean pooling. The result has the offsets of all tokens."""
    add_special_tokens: bool = True
    """Put the tokenizer's special tokens around texts."""
    return_offsets: bool = False
    """Return the character offsets of each token."""
    split_long: bool | None = None
    """None: as the plan says, unless the request sets a limit or an end to cut. Only for dense vectors."""

    def __post_init__(self) -> None:
        _check_lists(self)
        validate(self, _Scalars)
        for name, kind, noun in _PARAMETERS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidRequest(f"must be {noun}, is {value!r:.80}.", param=name)
        if self.prompt is not None and self.prompt_name is not None:
            raise InvalidRequest("give prompt or prompt_name, not both.", param="prompt")
        if self.chunk_tokens is not None and self.truncate in ("right", "left"):
            raise InvalidRequest("a text that is split into chunks of tokens is not cut.", param="truncate")
        if self.split_long and self.truncate in ("right", "left"):
            raise InvalidRequest("a text that split_long runs in parts is not cut.", param="truncate")

    @property
    def num_inputs(self) -> int:
        """Number of inputs of the model: texts, pairs, or texts with each hypothesis."""
        return len(self.texts) * max(1, len(self.hypotheses))


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Texts to tokenize without truncation."""

    texts: Sequence[str]
    special: bool = True
    """Add the tokenizer's special tokens."""
    prompt_name: str | None = None
    """Name of the card's prompt that is put before each text."""


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Token ids to turn into texts."""

    ids: Sequence[Sequence[int]]
    special: bool = True
    """Write special tokens too."""


_PARAMETERS: Final = (("token_pooling", TokenPooling, "a TokenPooling"), ("muvera", MuveraParameters, "MuveraParameters"))
"""Fields that hold objects. msgspec would also accept a mapping here, and the request would keep it."""

_NOT_SCALAR: Final = ("texts", "outputs", "hypotheses", "labels", *(name for name, *_ in _PARAMETERS))

_Scalars: Final = fields_struct(Request, without=_NOT_SCALAR)


def _check_lists(request: Request) -> None:
    if not _is_list(request.texts):
        raise InvalidRequest(f"must be a list of texts, is {type(request.texts).__name__}.", param="input")
    if not _is_list(request.outputs):
        raise InvalidRequest(f"must be a tuple of the names of outputs, is {request.outputs!r}.", param="outputs")
    for output in request.outputs:
        if not isinstance(cast(object, output), str):
            raise InvalidRequest(f"must be the names of outputs; one is {output!r}.", param="outputs")
    for param, value in (("hypotheses", request.hypotheses), ("labels", request.labels)):
        if type(value) is not tuple or not all(isinstance(cast(object, each), str) for each in value):
            raise InvalidRequest(f"must be a tuple of strings, is {value!r:.80}.", param=param)


def _is_list(value: object) -> bool:
    if type(value) in (list, tuple):
        return True
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
