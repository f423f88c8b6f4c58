"""Which characters of a text its tokens are of, and which tokens go on with a word.

Source of the latter: transformers/pipelines/token_classification.py (5.23), gather_pre_entities.
"""

from __future__ import annotations

import numpy as np
import tokenizers

from whimbrel.card import TokenizerCard
from whimbrel.tokenizer_file import unknown_token
from whimbrel.types import TokenSpans


def unknown_id(tokenizer: tokenizers.Tokenizer, card: TokenizerCard) -> int | None:
    """The id of the token for what the vocabulary does not have."""
    name = unknown_token(card)
    return None if name is None else tokenizer.token_to_id(name)


def find_spans(
    tokenizer: tokenizers.Tokenizer, encoding: tokenizers.Encoding, text: str, prompt: str, unknown_id: int | None
) -> TokenSpans:
    """Of the encoding of prompt + text. Characters are counted from where the text begins."""
    chars_T2 = np.array(encoding.offsets, np.int32).reshape(-1, 2) - len(prompt)
    special_T = np.array(encoding.special_tokens_mask, np.bool_)
    if prompt:
        special_T |= chars_T2[:, 1] <= 0
    chars_T2 = np.maximum(chars_T2, 0)
    starts, ends = chars_T2.T
    if getattr(tokenizer.model, "continuing_subword_prefix", None):
        lengths = np.fromiter(map(len, encoding.tokens), np.int32, len(encoding.tokens))
        inner_T = lengths != ends - starts
    else:  # a space on either side of where a token begins
        is_space = np.array([True, *(character == " " for character in text), False])
        inner_T = (starts > 0) & ~(is_space[starts] | is_space[starts + 1])
    if unknown_id is not None:
        inner_T &= np.array(encoding.ids) != unknown_id
    return TokenSpans(chars_T2, special_T, inner_T)
