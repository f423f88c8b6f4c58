"""Activations of scores, for APIs whose clients choose them (TEI, Infinity), and the classes of a text by its scores.

A checkpoint without an activation gets TEI's: the sigmoid of one score, the softmax of several. Scores of models that compare
vectors are similarities and stay as they are.
"""

from typing import Any, Final, Literal, TypeAlias

import numpy as np

from whimbrel.dialects.common.answers import answer_type
from whimbrel.dialects.common.responses import ServedModel
from whimbrel.types.arrays import Float32Array
from whimbrel.types.options import require
from whimbrel.types.result import Result

ActivationName: TypeAlias = Literal["sigmoid", "softmax", "none"]


Prediction: Final = answer_type("Prediction", "A class, and its score.", score=float, label=str)


def predict(
    result: Result, model: ServedModel, activation: ActivationName | None, top_k: int | None = None
) -> list[list[dict[str, Any]]]:
    """Return the `top_k` best classes of each text, or all, best first."""
    order_NC = np.argsort(-result.outputs.order, axis=1, kind="stable")[:, :top_k]
    scores_NC = activate(activation, require(result.outputs.scores))
    labels = class_names(model.card.labels, scores_NC.shape[1])
    return [[{"score": scores_NC[text, i], "label": labels[i]} for i in order] for text, order in enumerate(order_NC.tolist())]


def class_names(labels: tuple[str, ...], width: int) -> tuple[str, ...]:
    """Return the names of classes: their labels, or numbers where they have none."""
    return labels or tuple(f"LABEL_{i}" for i in range(width))


def activation_of(raw: bool | None, model: ServedModel, function: ActivationName | None = None) -> ActivationName | None:
    """Return the activation to apply to scores, `function` if it is given; None if the model applies its own."""
    output = model.card.outputs.get("scores")
    if output is None or model.card.list_template is not None:  # cosines
        return "none"
    if function is not None:
        return function
    if raw:
        return "none"
    return None if output.activation != "identity" else "sigmoid" if output.width == 1 else "softmax"


def activate(function: ActivationName | None, scores_NC: Float32Array) -> Float32Array:
    """Return scores after an activation; None leaves them as they are."""
    if function == "sigmoid":
        return np.exp(-np.logaddexp(0, -scores_NC))
    if function == "softmax":
        powers_NC: Float32Array = np.exp(scores_NC - scores_NC.max(axis=1, keepdims=True))
        return powers_NC / powers_NC.sum(axis=1, keepdims=True, dtype=np.float32)
    return scores_NC
