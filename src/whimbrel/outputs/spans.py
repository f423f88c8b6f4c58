"""Spans of words that a model scores for labels, and the entities that are chosen among them. numpy only.

A span begins at any word and has up to a number of words of the model's. The rows of a text are the spans by first word, then
by length, each with all labels. Source of the choice: gliner/decoding/decoder.py (0.2.29).

Shapes: S spans, W words, C labels.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.card import Output
from whimbrel.types.options import read_labels
from whimbrel.types.result import Entity

_THRESHOLD: Final = 0.5


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
    text: str, scores_SC: Float32Array, spans_S2: Int64Array, chars_W2: Int32Array, wanted: EntityLabels
) -> list[Entity]:
    """Return spans with scores above the threshold that do not overlap: the best first, then in the order of the text."""
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
