"""Named entities from token scores. numpy only.

Consecutive tokens or words of one tag are an entity, until a tag begins anew ("B-"); "O" is not an entity. Boundaries and
scores are those of transformers/pipelines/token_classification.py (5.23).

Shapes: T tokens, C classes, W words.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import numpy as np

from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.result import Entity
from whimbrel.types.seq import TokenOffsets

Aggregation: TypeAlias = Literal["none", "simple", "first", "average", "max"]
"""Aggregation of tokens to entities.

"none": each token is an entity. "simple": tokens are merged, and words may be split. "first", "average", "max": words are
merged; a word has the scores of its first token, the mean of its tokens, or the token with the highest score."""

_OUTSIDE: Final = "O"

_WordScores: TypeAlias = Callable[[Float32Array, Int64Array], Float32Array]
"""(scores of tokens, first token of each word) -> scores of words."""


def _mean_token_score(scores_TC: Float32Array, starts_W: Int64Array) -> Float32Array:
    counts_W = np.diff(starts_W, append=len(scores_TC)).astype(np.float32)
    return np.divide(np.add.reduceat(scores_TC, starts_W), counts_W[:, None], dtype=np.float32)


def _max_score_token(scores_TC: Float32Array, starts_W: Int64Array) -> Float32Array:
    best_T = scores_TC.max(axis=1)
    word_T = np.repeat(np.arange(len(starts_W)), np.diff(starts_W, append=len(scores_TC)))
    is_best_T = best_T == np.maximum.reduceat(best_T, starts_W)[word_T]
    best = np.flatnonzero(is_best_T)
    _, first = np.unique(word_T[best], return_index=True)
    return scores_TC[best[first]]


_WORDS: Final[Mapping[str, _WordScores]] = {
    "first": lambda scores_TC, starts_W: scores_TC[starts_W],
    "average": _mean_token_score,
    "max": _max_score_token,
}
AGGREGATIONS: Final = ("none", "simple", *_WORDS)


def find_entities(
    text: str, scores_TC: Float32Array, offsets: TokenOffsets, labels: Sequence[str], aggregation: Aggregation
) -> list[Entity]:
    is_text_T = ~offsets.special_T
    scores_TC, chars_T2 = scores_TC[is_text_T], offsets.chars_T2[is_text_T]
    is_continuation_T = offsets.is_continuation_T[is_text_T]
    if not len(scores_TC):
        return []
    if aggregation in _WORDS:
        starts = np.flatnonzero(~is_continuation_T | (np.arange(len(is_continuation_T)) == 0))
        scores_TC, chars_T2 = _WORDS[aggregation](scores_TC, starts), _merge_offsets(chars_T2, starts)
    label_T, best_T = scores_TC.argmax(axis=1), scores_TC.max(axis=1)
    names = list(labels)
    if aggregation != "none":
        starts = _entity_starts(label_T, labels)
        counts = np.diff(starts, append=len(label_T))
        chars_T2, best_T = _merge_offsets(chars_T2, starts), np.add.reduceat(best_T, starts) / counts.astype(np.float32)
        label_T = label_T[starts]
        names = [label.split("-", 1)[-1] for label in labels]
    rows: Iterable[tuple[int, float, tuple[int, int]]] = zip(label_T.tolist(), best_T.tolist(), chars_T2.tolist(), strict=True)
    return [
        Entity(names[label], score, start, end, text[start:end])
        for label, score, (start, end) in rows
        if names[label] != _OUTSIDE
    ]


def _entity_starts(label_T: Int64Array, labels: Sequence[str]) -> Int64Array:
    """Return the index of each token that starts an entity: its tag differs from the previous one, or begins anew."""
    tags = [label[2:] if label.startswith(("B-", "I-")) else label for label in labels]
    tag_T = np.array([tags.index(tag) for tag in tags])[label_T]
    is_begin_T = np.array([label.startswith("B-") for label in labels])[label_T]
    return np.flatnonzero(is_begin_T | (np.diff(tag_T, prepend=-1) != 0))


def _merge_offsets(chars_T2: Int32Array, starts: Int64Array) -> Int32Array:
    """Return the offsets of groups of tokens, of which the first tokens are `starts`."""
    last = np.append(starts[1:], len(chars_T2)) - 1
    return np.stack((chars_T2[starts, 0], chars_T2[last, 1]), axis=1)
