"""Tokenisation with character offsets: of tokens, or of words whose spans are scored for labels.

Source of the continuation of words: transformers/pipelines/token_classification.py (5.23), gather_pre_entities.

A text whose spans are scored (GLiNER) is its words, each tokenised alone, after a prompt with the labels. Source: tokenizer.py
and processor.py in gliner/data_processing/ (0.2.29). There a word without tokens, such as a zero-width space, moves all words
after it by one; here it is no word.

Shapes: T tokens, S labels and words, W words.
"""

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import tokenizers

from whimbrel.checkpoint.tokenizer.classes import unknown_token
from whimbrel.errors import InvalidRequest, TooLong
from whimbrel.tokenizer.tokenizer import EncodeParams, Tokenizer
from whimbrel.tokenizer.validation import TruncationLimit, check_texts
from whimbrel.types.card import SpanPrompt
from whimbrel.types.seq import Seq, TokenOffsets

_WORD: Final = re.compile(r"\w+(?:[-_]\w+)*|\S")


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


def encode_spans(
    tokenizer: Tokenizer, texts: Sequence[object], labels: tuple[str, ...], params: EncodeParams
) -> tuple[list[Seq], list[TokenOffsets]]:
    """Return the seq of each text, whose spans are its labels' and words' tokens, and the characters of its words."""
    prompt = tokenizer.card.span_prompt
    assert prompt is not None
    limit = params.limit
    before = _check_labels(tokenizer, prompt, labels, limit)
    words = [list(_WORD.finditer(text)) for text in check_texts(texts)]
    rows = [[*before, *(word[0] for word in row[: prompt.max_words])] for row in words]
    seqs, offsets = list[Seq](), list[TokenOffsets]()
    for index, encoding in enumerate(tokenizer.backend.encode_words(rows)):
        found = words[index]
        if len(found) > prompt.max_words and limit.truncate == "never":
            raise TooLong(f"the text has {len(found):,} words; the limit is {prompt.max_words:,}.", item=index)
        ids = np.array(encoding.ids, np.int32)
        word_T = np.array([-1 if word is None else word for word in encoding.word_ids], np.int32)
        cut = limit.exceeded(ids.size, "text", index)
        if cut:
            last = word_T[limit.max_length - tokenizer.special.after.size]
            ids, word_T = ids[word_T < last], word_T[word_T < last]
        before_end = ids.size - tokenizer.special.after.size
        marked, first = np.unique(word_T, return_index=True)
        is_word = marked >= len(before)
        is_label = (marked >= 0) & (marked < len(before) - 1) & (marked % 2 == 0)
        starts = np.concatenate((first[is_label], first[is_word])).astype(np.int32)
        prompt_tokens = int(np.searchsorted(word_T[:before_end], len(before)))
        truncated, spans_S2 = cut or len(found) > prompt.max_words, np.stack((starts, starts + 1), axis=1)
        seqs.append(Seq(ids, index, prompt_tokens, tokenizer.special.type_id, truncated=truncated, spans_S2=spans_S2))
        kept: list[int] = marked[is_word].tolist()
        chars = [found[word - len(before)].span() for word in kept]
        chars_W2 = np.array(chars, np.int32).reshape(-1, 2)
        none = np.zeros(len(chars), np.bool_)
        offsets.append(TokenOffsets(chars_W2, none, none))
    return seqs, offsets


def _check_labels(tokenizer: Tokenizer, prompt: SpanPrompt, labels: tuple[str, ...], limit: TruncationLimit) -> list[str]:
    """Return the words of the prompt. Raises InvalidRequest for a label that the model could not tell from the next one."""
    before = [word for label in labels for word in (prompt.label_token, label)] + [prompt.end_token]
    (encoding,) = tokenizer.backend.encode_words([before])
    end_id = tokenizer.backend.raw.token_to_id(prompt.end_token)
    words = encoding.word_ids
    pieces = [(word, id_) for word, id_ in zip(words, encoding.ids, strict=True) if word is not None and word % 2]
    for index in range(len(labels)):
        ids = [id_ for word, id_ in pieces if word == 2 * index + 1]
        if not ids or prompt.label_id in ids or end_id in ids:
            reason = "has no tokens" if not ids else f"holds {prompt.label_token} or {prompt.end_token}, which part the labels"
            raise InvalidRequest(f"{reason}; give another word.", param="labels", item=index)
    if len(encoding.ids) >= limit.max_length:
        left = f"which leaves none of {limit.max_length:,} for a text"
        raise InvalidRequest(f"the labels have {len(encoding.ids):,} tokens, {left}; give fewer.", param="labels")
    return before
