"""TODO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.arrays import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class TokenInfo:
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
    second_text_start: int = 0
    """Where the second text of a pair begins, if its tokens have a type of their own (type_id + 1); 0: nowhere."""
    num_attended: int = 0
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
class TokenOffsets:
    """Of which characters of a text its tokens are."""

    chars_T2: Int32Array
    special_T: NDArray[np.bool_]
    """Which tokens are none of the text's own: put around it, or of a prompt."""
    is_continuation_T: NDArray[np.bool_]
    """Which tokens go on with the word of the token before."""

    def __getitem__(self, places: slice | Int32Array) -> TokenOffsets:
        return TokenOffsets(self.chars_T2[places], self.special_T[places], self.is_continuation_T[places])


PairTokens: TypeAlias = "tuple[tuple[str, ...] | None, tuple[str, ...] | None]"
"""The tokens of a query and of a document that have a vector; None of those that came as vectors."""
