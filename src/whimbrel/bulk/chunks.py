"""Chunks of long texts, by their tokens. Pure.

A chunk ends before a word if one begins in its second half, and the next begins with a word if one begins in the overlap. So
words stay whole where texts have them.
"""

from typing import NamedTuple

from whimbrel.types.arrays import Int32Array


class Chunking(NamedTuple):
    """Size of chunks in tokens, and the tokens that a chunk shares with the one before."""

    tokens: int
    overlap: int


def chunk_spans(text: str, chars_T2: Int32Array, chunking: Chunking) -> list[tuple[int, int]]:
    """Return the first character of each chunk and the one after its last, from the characters of the tokens."""
    own_T2 = chars_T2[chars_T2[:, 1] > chars_T2[:, 0]]
    starts, ends = own_T2[:, 0].tolist(), own_T2[:, 1].tolist()
    total = len(starts)
    if total <= chunking.tokens:
        return [(0, len(text))]

    def begins_word(token: int) -> bool:
        start = starts[token]
        return start == 0 or text[start - 1].isspace() or text[start].isspace()

    spans, begin = list[tuple[int, int]](), 0
    while True:
        end = min(begin + chunking.tokens, total)
        if end < total:
            end = next((token for token in range(end, begin + chunking.tokens // 2, -1) if begins_word(token)), end)
        spans.append((starts[begin], ends[end - 1]))
        if end == total:
            return spans
        first = max(end - chunking.overlap, begin + 1)
        begin = next((token for token in range(first, end) if begins_word(token)), first)
