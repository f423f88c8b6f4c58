"""Validation of texts: their types, and their lengths in characters and in tokens.

The texts are strings, pairs of strings or arrays of token ids, and must not be mixed. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import numpy as np

from whimbrel.errors import Hint, InvalidRequest, TooLong
from whimbrel.types.arrays import Int32Array, Int64Array
from whimbrel.types.seq import Pair, Truncate

MAX_CHARACTERS: Final = 2**20
"""Characters of one text, prompt included. Tokenization takes up to some 400 bytes per character. Texts go to the backend in
slices of at most this size, so it bounds the memory of any request."""
MAX_CHARACTERS_PER_TOKEN: Final = 32
"""Characters that a request may have for each token that it may have."""

Index: TypeAlias = "tuple[int, int | None]"
"""The item of a request that a text is, and its part."""
Indices: TypeAlias = Sequence[Index] | None
"""Those of several texts; None: each text is the item of its number."""


def has_ids(texts: Sequence[object]) -> bool:
    return len(texts) > 0 and isinstance(texts[0], np.ndarray)


def check_texts(texts: Sequence[object]) -> list[str]:
    """Return the texts. Raises InvalidRequest unless all are strings."""
    if set(map(type, texts)) != {str}:
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidRequest(f"must be a string, is {type(text).__name__}.", item=index)
    return cast(list[str], texts)


def check_pairs(texts: Sequence[object]) -> list[Pair]:
    """Return the pairs. Raises InvalidRequest unless all are pairs of strings."""
    for index, pair in enumerate(texts):
        if not isinstance(pair, tuple):
            message = "pairs and other inputs cannot be mixed in one list." if index else "must be a pair of strings."
            raise InvalidRequest(message, item=index)
        parts = cast(tuple[object, ...], pair)
        if len(parts) != 2:
            raise InvalidRequest(f"must be a pair of strings, has {len(parts)} parts.", item=index)
        for number, part in enumerate(parts):
            if not isinstance(part, str):
                kind = "an array" if isinstance(part, np.ndarray) else type(part).__name__
                raise InvalidRequest(f"a pair is made of strings; this is {kind}.", item=index, part=number)
    return cast(list[Pair], list(texts))


def check_ids(texts: Sequence[object], vocab_size: int) -> list[Int32Array]:
    """Return the ids as int32. Raises InvalidRequest unless all are arrays of ids of the vocabulary."""
    for index, row in enumerate(texts):
        if not isinstance(row, np.ndarray):
            raise InvalidRequest("texts and token ids cannot be mixed in one list.", item=index)
        ids = cast(Int64Array, row)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidRequest("must be a text, or an array of token ids of one dimension.", item=index)
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if wrong.size:
            found = f"Token id {ids[wrong[0]]} is out of vocabulary, which has {vocab_size:,} entries. Were these ids made by"
            remedy = "another model's tokenizer? Send text (LangChain: check_embedding_ctx_length=False)."
            raise InvalidRequest(f"{found} {remedy}", item=index, part=int(wrong[0]))
    return [ids.astype(np.int32) for ids in cast(Sequence[Int64Array], texts)]


@dataclass(frozen=True, slots=True)
class TruncationLimit:
    """The length limit of a request's texts and the side that is truncated."""

    max_length: int
    truncate: Truncate
    of_request: bool = False
    """True if the request sets the limit, False if it is the model's."""
    num_inserted: int = 0
    """Tokens that are inserted later, for which `max_length` leaves room; errors count them."""

    def exceeded(self, num_tokens: int, kind: str, index: int) -> bool:
        """Return whether a text or a pair must be truncated. Raises TooLong if the request forbids that."""
        if num_tokens > self.max_length and self.truncate == "never":
            size, limit = num_tokens + self.num_inserted, self.max_length + self.num_inserted
            error = TooLong(f"the {kind} has {size:,} tokens; the limit is {limit:,}.", item=index, hint=Hint.TRUNCATE)
            error.model_limit = None if self.of_request else limit
            raise error
        return num_tokens > self.max_length

    def cut(self, ids: Int32Array, size: int) -> Int32Array:
        """Return the first `size` ids, or the last if the left side is truncated."""
        return ids[ids.size - size :] if self.truncate == "left" else ids[:size]


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """The range of limits that a request may set, in tokens."""

    minimum: int
    default: int
    maximum: int

    def limit(self, requested: int | None, truncate: Truncate) -> TruncationLimit:
        """Return the limit of a request, which may ask for one. Raises InvalidRequest."""
        max_tokens = self.default if requested is None else requested
        if not self.minimum <= max_tokens <= self.maximum:
            message = f"{max_tokens:,} tokens per text; this model takes {self.minimum} to {self.maximum:,}."
            raise InvalidRequest(message, param="max_tokens")
        return TruncationLimit(max_tokens, truncate, requested is not None)
