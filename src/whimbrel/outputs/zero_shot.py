"""Zero-shot classification: labels that a request gives, judged by a model for natural language inference (NLI).

Each label becomes a hypothesis, and the model says how far a text entails it. The scores are a softmax over the labels, or for
each label alone one over two of the model's classes. numpy only.
Source: transformers/pipelines/zero_shot_classification.py (5.23).

Shapes: N texts, L labels, C classes of the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array
from whimbrel.types.card import Card
from whimbrel.types.options import read_labels
from whimbrel.types.result import Classes

HYPOTHESIS_TEMPLATE: Final = "This example is {}."
MAX_TEMPLATE: Final = 1000
"""Limit of a template in characters: a thousand labels make a thousand hypotheses of it."""
_PLACE: Final = "{}"


@dataclass(frozen=True, slots=True)
class ZeroShot:
    """Labels of a request, and how they are judged."""

    labels: tuple[str, ...]
    hypothesis_template: str = HYPOTHESIS_TEMPLATE
    """Statement with the place of a label, `{}`."""
    multi_label: bool = False
    """Judge each label alone: several may be true, or none."""

    @property
    def hypotheses(self) -> tuple[str, ...]:
        return tuple(self.hypothesis_template.replace(_PLACE, label) for label in self.labels)

    def classes(self, logits_XC: Float32Array, entailment: int) -> Classes:
        """Return the classes of texts from the logits of all pairs, one text after another; X is N * L.

        The order is that of the scores before they are rounded to float32, and equal ones keep the order of the labels.
        """
        num_labels = len(self.labels)
        logits_NLC = logits_XC.reshape(-1, num_labels, logits_XC.shape[-1]).astype(np.float64)
        scores_NL = logits_NLC[..., entailment]
        if self.multi_label or num_labels == 1:
            scores_NL = scores_NL - logits_NLC[..., -1 if entailment == 0 else 0]
            shares_NL = np.exp(-np.logaddexp(0.0, -scores_NL))
        else:
            powers_NL = np.exp(scores_NL - scores_NL.max(axis=1, keepdims=True))
            shares_NL = powers_NL / powers_NL.sum(axis=1, keepdims=True)
        return Classes(self.labels, shares_NL.astype(np.float32), np.argsort(-scores_NL, axis=1, kind="stable"))


def read_zero_shot(labels: Iterable[str] | None, hypothesis_template: str | None, *, multi_label: bool) -> ZeroShot | None:
    """Return the labels that a request gives, None without. Raises InvalidRequest for what no model takes."""
    if type(multi_label) is not bool:
        raise InvalidRequest(f"must be true or false, is {multi_label!r:.80}.", param="multi_label")
    if labels is None:
        if hypothesis_template is not None or multi_label:
            param = "multi_label" if hypothesis_template is None else "hypothesis_template"
            raise InvalidRequest("is for labels that the request gives; give labels too.", param=param)
        return None
    template = HYPOTHESIS_TEMPLATE if hypothesis_template is None else hypothesis_template
    param = "hypothesis_template"
    if not isinstance(cast(object, template), str):
        raise InvalidRequest(f"must be a string, is {type(template).__name__}.", param=param)
    if len(template) > MAX_TEMPLATE:
        raise InvalidRequest(f"has {len(template):,} characters; the limit is {MAX_TEMPLATE:,}.", param=param)
    if (places := template.count(_PLACE)) != 1:
        found = "has no place for the label" if not places else f"has {places} places for the label"
        raise InvalidRequest(f"{found}; write {{}} once, as in {HYPOTHESIS_TEMPLATE!r}.", param=param)
    if set("{}") & set(template.replace(_PLACE, "")):
        raise InvalidRequest(f"has other braces than those of the label's place, {{}}: {template!r:.80}.", param=param)
    return ZeroShot(read_labels(labels), template, multi_label)


def entailment_of(card: Card) -> int:
    """Return the index of the class that means entailment. Raises InvalidRequest for a model that is no NLI model."""
    if card.entailment is not None:
        return card.entailment
    card.output("scores")
    names = ", ".join(card.labels[:8]) + (", ..." if len(card.labels) > 8 else "")
    need = "need a model for natural language inference (NLI), and this one's config.json does not make it one"
    rule = "of several classes exactly one must begin with 'entail', by id2label and label2id alike"
    remedy = "Serve an NLI model or, if this is one, name its classes there."
    raise InvalidRequest(f"{need}: {rule}. Its classes: {names}. {remedy}", param="labels")
