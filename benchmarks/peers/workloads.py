"""Workloads of the comparison: the same texts for every peer."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common import chunks, make_texts

_TABLE: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MODELS: Final[dict[str, str]] = _TABLE["models"]
"""Task of each checkpoint."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Calls of one engine, one after another: lists of texts, or a query with documents."""

    model: str
    name: str
    calls: list[Any]

    @property
    def texts(self) -> list[str]:
        """Return all texts; a document counts with its query."""
        if MODELS[self.model] == "rerank":
            return [f"{call['query']} {document}" for call in self.calls for document in call["documents"]]
        return [text for call in self.calls for text in call]


def make_workloads(*, quick: bool = False) -> list[Workload]:
    """Return all workloads, or the first eighth of each."""
    (query,) = make_texts(1, words=(8, 12), seed=4)

    def make(model: str, name: str, count: int, words: tuple[int, int], seed: int, size: int | None = None) -> Workload:
        texts = make_texts(count, words=words, seed=seed)[: count // 8 if quick else count]
        ranks = MODELS[model] == "rerank"
        return Workload(model, name, [{"query": query, "documents": texts}] if ranks else chunks(texts, size or count))

    return [make(**row) for row in _TABLE["workloads"]]


def make_calibration() -> list[str]:
    """Return the texts whose activations set the ranges of static quantisation. No workload has them."""
    return make_texts(100, seed=9)
