"""Workloads of the comparison: the same texts for every peer."""

from dataclasses import dataclass
from typing import Any, Final

from common import MIXED, SHORT, chunks, make_texts

MODELS: Final = {
    "minilm": "dense", "bge-base": "dense", "cross-encoder": "rerank", "colbert": "token-vectors", "modernbert": "dense",
    "qwen3": "dense", "qwen3-reranker": "rerank", "splade": "sparse", "deberta": "rerank",
}  # fmt: skip
"""Task of each checkpoint."""
_LONG: Final = (400, 450)


@dataclass(frozen=True, slots=True)
class Workload:
    """Calls of one engine, one after another: lists of texts, or a query with documents."""

    model: str
    name: str
    calls: list[Any]

    @property
    def texts(self) -> list[str]:
        """Return all texts; a document counts with its query."""
        return [text for call in self.calls for text in (_pairs(call) if MODELS[self.model] == "rerank" else call)]


def _pairs(call: dict[str, Any]) -> list[str]:
    return [f"{call['query']} {document}" for document in call["documents"]]


def make_workloads(*, quick: bool = False) -> list[Workload]:
    """Return all workloads, or the first eighth of each."""

    def texts(count: int, words: tuple[int, int], seed: int) -> list[str]:
        return make_texts(count, words=words, seed=seed)[: count // 8 if quick else count]

    query = make_texts(1, words=(8, 12), seed=4)[0]
    return [
        Workload("minilm", "256 mixed texts", [texts(256, MIXED, 0)]),
        Workload("minilm", "1,024 short texts", [texts(1024, SHORT, 0)]),
        Workload("minilm", "requests of 8 mixed", chunks(texts(128, MIXED, 1), 8)),
        Workload("minilm", "one short text at a time", chunks(texts(64, SHORT, 2), 1)),
        Workload("minilm", "8 texts of 512 tokens", [texts(8, _LONG, 3)]),
        Workload("bge-base", "bge-base, 32 mixed texts", [texts(32, MIXED, 6)]),
        Workload("cross-encoder", "a query and 100 documents", [{"query": query, "documents": texts(100, MIXED, 5)}]),
        Workload("colbert", "token vectors of 64 mixed", [texts(64, MIXED, 7)]),
        Workload("modernbert", "ModernBERT-base, 32 mixed", [texts(32, MIXED, 8)]),
        Workload("qwen3", "8 layers of Qwen3-0.6B, 32 mixed", [texts(32, MIXED, 10)]),
        Workload("qwen3-reranker", "its reranker, 32 documents", [{"query": query, "documents": texts(32, MIXED, 11)}]),
        Workload("splade", "SPLADE, 64 mixed", [texts(64, MIXED, 12)]),
        Workload("deberta", "DeBERTa-v3-base, 16 documents", [{"query": query, "documents": texts(16, MIXED, 13)}]),
    ]


def make_calibration() -> list[str]:
    """Return the texts whose activations set the ranges of static quantisation. No workload has them."""
    return make_texts(100, words=MIXED, seed=9)
