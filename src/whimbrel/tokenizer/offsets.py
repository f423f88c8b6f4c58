"""Character offsets of tokens and word continuation.

Source of the continuation rule: transformers/pipelines/token_classification.py (5.23), gather_pre_entities.
"""

from collections.abc import Sequence

import numpy as np
import tokenizers

from whimbrel.checkpoint.tokenizer.classes import unknown_token
from whimbrel.tokenizer.tokenizer import EncodeParams, Tokenizer
from whimbrel.tokenizer.validation import check_texts
from whimbrel.types.seq import Seq, TokenOffsets


def encode_with_offsets(
    tokenizer: Tokenizer, texts: Sequence[object], params: EncodeParams
) -> tuple[list[Seq], list[TokenOffsets]]:
    """Encode texts as `Tokenizer.encode` does, with the character offsets of their tokens. Offsets do not count the prompt."""
    strings = check_texts(texts)
    seqs: list[Seq] = []
    spans: list[TokenOffsets] = []
    for encodings in tokenizer.backend.encode_batches(strings, params.prompt, with_offsets=True):
        for encoding in encodings:
            ids = np.array(encoding.ids, np.int32)
            kept = tokenizer.special.truncate_indices(ids, params.limit)
            spans.append(_find_offsets(tokenizer, encoding, strings[len(spans)], params.prompt)[kept])
            seqs.append(tokenizer.seq(ids, len(seqs), params))
    return seqs, spans


def _find_offsets(tokenizer: Tokenizer, encoding: tokenizers.Encoding, text: str, prompt: str) -> TokenOffsets:
    """Return the offsets in the encoding of prompt + text, relative to the start of the text."""
    chars_T2 = np.array(encoding.offsets, np.int32).reshape(-1, 2) - len(prompt)
    special_T = np.array(encoding.special_tokens_mask, np.bool_)
    if prompt:
        special_T |= chars_T2[:, 1] <= 0
    chars_T2 = np.maximum(chars_T2, 0)
    starts, ends = chars_T2.T
    if getattr(tokenizer.backend.raw.model, "continuing_subword_prefix", None):
        lengths = np.fromiter(map(len, encoding.tokens), np.int32, len(encoding.tokens))
        inner_T = lengths != ends - starts
    else:  # a token begins a word if a space is its first character or precedes it
        is_space = np.array([True, *(character == " " for character in text), False])
        inner_T = (starts > 0) & ~(is_space[starts] | is_space[starts + 1])
    unknown = unknown_token(tokenizer.card.tokenizer)
    if unknown is not None and (unknown_id := tokenizer.backend.raw.token_to_id(unknown)) is not None:
        inner_T &= np.array(encoding.ids) != unknown_id
    return TokenOffsets(chars_T2, special_T, inner_T)
