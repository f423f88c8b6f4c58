"""Requests of vLLM's examples and tests, and their kept answers.

The requests are those of examples/pooling of vLLM 0.33 and of tests of its entrypoints. Their answers lie under golden/vllm;
`PYTHONPATH=tests/support python tests/dialects/test_vllm_examples.py` writes them.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.late_interaction import write_stanford
from vllm_apps import IMAGE, Asker
from whimbrel import Engine

GOLDEN = Path(__file__).parents[1] / "golden/vllm"


EXAMPLES: dict[str, tuple[str, str, Any]] = {
    "embeddings": ("engine", "/v1/embeddings", {"model": "M", "input": "vLLM is great!"}),
    "embeddings base64": (
        "engine",
        "/v1/embeddings",
        {
            "input": ["The best thing about vLLM"],
            "model": "M",
            "encoding_format": "base64",
            "embed_dtype": "float16",
            "endianness": "big",
        },
    ),
    "embeddings of chats": (
        "engine",
        "/v1/embeddings",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Represent it."}]}],
            "model": "M",
            "encoding_format": "float",
        },
    ),
    "pooling": (
        "late",
        "/pooling",
        {"model": "M", "input": ["vLLM is great!", "a"], "task": "token_embed", "input_type": "document"},
    ),
    "pooling of chats": ("engine", "/pooling", {"model": "M", "messages": [{"role": "user", "content": "vLLM is great!"}]}),
    "pooling of rewards": ("classifier", "/pooling", {"model": "M", "input": "vLLM is great!"}),
    "classify": ("classifier", "/classify", {"model": "M", "input": ["Hello, my name is", "The president is"]}),
    "score one": ("ranker", "/score", {"model": "M", "text_1": "What is the capital of France?", "text_2": "Paris."}),
    "score one to many": (
        "ranker",
        "/score",
        {"model": "M", "queries": "What is the capital of Brazil?", "documents": ["Brasilia.", "Paris."]},
    ),
    "score of images": ("ranker", "/score", {"model": "M", "data_1": "A dog", "data_2": IMAGE}),
    "rerank": (
        "ranker",
        "/rerank",
        {
            "model": "M",
            "query": "What is the capital of France?",
            "documents": ["Brazil.", "France: Paris.", "Horses and cows"],
        },
    ),
    "tokenize": ("engine", "/tokenize", {"model": "M", "prompt": "Hello world", "return_token_strs": True}),
    "detokenize": ("engine", "/detokenize", {"model": "M", "tokens": [101, 7592, 2088, 102]}),
    "unknown model": ("engine", "/pooling", {"model": "nobody", "input": "a"}),
    "late chunking": (
        "engine",
        "/v1/embeddings",
        {"model": "M", "input": ["vLLM is great!", "a"], "late_chunking_params": {"chunk_size": 4}},
    ),
    "embeddings of tokens": ("late", "/v1/embeddings", {"model": "M", "input": ["vLLM is great!", "a"]}),
    "embeddings without special tokens": (
        "engine",
        "/v1/embeddings",
        {"model": "M", "input": "vLLM is great!", "add_special_tokens": False},
    ),
    "classes of tokens": ("classifier", "/pooling", {"model": "M", "input": ["vLLM is great!", "a"], "task": "token_classify"}),
    "weights of tokens": ("m3", "/pooling", {"model": "M", "input": [[0, 5, 7, 2]], "task": "token_classify"}),
    "tokenizer info": ("engine", "/tokenizer_info", None),
    "load": ("engine", "/load", None),
}


def exchange(engine: Engine, path: str, body: Any) -> Any:
    """Return an exchange without ids, times, folders and numbers that depend on the machine."""
    name = engine.plan.served_name
    sent = None if body is None else {key: name if value == "M" else value for key, value in body.items()}
    told = Asker(engine).told(path, sent)
    answer = orjson.loads(told.body.replace(orjson.dumps(name)[1:-1], b"M"))
    return {"path": path, "request": body, "status": told.status, "answer": kept(answer)}


VARIES = {"created": "a time", "prompt_tokens": "a count", "total_tokens": "a count", "label": "a label"}
"""The tokenizers of small checkpoints are trained, and are not the same in every process."""


def kept(value: Any, key: str = "") -> Any:
    if key in VARIES and value is not None:
        return VARIES[key]
    if key == "id":
        return f"{value.split('-')[0]}-..."
    if isinstance(value, dict):
        return {name: kept(each, name) for name, each in value.items()}
    if isinstance(value, list) and value and all(isinstance(each, float) for each in value):
        return f"{len(value)} numbers"
    if key in ("data", "embedding") and isinstance(value[0], list):
        return sorted({kept(each) for each in value})
    if key == "results" or (key == "data" and value and "relevance_score" in value[0]):
        return sorted((kept(each) for each in value), key=lambda each: each["index"])
    if isinstance(value, list):
        return [kept(each) for each in value]
    if key == "embedding":
        return f"base64 of {len(base64.b64decode(value))} bytes"
    return "a number" if isinstance(value, float) else value


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, request: pytest.FixtureRequest) -> None:
    kind, path, body = EXAMPLES[name]
    found = exchange(request.getfixturevalue(kind), path, body)
    assert found == json.loads((GOLDEN / f"{name.replace(' ', '_')}.json").read_text())


def record() -> None:
    """Write the golden files."""
    torch.manual_seed(7)
    makers: dict[str, Callable[[Path], object]] = {
        "late": write_stanford,
        "m3": write_m3,
        "ranker": lambda folder: write_classifier(folder, "bert", num_labels=1),
        "classifier": lambda folder: write_classifier(
            folder, "bert", id2label={0: "sad", 1: "glad", 2: "neither"}, label2id={"sad": 0, "glad": 1, "neither": 2}
        ),
    }
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, (kind, path, body) in EXAMPLES.items():
        with tempfile.TemporaryDirectory() as folder:
            if kind in makers:
                makers[kind](Path(folder))
            with Engine(folder, dtype="float32") if kind in makers else Engine() as engine:
                text = json.dumps(exchange(engine, path, body), indent=2)
        (GOLDEN / f"{name.replace(' ', '_')}.json").write_text(text + "\n")


if __name__ == "__main__":
    record()
