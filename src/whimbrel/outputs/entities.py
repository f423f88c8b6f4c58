"""Named entities: from the scores of tokens, or of spans of words for labels. numpy only.

Consecutive tokens or words of one tag are an entity, until a tag begins anew ("B-"); "O" is not an entity. Boundaries and
scores are those of transformers/pipelines/token_classification.py (5.23).

A span begins at any word and has up to a number of words of the model's. The rows of a text are the spans by first word, then
by length, each with all labels. Source of the choice: gliner/decoding/decoder.py (0.2.29).

Shapes: T tokens, C classes or labels, W words, S spans.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.card import Output
from whimbrel.types.options import read_labels
from whimbrel.types.result import Entity
from whimbrel.types.seq import TokenOffsets

Aggregation: TypeAlias = Literal["none", "simple", "first", "average", "max"]
"""Aggregation of tokens to entities.

"none": each token is an entity. "simple": tokens are merged, and words may be split. "first", "average", "max": words are
merged; a word has the scores of its first token, the mean of its tokens, or the token with the highest score."""

_OUTSIDE: Final = "O"
_THRESHOLD: Final = 0.5


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


_WORDS: Final[Mapping[str, Callable[[Float32Array, Int64Array], Float32Array]]] = {
    "first": lambda scores_TC, starts_W: scores_TC[starts_W],
    "average": _mean_token_score,
    "max": _max_score_token,
}
"""Functions (scores of tokens, first token of each word) -> scores of words."""
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


@dataclass(frozen=True, slots=True)
class EntityLabels:
    """The labels that a caller gives, and the score that entities exceed."""

    labels: tuple[str, ...]
    threshold: float


def read_entity_labels(labels: Iterable[str] | None, threshold: object, aggregation: str) -> EntityLabels:
    """Return the checked labels and threshold. Raises InvalidRequest."""
    if labels is None:
        raise InvalidRequest("is for entities of labels; give labels too.", param="threshold")
    if aggregation != "simple":
        raise InvalidRequest("spans of words are scored as a whole; leave it out.", param="aggregation")
    value = _THRESHOLD if threshold is None else threshold
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidRequest(f"must be a number from 0 to 1, is {value!r:.80}.", param="threshold")
    return EntityLabels(read_labels(labels), float(value))


def count_marks(spans_S2: Int32Array | None, prompt_tokens: int) -> tuple[int, int]:
    """Return the number of labels, whose tokens are in the prompt, and of words of a text. `spans_S2` are those of its seq."""
    if spans_S2 is None:
        return 0, 0
    labels = int(np.count_nonzero(spans_S2[:, 0] < prompt_tokens))
    return labels, len(spans_S2) - labels


def word_spans(num_words: int, max_words: int) -> Int64Array:
    """Return the first and the last word of each span, (S, 2)."""
    ends_WK = np.arange(num_words)[:, None] + np.arange(min(max_words, num_words))
    starts_WK = np.broadcast_to(np.arange(num_words)[:, None], ends_WK.shape)
    return np.stack((starts_WK, ends_WK), axis=-1)[ends_WK < num_words]


def num_span_rows(output: Output, num_labels: int, num_words: int) -> int:
    """Return the number of scores of a text."""
    assert output.spans is not None
    longest = min(output.spans.max_words, num_words)
    return (num_words * longest - longest * (longest - 1) // 2) * num_labels


def choose_entities(
    text: str, scores_X1: Float32Array, chars_W2: Int32Array, wanted: EntityLabels, max_words: int
) -> list[Entity]:
    """Return spans with scores above the threshold that do not overlap: the best first, then in the order of the text."""
    scores_SC, spans_S2 = scores_X1.reshape(-1, len(wanted.labels)), word_spans(len(chars_W2), max_words)
    spans, columns = np.nonzero(scores_SC > wanted.threshold)
    scores, classes = scores_SC[spans, columns], columns.tolist()
    order = np.argsort(-scores, kind="stable")
    taken = np.zeros(len(chars_W2), np.bool_)
    chosen: list[tuple[int, int, int]] = []
    for index, (first, last) in zip(order.tolist(), spans_S2[spans[order]].tolist(), strict=True):
        if not taken[first : last + 1].any():
            taken[first : last + 1] = True
            chosen.append((first, last, index))
    places = [(index, int(chars_W2[first, 0]), int(chars_W2[last, 1])) for first, last, index in sorted(chosen)]
    return [
        Entity(wanted.labels[classes[index]], float(scores[index]), start, end, text[start:end]) for index, start, end in places
    ]
