"""Bare OpenVINO, with tokenising, batching and pooling as lean as a program of one's own can be.

Texts are sorted by length and padded in batches of at most 32, and each thread runs whole batches on a stream of its own. That
is faster than batches in the order of the texts, or than one batch on all cores.
"""

import json
import string
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import openvino as ov
from safetensors.numpy import load_file
from tokenizers import Tokenizer

Inputs: TypeAlias = dict[str, np.ndarray]

MAX_ROWS: Final = 32
MAX_TOKENS: Final = 512


def load(folder: str, task: str, *, threads: int, file: str, precision: str) -> Callable[[Any], Any]:
    settings = {"NUM_STREAMS": threads, "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    compiled = ov.Core().compile_model(f"{folder}/{file}", "CPU", settings)
    names = [each.get_any_name() for each in compiled.inputs]
    local = threading.local()

    def run(inputs: Inputs) -> np.ndarray:
        """Return hidden states (N, T, D), or logits (N, 1)."""
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        local.request.infer({name: inputs[name] for name in names}, share_inputs=True)
        return local.request.get_output_tensor(0).data

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.no_padding()
    pool = ThreadPoolExecutor(threads)
    finish, limit = _finishers(folder, task, tokenizer)
    tokenizer.enable_truncation(limit)

    def call(given: Any) -> list[Any]:
        if task == "rerank":
            encoded = tokenizer.encode_batch_fast([(given["query"], document) for document in given["documents"]])
        else:
            encoded = tokenizer.encode_batch_fast(list(given))
        lengths = [len(each.ids) for each in encoded]
        order = sorted(range(len(encoded)), key=lengths.__getitem__, reverse=True)
        size = max(1, min(MAX_ROWS, -(-len(order) // threads)))
        batches = [order[start : start + size] for start in range(0, len(order), size)]

        def run_batch(rows: list[int]) -> Sequence[Any]:
            inputs = _pad([encoded[row] for row in rows], marker=task == "token-vectors")
            return finish(run(inputs), inputs)

        found = map(run_batch, batches) if len(batches) == 1 else pool.map(run_batch, batches)
        results: list[Any] = [None] * len(order)
        for rows, values in zip(batches, found, strict=True):
            for row, value in zip(rows, values, strict=True):
                results[row] = value
        return results

    return call


def _pad(encoded: Sequence[Any], *, marker: bool) -> Inputs:
    """Return ids, mask and types. `marker` puts ColBERT's document marker, [unused1], after [CLS]."""
    extra = int(marker)
    shape = len(encoded), max(len(each.ids) for each in encoded) + extra
    ids, mask, types = (np.zeros(shape, np.int64) for _ in range(3))
    positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
    for row, each in enumerate(encoded):
        end = len(each.ids) + extra
        ids[row, extra:end], types[row, extra:end], mask[row, :end] = each.ids, each.type_ids, 1
        if marker:
            ids[row, :2] = each.ids[0], 2
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "position_ids": positions}


def _finishers(folder: str, task: str, tokenizer: Tokenizer) -> tuple[Callable[[np.ndarray, Inputs], Sequence[Any]], int]:
    """Return the work after the model, and the limit of tokens without a marker."""
    if task == "rerank":
        return lambda logits, _: 1 / (1 + np.exp(-logits[:, 0].astype(np.float32))), MAX_TOKENS
    if task == "token-vectors":
        weight = load_file(f"{folder}/model.safetensors")["linear.weight"].T.copy()
        metadata = json.loads(Path(folder, "artifact.metadata").read_text())
        skipped = [tokenizer.token_to_id(each) for each in string.punctuation]

        def tokens(hidden: np.ndarray, inputs: Inputs) -> Sequence[Any]:
            kept = inputs["attention_mask"].astype(bool) & ~np.isin(inputs["input_ids"], skipped)
            return [_normalize(states[rows].astype(np.float32) @ weight) for states, rows in zip(hidden, kept, strict=True)]

        return tokens, metadata["doc_maxlen"] - 1
    if task == "sparse":

        def words(logits: np.ndarray, inputs: Inputs) -> Sequence[Any]:
            np.maximum(logits, 0, out=logits)
            rows = [np.log1p(each[: int(n)].max(0)) for each, n in zip(logits, inputs["attention_mask"].sum(1), strict=True)]
            return [(ids := row.nonzero()[0], row[ids]) for row in rows]

        return words, MAX_TOKENS
    pooling = json.loads(Path(folder, "1_Pooling/config.json").read_text())
    if pooling.get("pooling_mode_lasttoken"):
        return lambda hidden, inputs: _normalize(
            hidden[np.arange(len(hidden)), inputs["attention_mask"].sum(1) - 1].astype(np.float32)
        ), MAX_TOKENS
    if pooling["pooling_mode_cls_token"]:
        return lambda hidden, _: _normalize(hidden[:, 0].astype(np.float32)), MAX_TOKENS

    def mean(hidden: np.ndarray, inputs: Inputs) -> np.ndarray:
        mask = inputs["attention_mask"][:, None].astype(np.float32)
        return _normalize((mask @ hidden.astype(np.float32))[:, 0])

    return mean, MAX_TOKENS


def _normalize(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)
