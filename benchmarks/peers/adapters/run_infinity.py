"""Infinity's engine in its own process, with an event loop in a thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from infinity_emb import AsyncEmbeddingEngine, EngineArgs


def load(folder: str, task: str, *, threads: int, **options: Any) -> Callable[[Any], Any]:
    torch.set_num_threads(threads)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def wait(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    engine = AsyncEmbeddingEngine.from_args(EngineArgs(model_name_or_path=folder, device="cpu", **options))
    wait(engine.astart())

    def rerank(call: dict[str, Any]) -> list[float]:
        ranked, _ = wait(engine.rerank(query=call["query"], docs=call["documents"]))
        return [each.relevance_score for each in sorted(ranked, key=lambda each: each.index)]

    def embed(texts: list[str]) -> Any:
        return wait(engine.embed(sentences=texts))[0]

    return {"dense": embed, "rerank": rerank}[task]
