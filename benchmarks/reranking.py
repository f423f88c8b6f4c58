"""Reranking through the server with a random model of jina-colbert-v2's shape: the workload of vLLM #35330, and a cache.

Run by `maxsim.py`. All requests have the same query of 30 random one-token words, and one document of 1,024 to 3,072 random
tokens (input length 2,048, range ratio 0.5). 64 connections send one request after another, to /v1/rerank and then to
/v1/score. The model has the files and the layers of jinaai/jina-colbert-v2, but the packaged model's tokenizer, because
lookups cost next to nothing. Speed does not depend on the weights. By default the model is small (6 layers of 384 columns); in
full it is as large as the original (24 of 1,024). MaxSim is measured alone afterwards: the same pairs, each in its own call.

With `--document-cache-bytes`, one connection reranks 100 documents of 100 to 300 tokens: new and cached ones in turn.
"""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final

import numpy as np
import orjson
import torch
from common import FOLDER, cpu_seconds, note, print_table
from driver import Serving, send_all, serving
from safetensors.torch import save_file

from whimbrel.model.ops.maxsim import maxsim
from whimbrel.model.ops.token_vectors import TokenVectors

CONNECTIONS: Final = 64
LENGTHS: Final = (1024, 3072)
QUERY_WORDS: Final = 29
WIDTH: Final = 128
VOCABULARY: Final = 30_522


