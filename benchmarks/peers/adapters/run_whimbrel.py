"""Whimbrel's Engine, from the checkout."""

from collections.abc import Callable
from typing import Any

from whimbrel import Engine


def load(folder: str, task: str, *, threads: int, dtype: str) -> Callable[[Any], Any]:
    del threads  # a lane per core
    engine = Engine(folder, dtype=dtype)

    def rerank(call: dict[str, Any]) -> list[float]:
        ranked = engine.rerank(call["query"], call["documents"])
        return [each.score for each in sorted(ranked, key=lambda each: each.index)]

    def token_vectors(texts: list[str]) -> Any:
        return engine.multi_vector(texts, input_type="document")

    return {"dense": engine.embed, "rerank": rerank, "token-vectors": token_vectors, "sparse": engine.sparse}[task]
