"""Tokenization rules of static embedding models.

These models are tables of vectors. They add no special tokens, and may drop unknown tokens. Uses numpy only.

Source: model2vec/model.py, `StaticModel.tokenize` and `encode` (0.10).
"""

import json
from dataclasses import dataclass

import numpy as np
import tokenizers

from whimbrel.tokenizer.validation import TruncationLimit
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import StaticTokenizer


@dataclass(frozen=True, slots=True)
class StaticRules:
    """The card's `StaticTokenizer` resolved for one vocabulary."""

    empty_id: int
    unknown_id: int | None
    """Id of the token that is dropped, or None."""
    token_size: int
    """Characters per token of the limit, or 0 without a limit in characters."""

    def shortens(self, limit: TruncationLimit) -> bool:
        """Return whether texts are truncated before they are tokenised."""
        return self.token_size > 0 and limit.truncate != "never"

    def shorten(self, text: str, limit: TruncationLimit) -> str:
        most = self.token_size * limit.max_length
        return text[-most:] if limit.truncate == "left" else text[:most]

    def fill_empty(self, ids: Int32Array) -> Int32Array:
        return ids if ids.size else np.array([self.empty_id], np.int32)


def find_static_rules(tokenizer: tokenizers.Tokenizer, card: StaticTokenizer) -> StaticRules:
    model: dict[str, object] = json.loads(tokenizer.to_str())["model"] if card.drop_unknown else {}
    name, number = model.get("unk_token"), model.get("unk_id")
    unknown_id = tokenizer.token_to_id(name) if isinstance(name, str) else number if isinstance(number, int) else None
    token_size = int(np.median([len(token) for token in tokenizer.get_vocab()])) if card.cut_characters else 0
    return StaticRules(card.empty_id, unknown_id, token_size)
