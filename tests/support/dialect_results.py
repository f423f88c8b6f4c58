"""A model and results for renderers of dialects, and the texts that they answer."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np

from fake_embedder import FakeModel
from whimbrel.types.card import Output
from whimbrel.types.result import Outputs, Result, Timings

TEXTS = ["A whimbrel is a wader.", "It has a curved bill, and it flies far.", "a"]


QUERY = "what is a whimbrel?"


def fake_model(*prompts: str, width: int = 16, forms: Any = None) -> FakeModel:
    """Return a model with these prompts, as a dialect sees it."""
    card: Any = SimpleNamespace(prompts=dict.fromkeys(prompts, ""), tasks=(), text_formats=forms, list_template=None)
    card.tower_for, card.tower = lambda _: 0, lambda _: card
    card.output = lambda _: Output(width)
    return FakeModel.named("m", card)


def dense_result(rows: Any) -> Result:
    return Result(Outputs(np.asarray(rows, np.float32)), 7, 0, Timings())


def ranked_result(*scores: float) -> Result:
    return Result(Outputs(scores=np.array(scores, np.float32)[:, None]), 7, 0, Timings())


def as_floats(kind: str, numbers: Any) -> Any:
    if kind == "base64":
        return np.stack([np.frombuffer(base64.b64decode(row), "<f4") for row in numbers])
    return np.array(numbers, np.float32)
