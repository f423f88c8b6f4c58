"""The frozen nouns that the stages pass to one another. No torch, no I/O.

Shapes in names: T tokens of a batch, B seqs of a batch, N texts of a request, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest

if TYPE_CHECKING:
    from whimbrel.card import Card
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


Task: TypeAlias = Literal["embed"]


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for, in no dialect.

    `texts` holds strings or arrays of token ids, not both. Ids are taken as they are: nothing is put around them.
    None means "as the checkpoint says" for `prompt_name`, `normalize`, `dimensions` and `truncate`.
    """

    texts: Sequence[str] | Sequence[Int64Array]
    prompt: str | None = None
    """Literal text put before each text."""
    prompt_name: str | None = None
    """The name of one of the card's prompts. At most one of `prompt` and `prompt_name` is given."""
    dimensions: int | None = None
    normalize: bool | None = None
    truncate: Truncate | None = None
    max_tokens: int | None = None
    """A limit per text below that of the model."""
    priority: int = 0
    """Lower numbers run first (as in vLLM)."""
    deadline: float = inf
    """When the answer is of no more use (time.perf_counter): what has not run by then does not run."""
    owner: str = ""
    """Whose request it is: owners share an engine evenly, and so do the requests of an owner."""


@dataclass(frozen=True, slots=True, eq=False)
class Seq:
    """One tokenised text: the unit that is scheduled and packed."""

    ids: Int32Array
    index: int
    """Position of the text in its request."""
    prompt_tokens: int = 0
    """Leading tokens that pooling leaves out (models with include_prompt=False)."""
    type_id: int = 0
    truncated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A tokenised request and what is to become of it: the one message that goes to an engine."""

    seqs: Sequence[Seq]
    dimensions: int
    """Width of the vectors asked for."""
    normalize: bool
    num_tokens: int
    num_truncated: int
    received: float
    """When the request came (time.perf_counter)."""
    tokenize: float
    """Seconds that tokenising took."""
    priority: int = 0
    deadline: float = inf
    owner: str = ""
    suspects: Mapping[int, int] = field(default_factory=dict[int, int])
    """Texts that were on the device when an engine died, by index: each may share a batch with so many seqs at most, and runs
    while nothing else does."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in each stage; `compute` sums over the batches a request took part in."""

    tokenize: float = 0.0
    queue: float = 0.0
    compute: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The answer to one request: `vectors_ND` in the order of its texts, float32 and finite."""

    vectors_ND: Float32Array
    num_tokens: int
    num_truncated: int
    timings: Timings


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
