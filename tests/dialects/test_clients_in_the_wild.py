"""Requests as client programs send them that were once refused or not understood, and what each program reads of the answer.

Each program has a golden file in tests/golden/wild. Numbers are those of the model in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest
from test_cohere import QUERY, TEXTS
from transformers import pipeline

from classifiers import write_classifier
from exchanges import Exchanges, Small
from fake import call
from whimbrel import AsyncEngine, Engine
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.types.request import TokenizeRequest

PAIRS = {"query": QUERY, "documents": TEXTS}


def embedding(found: Any) -> Any:
    return found["data"][0]["embedding"]


def scores(key: str, name: str = "relevance_score") -> Callable[[Any], Any]:
    """Reads the scores in the order of the documents."""
    return lambda found: [each[name] for each in sorted(found[key], key=lambda each: each["index"])]


@dataclass
class Row:
    """A request, and the function that reads numbers of its answer; `verb` is what they are compared with."""

    path: str
    body: dict[str, Any]
    read: Callable[[Any], Any] = lambda _: None
    verb: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])
    has: tuple[str, ...] = ()


ROWS: dict[str, list[Row]] = {
    "voyageai (JavaScript) and LiteLLM: rerank": [
        Row("/v1/rerank", PAIRS | {"model": "ranker"}, scores("data"), "ranker", has=("data", "results")),
        Row("/v1/rerank", PAIRS | {"model": "ranker", "return_documents": True}, lambda found: [found["data"][0]["document"]]),
    ],
    "langchain-nvidia": [
        Row("/v1/embeddings", {"model": "dense", "input": [QUERY], "truncate": word, "input_type": kind}, embedding, f"dense:{kind}")
        for word, kind in (("NONE", "query"), ("START", "document"), ("END", "passage"))
    ] + [
        Row("/v1/embeddings", {"model": "dense", "input": ["long " * 200], "truncate": "NONE"}, status=400),
        Row("/v1/ranking", {"model": "ranker", "query": {"text": QUERY}, "passages": [{"text": each} for each in TEXTS], "truncate": "END"},
            scores("rankings", "logit"), "ranker:logits"),
        Row("/v1/ranking", {"model": "ranker", "query": {"text": QUERY}, "passages": [{"text": "a"}, {"text": "long " * 200}]}, status=400),
        Row("/v1/ranking", {"model": "ranker", "query": {"text": ""}, "passages": [{"text": "a"}]}, status=400),
        Row("/v1/ranking", {"model": "ranker", "query": {"text": "a"}, "passages": []}, status=400),
    ],
    "mem0 and LiteLLM: placeholders": [
        Row("/v1/rerank", PAIRS | {"model": name}, scores("results"), "ranker")
        for name in ("tei", "text-embeddings-inference", "default/not-specified", "")
    ] + [
        Row("/rerank", {"query": QUERY, "texts": TEXTS, "model": "tei"}, lambda found: scores("all", "score")({"all": found}), "ranker:sigmoid"),
        Row("/v1/rerank", PAIRS | {"model": "nobody"}, status=404),
    ],
    "infinity_client": [
        Row("/embeddings", {"model": "dense", "input": [QUERY], "dimensions": 0, "modality": "text", "encoding_format": "float"}, embedding, "dense"),
        Row("/rerank", PAIRS | {"model": "default/not-specified", "raw_scores": False, "return_documents": True, "top_n": None},
            scores("results"), "ranker:sigmoid", has=("object",)),
        Row("/rerank", PAIRS | {"model": "ranker", "raw_scores": True}, scores("results"), "ranker:logits"),
        Row("/classify", {"model": "classes", "input": [QUERY], "raw_scores": False},
            lambda found: sorted(each["score"] for each in found["data"][0]), "classes:sorted"),
        Row("/classify", {"model": "dense", "input": [QUERY], "raw_scores": False}, status=400),
        Row("/classify", {"model": "classes", "input": [], "raw_scores": False}, status=400),
        Row("/embeddings", {"model": "dense", "input": [QUERY], "modality": "image"}, status=400),
    ],
    "Jina's clients: errors": [
        Row("/v1/embeddings", {"model": "nobody", "input": [QUERY]}, status=404, has=("detail", "error")),
        Row("/v1/rerank", {"model": "ranker", "query": QUERY, "documents": []}, status=400, has=("detail", "error")),
    ],
    "Mistral's SDK": [
        Row("/v1/embeddings", {"model": "dense", "inputs": None, "input": [QUERY], "output_dimension": 16}, embedding, "dense:16", has=("id",)),
    ],
    "AI SDK (Together)": [Row("/v1/rerank", PAIRS | {"model": "ranker", "top_n": 2}, lambda found: [found["usage"]["completion_tokens"]])],
    "RAGFlow (Xinference)": [
        Row("/v1/rerank", PAIRS | {"model": "ranker", "return_documents": word, "return_len": word}, scores("results"), "ranker")
        for word in ("true", "false")
    ],
    "vLLM's clients of invocations": [
        Row("/invocations", {"model": "dense", "input": [QUERY]}, embedding, "dense"),
        Row("/invocations", {"model": "classes", "input": [QUERY]}, lambda found: found["data"][0]["probs"], "classes"),
        Row("/invocations", {"model": "ranker", "queries": QUERY, "documents": TEXTS}, scores("data", "score"), "ranker"),
        Row("/invocations", {"model": "ranker", "text_1": QUERY, "text_2": TEXTS}, scores("data", "score"), "ranker"),
        Row("/invocations", PAIRS | {"model": "ranker"}, scores("results"), "ranker"),
        Row("/invocations", {"model": "dense", "inputs": QUERY}, lambda found: found[0], "dense"),
        Row("/invocations", {"model": "dense", "input": []}, status=400),
    ],
    "Mixedbread": [
        Row(path, {"model": "ranker", "query": QUERY, "input": TEXTS, "return_input": True}, scores("data", "score"), "ranker")
        for path in ("/v1/reranking", "/reranking")
    ] + [Row("/v1/reranking", {"model": "ranker", "query": QUERY, "input": TEXTS, "top_k": 1}, lambda found: [found["top_k"]])],
    "llama.cpp": [
        Row("/v1/reranking", PAIRS | {"model": "ranker"}, scores("results"), "ranker"),
        Row("/reranking", PAIRS | {"model": "ranker", "top_n": 9}, scores("results"), "ranker"),
        Row("/embedding", {"model": "dense", "content": QUERY}, lambda found: found[0]["embedding"][0], "dense:norm"),
        Row("/embedding", {"model": "dense", "input": [QUERY], "embd_normalize": -1}, lambda found: found[0]["embedding"][0], "dense:raw"),
        Row("/embedding", {"model": "dense", "content": QUERY, "embd_normalize": 0}, status=400),
        Row("/embedding", {"model": "dense"}, status=400),
    ],
    "Azure": [
        Row("/openai/deployments/dense/embeddings", {"input": [QUERY], "model": "text-embedding-3-small"}, embedding, "dense"),
        Row("/openai/v1/embeddings", {"input": [QUERY], "model": "dense"}, embedding, "dense"),
        Row("/openai/deployments/nobody/embeddings", {"input": [QUERY]}, status=404),
    ],
    "Cohere v1": [
        Row("/v1/tokenize", {"model": "dense", "text": QUERY}, lambda found: found["tokens"], "dense:tokens", has=("token_strings",)),
        Row("/v1/detokenize", {"model": "dense", "tokens": [5, 6, 7]}, has=("text", "meta")),
        Row("/v1/classify", {"model": "classes", "inputs": [QUERY, "a"]},
            lambda found: [each["confidence"] for each in found["classifications"][0]["labels"].values()], "classes"),
        Row("/v1/classify", {"model": "classes", "inputs": [QUERY], "examples": [{"text": "a", "label": "b"}]}, status=400),
        Row("/v1/classify", {"model": "dense", "inputs": [QUERY]}, status=400),
    ],
    "Ollama's pull": [
        Row("/api/pull", {"model": "dense", "stream": False}, has=("status",)),
        Row("/api/pull", {"name": "nobody", "stream": False}, status=404, has=("error",)),
        Row("/api/generate", {"model": "dense", "prompt": "a"}, status=404, has=("error",)),
    ],
    "slashes": [Row("//embed/", {"model": "dense", "inputs": QUERY}, lambda found: found[0], "dense")],
}  # fmt: skip


def expected(verb: str, small: Small) -> np.ndarray[Any, Any]:
    name, _, how = verb.partition(":")
    engine = small.engines[name]
    if name == "ranker":
        return engine.score(QUERY, TEXTS, activate=not how or (how == "sigmoid" and None))
    if name == "classes":
        found = engine.classify(QUERY).scores_NC[0]
        return np.sort(found) if how == "sorted" else found
    match how:
        case "16":
            return engine.embed(QUERY, dimensions=16)
        case "norm" | "raw":
            return engine.embed(QUERY, normalize=how == "norm")
        case "tokens":
            return asyncio.run(AsyncEngine(engine).tokenize(TokenizeRequest([QUERY], special=False)))[0].ids_T
        case _:
            return engine.embed(QUERY, prompt={"passage": "document"}.get(how, how) or None)


@pytest.mark.parametrize("client", ROWS)
def test_what_programs_send(client: str, small: Small) -> None:
    """Programs in the wild get the numbers of the model, in the shape that they read."""
    said = Exchanges()
    with httpx2.Client(base_url=small.url, timeout=60) as http:
        for row in ROWS[client]:
            answer = http.post(
                row.path, content=orjson.dumps(row.body), headers={"content-type": "application/json"} | row.headers
            )
            assert answer.status_code == row.status, answer.text
            said.note(row.path, orjson.dumps(row.body), answer.status_code, answer.content)
            found = answer.json()
            assert all(name in found for name in row.has), answer.text
            if row.verb:
                np.testing.assert_array_equal(
                    np.array(row.read(found), np.float32), expected(row.verb, small).astype(np.float32)
                )
    said.check("wild/" + "".join(letter if letter.isalnum() else "_" for letter in client))


def test_entities_at_the_root(tmp_path: Path) -> None:
    """TEI's root gives the entities of a model that judges tokens, as the pipeline of transformers does."""
    labels = dict(enumerate(["B-ORG", "B-PER", "I-PER", "B-LOC"]))
    write_classifier(tmp_path, "bert", "ForTokenClassification", id2label=labels)
    with Engine(str(tmp_path), dtype="float32") as engine:
        app = create_app(ModelRegistry(AsyncEngine(engine)))
        post = partial(call, app, "POST", "/", headers={"content_type": "application/json"})
        for strategy in ("none", "simple", "first"):
            body = {"inputs": TEXTS, "parameters": {"aggregation_strategy": strategy}}
            found = orjson.loads(asyncio.run(post(body=orjson.dumps(body))).body)
            theirs = pipeline("token-classification", str(tmp_path), aggregation_strategy=strategy)(TEXTS)
            key = "entity" if strategy == "none" else "entity_group"
            assert [[(each[key], each["start"], each["end"]) for each in row] for row in found] == [
                [(each[key], each["start"], each["end"]) for each in row] for row in theirs
            ]
            ours, reference = ([each["score"] for row in rows for each in row] for rows in (found, theirs))
            np.testing.assert_allclose(ours, np.array(reference, np.float64), atol=1e-5)
        one = asyncio.run(post(body=orjson.dumps({"inputs": TEXTS[0]})))
        assert {"entity_group", "score", "word", "start", "end"} == orjson.loads(one.body)[0].keys()
        for wrong, status in (({"inputs": []}, 400), ({"inputs": [3]}, 422), ({"inputs": [["a", "b"]]}, 422)):
            assert asyncio.run(post(body=orjson.dumps(wrong))).status == status
        instances = {"instances": [{"inputs": TEXTS[0]}, {"inputs": TEXTS[1]}]}
        vertex = asyncio.run(
            call(app, "POST", "/vertex", body=orjson.dumps(instances), headers={"content_type": "application/json"})
        )
        assert orjson.loads(vertex.body)["predictions"] == [
            orjson.loads(asyncio.run(post(body=orjson.dumps({"inputs": text}))).body) for text in TEXTS[:2]
        ]