def write_checkpoint(folder: Path, *, layers: int, width: int) -> None:
    """Write a random model with the files of jinaai/jina-colbert-v2, and the packaged model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder / name)
    config = {
        "architectures": ["HF_ColBERT"], "model_type": "xlm-roberta", "vocab_size": VOCABULARY, "hidden_size": width,
        "num_hidden_layers": layers, "num_attention_heads": width // 64, "intermediate_size": 4 * width,
        "hidden_act": "gelu_new", "max_position_embeddings": 8194, "type_vocab_size": 1, "pad_token_id": 0,
        "layer_norm_eps": 1e-5, "position_embedding_type": "rotary", "rotary_emb_base": 10000.0,
        "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta.XLMRobertaModel"},
    }  # fmt: skip
    metadata = {
        "query_token_id": "[unused1]", "doc_token_id": "[unused2]", "query_maxlen": 32, "doc_maxlen": 8192,
        "mask_punctuation": True, "attend_to_mask_tokens": True, "similarity": "cosine", "dim": WIDTH,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    save_file(_tensors(layers, width), folder / "model.safetensors")


def _tensors(layers: int, width: int) -> dict[str, torch.Tensor]:
    found = {"linear.weight": torch.randn(WIDTH, width, dtype=torch.bfloat16)}

    def linear(name: str, rows: int, columns: int) -> None:
        found[f"roberta.{name}.weight"] = torch.randn(rows, columns, dtype=torch.bfloat16) / columns**0.5
        found[f"roberta.{name}.bias"] = torch.zeros(rows)

    def norm(name: str) -> None:
        found[f"roberta.{name}.weight"], found[f"roberta.{name}.bias"] = torch.ones(width), torch.zeros(width)

    for table, rows in (("word", VOCABULARY), ("token_type", 1)):
        found[f"roberta.embeddings.{table}_embeddings.weight"] = torch.randn(rows, width, dtype=torch.bfloat16)
    norm("emb_ln")
    for at in (f"encoder.layers.{i}." for i in range(layers)):
        linear(f"{at}mixer.Wqkv", 3 * width, width)
        linear(f"{at}mixer.out_proj", width, width)
        linear(f"{at}mlp.fc1", 4 * width, width)
        linear(f"{at}mlp.fc2", width, 4 * width)
        norm(f"{at}norm1")
        norm(f"{at}norm2")
    return found


def make_pairs(count: int, lengths: tuple[int, int]) -> tuple[str, list[str], list[int]]:
    """Return a query, documents and their token counts. Words are one token each, all equally likely."""
    rng = random.Random(0)
    vocab: dict[str, int] = json.loads((FOLDER / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(word for word in vocab if len(word) > 1 and word.isascii() and word.isalpha())
    sizes = [rng.randint(*lengths) for _ in range(count)]
    return " ".join(rng.choices(words, k=QUERY_WORDS)), [" ".join(rng.choices(words, k=size)) for size in sizes], sizes


def rerank(count: int, *, full: bool, device: str, dtype: str, quick: bool) -> None:
    """Print the table."""
    layers, width = (24, 1024) if full else (2, 128) if quick else (6, 384)
    query, documents, sizes = make_pairs(count, (10, 30) if quick else LENGTHS)
    bodies = {
        "/v1/rerank": [orjson.dumps({"query": query, "documents": [each]}) for each in documents],
        "/v1/score": [orjson.dumps({"queries": query, "documents": each}) for each in documents],
    }
    rows: list[list[str]] = []
    with TemporaryDirectory() as name:
        write_checkpoint(Path(name), layers=layers, width=width)
        note("loading the server")
        with serving(dtype, name, "--device", device, "--max-queue-seconds", "3600") as server:
            load(server, "/v1/rerank", bodies["/v1/rerank"][:CONNECTIONS])
            for path, each in bodies.items():
                note(f"POST {path}")
                rows.append([*load(server, path, each), f"{count:,}"])
    seconds = maxsim_seconds(sizes)
    print()
    header = ["", "requests/s", "tokens/s", "p50, ms", "p99, ms", "server's processor time, s", "requests"]
    print_table(header, rows)
    shape = f"{layers} layers of {width}, {device}, {dtype}; {CONNECTIONS} connections, one document of {LENGTHS} tokens"
    share = seconds / float(rows[0][5])
    print(f"\n{shape}. MaxSim of these pairs: {1e3 * seconds:.1f} ms on one core, {100 * share:.2f} % of the processor time.")


def warm(rounds: int, *, full: bool, device: str, dtype: str, quick: bool) -> None:
    """Print the table of reranks with new documents, and with cached ones."""
    layers, width = (24, 1024) if full else (2, 128) if quick else (6, 384)
    count = 10 if quick else 100
    query, texts, _ = make_pairs(count * (rounds + 2), (100, 300))
    lists = [texts[i : i + count] for i in range(0, len(texts), count)]
    seconds: dict[str, list[float]] = {"new": [], "kept": [], "the query alone": []}
    with TemporaryDirectory() as name:
        write_checkpoint(Path(name), layers=layers, width=width)
        note("a cache of documents")
        with serving(dtype, name, "--device", device, "--document-cache-bytes", "2000000000") as server:
            for documents in lists:
                for what, texts in (("new", documents), ("kept", lists[0]), ("the query alone", [""])):
                    body = orjson.dumps({"query": query, "documents": texts, "return_documents": False})
                    seconds[what].append(send_all(server.port, [body], path="/v1/rerank")[0][0])
    medians = {what: median(each[2:]) for what, each in seconds.items()}
    print()
    rows = [[what, f"{1e3 * each:.1f}", f"{medians['new'] / each:.1f}"] for what, each in medians.items()]
    print_table([f"{count} documents of 100 to 300 tokens", "ms", "new ones / these"], rows)


def load(server: Serving, path: str, bodies: list[bytes]) -> list[str]:
    """Send all requests and return a row of the table."""
    each = [part for part in (bodies[i::CONNECTIONS] for i in range(CONNECTIONS)) if part]
    with ThreadPoolExecutor(len(each)) as threads:
        before, started = cpu_seconds(server.pid), perf_counter()
        parts = list(threads.map(partial(send_all, server.port, path=path), each))
        seconds = perf_counter() - started
        taken = cpu_seconds(server.pid) - before
    answers = [answer for part in parts for answer in part]
    tokens = sum(usage(body) for _, body in answers)
    latencies = [1e3 * latency for latency, _ in answers]
    percentiles = quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else latencies * 99
    numbers = len(bodies) / seconds, tokens / seconds, percentiles[49], percentiles[98], taken
    return [f"POST {path}", *(f"{x:,.{digits}f}" for x, digits in zip(numbers, (2, 0, 0, 0, 2), strict=True))]


def usage(body: bytes) -> int:
    answer: dict[str, Any] = orjson.loads(body)
    return int(answer["usage"]["total_tokens"])


def maxsim_seconds(sizes: list[int]) -> float:
    """Return the MaxSim seconds of 32 query tokens with each document in its own call, on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    query = TokenVectors.of(torch.randn(32, WIDTH), np.array([0, 32]))
    documents = [TokenVectors.of(torch.randn(size, WIDTH), np.array([0, size])) for size in sizes]
    pair = np.zeros(1, np.int64), np.zeros(1, np.int64)
    maxsim(query, documents[0], *pair)
    started = perf_counter()
    for document in documents:
        maxsim(query, document, *pair)
    seconds = perf_counter() - started
    torch.set_num_threads(threads)
    return seconds
