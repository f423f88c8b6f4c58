"""Special tokens around a text.

Probes at load time show which tokens the checkpoint's post-processor adds. A tokenizer that does not add the same tokens to
every text is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import tokenizers

from whimbrel.errors import CheckpointError
from whimbrel.tokenizer.truncation import TruncationLimit
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Card

_FILE: Final = "tokenizer.json"
_PROBES: Final = ("a", "the quick brown fox")


@dataclass(frozen=True, slots=True, eq=False)
class SpecialTokens:
    """The tokens before and after a text, and the token type of the whole."""

    before: Int32Array
    after: Int32Array
    type_id: int = 0

    @property
    def num_tokens(self) -> int:
        return self.before.size + self.after.size

    def surround(self, ids: Int32Array) -> bool:
        """Return whether `ids` begin and end with these tokens."""
        first, last = ids[: self.before.size], ids[ids.size - self.after.size :]
        return np.array_equal(first, self.before) and np.array_equal(last, self.after)

    def truncate_indices(self, ids: Int32Array, limit: TruncationLimit) -> slice | Int32Array:
        """Return which tokens of a text the limit keeps. Special tokens are kept, unless `ids` came without them."""
        if ids.size <= limit.max_length:
            return slice(None)
        places = np.arange(ids.size, dtype=np.int32)
        if not self.surround(ids):
            return limit.cut(places, limit.max_length)
        first, end = self.before.size, ids.size - self.after.size
        return np.concatenate((places[:first], limit.cut(places[first:end], limit.max_length - self.num_tokens), places[end:]))


def find_special_tokens(tokenizer: tokenizers.Tokenizer, card: Card) -> SpecialTokens:
    """Return the special tokens. Raises CheckpointError if they depend on the text or have an unknown token type."""
    if card.tokenizer.static is not None:
        return SpecialTokens(np.empty(0, np.int32), np.empty(0, np.int32))
    results = {_split_text(tokenizer, probe) for probe in _PROBES}
    if len(results) != 1:
        raise CheckpointError("does not put the same tokens around every text.", file=_FILE, key="post_processor")
    before, after, type_ids = results.pop()
    num_types = card.encoder.type_vocab_size
    type_id = max(type_ids) if num_types > 1 else 0
    if num_types > 1 and (len(type_ids) != 1 or type_id >= num_types):
        raise CheckpointError(f"gives one text the token types {sorted(type_ids)}.", file=_FILE, key="post_processor")
    return SpecialTokens(np.array(before, np.int32), np.array(after, np.int32), type_id)


def _split_text(tokenizer: tokenizers.Tokenizer, text: str) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]:
    """Return (before, after, token types) of one text."""
    own = tokenizer.encode(text, add_special_tokens=False).ids
    encoding = tokenizer.encode(text)
    ids = encoding.ids
    start = next((i for i in range(len(ids) - len(own) + 1) if ids[i : i + len(own)] == own), None)
    if not own or start is None:
        raise CheckpointError("does not simply put special tokens around a text.", file=_FILE, key="post_processor")
    return tuple(ids[:start]), tuple(ids[start + len(own) :]), frozenset(encoding.type_ids)
