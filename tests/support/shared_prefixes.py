"""Texts that begin with the same tokens, and their scores."""

from __future__ import annotations

import numpy as np

from whimbrel import Engine
from whimbrel.types.request import Request

QUERY = "how far do birds fly in a year, and where do they rest on the way?"


DOCUMENTS = [f"Some fly {number} thousand kilometres. " * (1 + number % 3) for number in range(12)]


PROMPT = "Instruct: Given a question about birds, retrieve passages that answer the question.\nQuery: "


def scores_of_documents(engine: Engine, documents: list[str], query: str = QUERY) -> np.ndarray:
    found = engine.run(Request([(query, each) for each in documents], ("scores",), activate=False)).outputs.scores
    assert found is not None
    return found[:, 0]
