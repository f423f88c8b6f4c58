"""What models that are mere tables of vectors make of a text's tokens, with nothing put around them. numpy only.

Source: model2vec/model.py, `StaticModel.tokenize` and `encode` (0.10).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import tokenizers

from whimbrel.tokenizer.truncation import TruncationLimit
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import StaticTokenizer


@dataclass(frozen=True, slots=True)
class StaticRules:
    """BareTokens of the card, for one tokenizer."""

    empty_id: int
    unknown_id: int | None
    """This token is left out; None: none is."""
    token_size: int
    """Characters that a token of the limit stands for; 0: characters do not count."""

    def shortens(self, limit: TruncationLimit) -> bool:
        """Whether texts are cut before they are tokenised."""
        return self.token_size > 0 and limit.truncate != "never"

    def shorten(self, text: str, limit: TruncationLimit) -> str:
        """A text without the characters that lie beyond the limit."""
        most = self.token_size * limit.max_length
        return text[-most:] if limit.truncate == "left" else text[:most]

    def filled(self, ids: Int32Array) -> Int32Array:
        """With a token that stands for none, if there is none."""
        return ids if ids.size else np.array([self.empty_id], np.int32)


def find_static_rules(tokenizer: tokenizers.Tokenizer, bare: StaticTokenizer) -> StaticRules:
    """What the card says of bare tokens, with this vocabulary."""
    unknown_id = _unknown_id(tokenizer) if bare.drop_unknown else None
    token_size = int(np.median([len(token) for token in tokenizer.get_vocab()])) if bare.cut_characters else 0
    return StaticRules(bare.empty_id, unknown_id, token_size)


def _unknown_id(tokenizer: tokenizers.Tokenizer) -> int | None:
    """The token for what the vocabulary does not have, if the tokenizer's model names one."""
    model: dict[str, object] = json.loads(tokenizer.to_str())["model"]
    name, number = model.get("unk_token"), model.get("unk_id")
    return tokenizer.token_to_id(name) if isinstance(name, str) else number if isinstance(number, int) else None
