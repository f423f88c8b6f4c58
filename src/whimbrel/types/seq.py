"""Texts as callers give them, and as tokens.

Shapes: T tokens, S spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.arrays import Int32Array

Truncate: TypeAlias = Literal["right", "left", "never"]
"""End that is cut from a text above the limit; with "never" such a text is an error."""

Pair: TypeAlias = tuple[str, str]
"""A query and a document, or any two texts that are scored together."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenInfo:
    """Tokens of a text, with its prompt and special tokens."""

    ids_T: Int32Array
    names: tuple[str, ...]
    """Tokens as the vocabulary spells them."""
    special_T: NDArray[np.bool_]
    chars_T2: Int32Array
    """Start and end of each token, in characters of prompt + text."""


@dataclass(frozen=True, slots=True, eq=False)
class Seq:
    """Tokenized text or pair: the unit that is scheduled and packed."""

    ids: Int32Array
    index: int
    """Position among the seqs of the request."""
    prompt_tokens: int = 0
    """Number of leading tokens that pooling leaves out (models with include_prompt=False)."""
    type_id: int = 0
    second_text_start: int = 0
    """First token of a pair's second text if that has its own type (type_id + 1); 0: there is none."""
    num_attended: int = 0
    """Number of leading tokens that all tokens attend to; 0: all tokens."""
    is_query: bool = False
    truncated: bool = False
    spans_S2: Int32Array | None = None
    """Ranges of tokens, in order, each pooled to its own row; None: one row for the text."""
    adapter: int = -1
    """Index of the model's adapter for this seq; -1: none."""
    tower: int = 0
    """Index of the card's tower that runs it."""
    prefix_tokens: int = 0
    """Number of leading tokens that are computed apart, once for all seqs of a batch that begin with them; 0: none."""


def count_tokens(seqs: Iterable[Seq]) -> int:
    return sum(seq.ids.size for seq in seqs)


@dataclass(frozen=True, slots=True, eq=False)
class TokenOffsets:
    """Character offsets of a text's tokens."""

    chars_T2: Int32Array
    special_T: NDArray[np.bool_]
    """Mask of special tokens and tokens of the prompt."""
    is_continuation_T: NDArray[np.bool_]
    """Mask of tokens that continue the word of the previous token."""

    def __getitem__(self, tokens: slice | Int32Array) -> TokenOffsets:
        return TokenOffsets(self.chars_T2[tokens], self.special_T[tokens], self.is_continuation_T[tokens])


PairTokens: TypeAlias = "tuple[tuple[str, ...] | None, tuple[str, ...] | None]"
"""Tokens with a vector, of a query and of a document. None for a side that came as vectors."""
