"""TEI's fields of GET /info. Pure."""

from __future__ import annotations

from typing import Any, Final

from whimbrel.dialects.common.fields import MAX_INPUTS
from whimbrel.dialects.common.route import ServedModel
from whimbrel.types.card import Card

_UNLIMITED: Final = 2**53 - 1
"""A number that every reader of JSON has exactly."""


def describe(model: ServedModel) -> dict[str, Any]:
    """TEI's fields, in so far as there is such a thing here; not its version, which is another server's."""
    card, plan = model.card, model.plan
    return {
        "model_id": card.name,
        "model_sha": None,
        "model_dtype": plan.dtype,
        "served_model_name": plan.served_name,
        "model_type": _model_type(card),
        "max_concurrent_requests": _UNLIMITED,
        "max_input_length": plan.max_length,
        "max_batch_tokens": plan.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": True,
        "tokenization_workers": None,
        "sha": None,
        "docker_label": None,
    }


def _model_type(card: Card) -> dict[str, Any]:
    if "scores" in card.outputs:
        width = card.outputs["scores"].width
        labels = card.labels or tuple(f"LABEL_{i}" for i in range(width))
        kind = "reranker" if width == 1 else "classifier"
        return {
            kind: {
                "id2label": {str(i): label for i, label in enumerate(labels)},
                "label2id": {label: i for i, label in enumerate(labels)},
            }
        }
    return {"embedding": {"pooling": _pooling(card)}}


def _pooling(card: Card) -> str:
    """TEI's word for how tokens become vectors, or ours where it has none."""
    name, output = next(iter(card.outputs.items()))
    if name == "sparse":
        return "splade"
    return "+".join("last-token" if mode == "lasttoken" else mode for mode in output.modes) or name
