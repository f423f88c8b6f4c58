"""TODO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.late_interaction import MuveraParameters, TokenPooling

Truncate: TypeAlias = Literal["right", "left", "never"]
"""Which end of an over-long text is cut; "never" makes it an error."""

OutputName: TypeAlias = Literal["dense", "sparse", "multi_vector", "scores", "token_scores", "hidden", "token_dense"]
"""What a model may give: a vector per text, weights of vocabulary entries, a vector per token for late interaction, a score per
class (of a text or of a pair), a score per class for each token; and of models with dense vectors the hidden state of each
token, and what a dense vector would be of that token alone."""

InputType: TypeAlias = Literal["query", "document"]
"""What a text is, for models that treat questions and what answers them differently."""

Pair: TypeAlias = tuple[str, str]
"""A query and a document, or any two texts of which one score is asked."""

VectorInput: TypeAlias = "NDArray[Any] | tuple[Int32Array, Float32Array]"
"""What a caller sends in place of a text that is compared: its dense vector (D,), its token vectors (T, D), or the entries and
the weights of its sparse one. Which types there are: `given`."""

PairInput: TypeAlias = "tuple[str | VectorInput, str | VectorInput]"
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

    texts: Sequence[str] | Sequence[Pair] | Sequence[PairInput] | Sequence[Int64Array]
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
    return_offsets: bool = False
    """The answer says which characters each token is of."""
    split_long: bool = False
    """A text that is too long is run in parts; its vector is their mean, weighted by their tokens. Dense vectors only."""
    priority: int = 0
    """Lower numbers run first (as in vLLM)."""
    deadline: float = inf
    """When the answer is of no more use (time.perf_counter): what has not run by then does not run."""
    tenant: str = ""
    """Whose request it is: tenants share an engine evenly, and so do the requests of a tenant."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """What the tokens of some texts are, whole: nothing is cut."""

    texts: Sequence[str]
    special: bool = True
    """Whether special tokens are put around them."""
    prompt_name: str | None = None
    """Of the card's prompts, put before each text."""


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """What texts some token ids are."""

    ids: Sequence[Sequence[int]]
    special: bool = True
    """Whether special tokens are written too."""


_TYPES: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "prompt": ((str, type(None)), "a string"),
    "prompt_name": ((str, type(None)), "a string"),
    "instruction": ((str, type(None)), "a string"),
    "normalize": ((bool, type(None)), "true or false"),
    "activate": ((bool, type(None)), "true or false"),
    "token_pooling": ((TokenPooling, type(None)), "a TokenPooling"),
    "muvera": ((MuveraParameters, type(None)), "MuveraParameters"),
    "max_tokens": ((int, type(None)), "an integer"),
    "max_query_tokens": ((int, type(None)), "an integer"),
    "max_document_tokens": ((int, type(None)), "an integer"),
    "late_chunking": ((bool,), "true or false"),
    "return_offsets": ((bool,), "true or false"),
    "explain": ((bool,), "true or false"),
    "split_long": ((bool,), "true or false"),
    "priority": ((int,), "an integer"),
    "deadline": ((float, int), "a number"),
    "tenant": ((str,), "a string"),
}

_PRIORITIES: Final = range(-(2**31), 2**31)

_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "input_type": ("query", "document"),
    "truncate": ("right", "left", "never"),
    "score_by": ("dense", "sparse", "multi_vector"),
}

_typed_fields: Final = attrgetter(*_TYPES)

_choice_fields: Final = attrgetter(*_CHOICES)


def check_fields(request: Request) -> None:
    """Refuse what no model takes; single texts are the tokenizer's to check. Raises InvalidRequest."""
    _check_lists(request)
    typed = _typed_fields(request)
    if not _types_match(tuple(map(type, typed))):
        _check_types(typed)
    for (name, words), given in zip(_CHOICES.items(), _choice_fields(request), strict=True):
        if given is not None and (not isinstance(given, str) or given not in words):
            raise InvalidRequest(f"{given!r} is not known; it takes {', '.join(words)}.", param=name)
    for name, given in (("max_query_tokens", request.max_query_tokens), ("max_document_tokens", request.max_document_tokens)):
        if given is not None and given < 1:
            raise InvalidRequest(f"must be at least 1, is {given:,}.", param=name)
    if request.priority not in _PRIORITIES:
        raise InvalidRequest(f"must fit into 32 bits, is {request.priority:,}.", param="priority")
    if request.deadline != request.deadline:
        raise InvalidRequest("must be a number, is NaN.", param="deadline")
    if request.prompt is not None and request.prompt_name is not None:
        raise InvalidRequest("give prompt or prompt_name, not both.", param="prompt")
    if request.split_long and request.truncate in ("right", "left"):
        raise InvalidRequest("a text that split_long runs in parts is not cut.", param="truncate")


def _check_types(typed: tuple[object, ...]) -> None:
    for (name, (types, what)), given in zip(_TYPES.items(), typed, strict=True):
        if not isinstance(given, types) or (isinstance(given, bool) and bool not in types):
            raise InvalidRequest(f"must be {what}, is {given!r}.", param=name)


@lru_cache(maxsize=1024)
def _types_match(kinds: tuple[type, ...]) -> bool:
    """Whether these are just the types of _TYPES: then it need not be looked which of them are not."""
    return all(kind in types for kind, (types, _) in zip(kinds, _TYPES.values(), strict=True))


def _check_lists(request: Request) -> None:
    if not _is_list(request.texts):
        raise InvalidRequest(f"must be a list of texts, is {type(request.texts).__name__}.", param="input")
    if not _is_list(request.outputs):
        raise InvalidRequest(f"must be a tuple of the names of outputs, is {request.outputs!r}.", param="outputs")
    for output in request.outputs:
        if not isinstance(cast(object, output), str):
            raise InvalidRequest(f"must be the names of outputs; one is {output!r}.", param="outputs")


def _is_list(given: object) -> bool:
    """A string is a sequence too, of strings even; it is never meant as one."""
    if type(given) in (list, tuple):
        return True
    if isinstance(given, np.ndarray):
        return given.ndim > 0
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)
