"""Requests as client programs send them that were once refused or not understood, and what each program reads of the answer.

Each program has a golden file in tests/golden/wild. Numbers are those of the model in this process.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest
from transformers import pipeline

from asgi import call
from checkpoints.classifiers import write_classifier
from dialect_results import QUERY, TEXTS
from exchanges import WRITE, Exchanges, Small
from whimbrel import AsyncEngine, Engine
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.types.request import Request, TokenizeRequest

PAIRS = {"query": QUERY, "documents": TEXTS}
LONG = "the whimbrel is a wader with a long curved bill " * 20
LITELLM = {"user-agent": "litellm/1.83.0", "authorization": "Bearer None", "content-type": "application/json"}


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
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    has: tuple[str, ...] = ()
    words: str = ""
    """Words of the error."""


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
        Row("/v1/retrieval/ranker/reranking", {"model": "nvidia/x", "query": {"text": QUERY}, "passages": [{"text": each} for each in TEXTS]},
            scores("rankings", "logit"), "ranker:logits"),
        Row("/v1/retrieval/nobody/reranking", {"query": {"text": QUERY}, "passages": [{"text": "a"}]}, status=404),
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
    "LiteLLM's voyage: no Content-Type": [
        Row("/v1/embeddings", {"model": "dense", "input": [QUERY]}, embedding, "dense", headers={}),
        Row("/v1/embeddings", {"model": "dense", "input": [QUERY]}, embedding, "dense", headers={"content-type": ""}),
        Row("/v1/rerank", PAIRS | {"model": "ranker", "return_documents": True}, scores("data"), "ranker", headers={}),
        Row("/v1/rerank", PAIRS | {"model": "ranker"}, status=415, headers={"referer": "http://a.example/"}),
    ],
    "LiteLLM's infinity": [
        Row("/rerank", PAIRS | {"model": "ranker", "return_documents": True}, scores("results"), "ranker:sigmoid", headers=LITELLM, has=("object",)),
        Row("/rerank", PAIRS | {"model": "ranker", "return_documents": False, "top_n": 2}, headers=LITELLM, has=("object",)),
        Row("/rerank", PAIRS | {"model": "ranker", "return_documents": True}, lambda found: found["results"][0]["document"]["text"],
            headers=LITELLM | {"authorization": "Bearer a-key"}),
    ],
    "gzip": [
        Row("/embed", {"model": "dense", "inputs": QUERY}, lambda found: found[0], "dense",
            headers={"content-type": "application/json", "content-encoding": "gzip"}),
    ],
    "vLLM's clients of a ColBERT, and mteb": [
        Row("/pooling", {"model": "late", "input": [QUERY], "task": "token_embed"}, lambda found: found["data"][0]["data"], "late:document"),
        Row("/pooling", {"model": "late", "input": [QUERY]}, lambda found: found["data"][0]["data"], "late:document"),
        Row("/embed_all", {"model": "late", "inputs": QUERY}, lambda found: found[0], "late:document"),
        Row("/v1/embeddings", {"model": "late", "input": [QUERY]}, embedding, "late:document"),
        Row("/v1/embeddings", {"model": "late", "input": [QUERY], "encoding_format": "base64"},
            lambda found: np.frombuffer(base64.b64decode(embedding(found)), np.float32), "late:flat"),
        Row("/score", {"model": "late", "queries": LONG, "documents": TEXTS}, scores("data", "score"), "late:score"),
        Row("/rerank", {"model": "late", "query": LONG, "documents": TEXTS}, scores("results"), "late:score"),
        Row("/score", {"model": "late", "queries": LONG, "documents": TEXTS, "truncate_prompt_tokens": 16}, scores("data", "score")),
        Row("/score", {"model": "late", "queries": LONG, "documents": TEXTS, "truncate": False}, status=400, words="Please reduce the length"),
    ],
    "vLLM's clients: rerank": [
        Row("/rerank", PAIRS | {"model": "ranker"}, scores("results"), "ranker", has=("usage",)),
        Row("/v1/rerank", PAIRS | {"model": "ranker", "top_n": 1}, lambda found: [found["results"][0]["document"]["multi_modal"]]),
        Row("/v2/rerank", PAIRS | {"model": "ranker", "return_documents": True}, scores("results"), "ranker"),
    ],
    "vLLM's clients: further fields": [
        Row("/v1/embeddings", {"model": "dense", "input": [QUERY], "late_chunking_params": {"chunk_size": 3}}, lambda found: embedding(found)[0]),
        Row("/v1/embeddings", {"model": "dense", "input": [QUERY], "add_special_tokens": False}, embedding, "dense:bare"),
        Row("/pooling", {"model": "classes", "input": [QUERY], "task": "token_classify"}, lambda found: found["data"][0]["data"]),
        Row("/v2/embed", {"model": "dense", "texts": [QUERY], "input_type": "search_query"},
            lambda found: [found["meta"]["billed_units"]["image_tokens"]]),
    ],
    "vLLM's words": [
        Row("/pooling", {"model": "nobody", "input": "a"}, status=404, words="The model `nobody` does not exist."),
        Row("/v1/embeddings", {"model": "nobody", "input": "a"}, status=404, words="The model `nobody` does not exist."),
        Row("/pooling", {"model": "dense", "input": []}, status=400, words="You must pass at least one prompt"),
        Row("/pooling", {"model": "dense"}, status=400, words="Field required ('missing')"),
        Row("/pooling", {"model": "dense", "input": [99999999]}, status=400, words="Token id 99999999 is out of vocabulary"),
        Row("/pooling", {"model": "dense", "input": "a", "task": "classify"}, status=400, words="Unsupported task: 'classify'"),
        Row("/pooling", {"model": "dense", "input": "a", "task": "x"}, status=400, words="literal_error"),
        Row("/pooling", {"model": "dense", "input": "a", "task": "plugin"}, status=400, words="No IOProcessor plugin installed"),
        Row("/pooling", {"model": "dense", "input": "a", "truncate_prompt_tokens": 999}, status=400, words="Please request a smaller truncation size."),
        Row("/pooling", {"model": "dense", "input": LONG}, status=400, words="Please reduce the length of the input prompt"),
        Row("/classify", {"model": "classes", "input": LONG}, status=400, words="This model's maximum context length is"),
        Row("/rerank", PAIRS | {"model": "ranker", "max_tokens_per_doc": -1}, status=400, words="max_tokens_per_doc must be a non-negative integer"),
        Row("/score", {"model": "ranker", "queries": ["a", "b"], "documents": TEXTS[:3]}, status=400, words="Input lengths must be either 1:1, 1:N or N:N"),
        Row("/score", {"model": "ranker", "queries": [], "documents": ["a"]}, status=400, words="At least one text element must be given"),
        Row("/score", {"model": "ranker", "queries": "a", "documents": []}, status=400, words="At least one text_pair element must be given"),
        Row("/invocations", {"model": "dense", "messages": []}, status=400, words="Cannot find suitable handler for request"),
        Row("/invocations", {"model": "dense", "foo": 1}, status=422, words="Cannot find suitable handler for request"),
        Row("/pooling", {"model": "dense", "input": "a"}, status=400, headers={"content-type": "text/plain"},
            words="Unsupported Media Type: Only 'application/json' is allowed"),
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
        for word in ("true", "false", "True", "False")
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
        *(
            Row("/embedding", {"model": "dense", "content": QUERY, "embd_normalize": norm}, lambda found: found[0]["embedding"][0], f"dense:norm {norm}")
            for norm in (0, 1, 3, 1000)
        ),
        Row("/embedding", {"model": "dense", "content": QUERY, "embd_normalize": -2}, status=400),
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
    if name == "late":
        rows_TD = engine.multi_vector(QUERY, input_type="document")[0]
        return {"document": rows_TD, "flat": rows_TD.reshape(-1), "score": engine.score(LONG, TEXTS, truncate=True)}[how]
    if name == "classes":
        found = engine.classify(QUERY).scores_NC[0]
        return np.sort(found) if how == "sorted" else found
    match how:
        case "16":
            return engine.embed(QUERY, dimensions=16)
        case "bare":
            return engine.run(Request([QUERY], ("dense",), add_special_tokens=False)).dense[0]
        case "norm 0" | "norm 1" | "norm 3" | "norm 1000":
            raw_D, order = engine.embed(QUERY, normalize=False).astype(np.float64), int(how.removeprefix("norm "))
            largest = np.abs(raw_D).max()
            ratios_D = raw_D / largest  # whose powers of 1000 do not overflow
            return ratios_D * 32760 if order == 0 else ratios_D / (np.abs(ratios_D) ** order).sum() ** (1 / order)
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
            raw = orjson.dumps(row.body)
            content = gzip.compress(raw) if "content-encoding" in row.headers else raw
            answer = http.post(row.path, content=content, headers=row.headers)
            assert answer.status_code == row.status, answer.text
            usual = row.headers == {"content-type": "application/json"}
            said.note(row.path, raw, answer.status_code, answer.content, headers=None if usual else row.headers)
            found = answer.json()
            assert all(name in found for name in row.has), answer.text
            assert row.words in answer.text
            read = row.read(found) if row.status == 200 else None
            if row.verb:
                np.testing.assert_allclose(
                    np.array(read, np.float32),
                    expected(row.verb, small).astype(np.float32),
                    rtol=1e-6 if "norm " in row.verb else 0,
                )
    said.check("wild/" + "".join(letter if letter.isalnum() else "_" for letter in client))


@pytest.mark.parametrize(
    ("path", "model", "body"),
    [
        ("/v1/embeddings", "classes", {"input": "a"}),
        ("/v1/classify", "dense", {"input": "a"}),
        ("/v1/token_classify", "dense", {"input": "a"}),
        ("/classify", "dense", {"input": "a"}),
    ],
)
def test_a_model_of_another_kind_is_named_by_a_field_that_was_sent(
    path: str, model: str, body: dict[str, Any], small: Small
) -> None:
    """An error over the kind of the model points at `model`, not at a field that the route does not have."""
    answer = httpx2.post(small.url + path, json=body | {"model": model}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "model")
    assert error["message"].startswith("model: this model gives no ")


class Recorder:
    """An app in this process, whose exchanges are noted."""

    def __init__(self, *engines: Engine) -> None:
        self._app = create_app(ModelRegistry(*map(AsyncEngine, engines)))
        self.said = Exchanges()

    def ask(self, path: str, body: Any = None, status: int = 200) -> Any:
        raw, headers = b"" if body is None else orjson.dumps(body), {"content_type": "application/json"}
        told = asyncio.run(call(self._app, "GET" if body is None else "POST", path, body=raw, headers=headers))
        assert told.status == status, told.body
        found = orjson.loads(told.body)
        shown = {name: found[name] for name in TEI_INFO} if path == "/info" else found
        self.said.note(path, raw, told.status, orjson.dumps(shown))
        return found


TEI_INFO = ("model_type", "max_client_batch_size", "auto_truncate", "max_batch_requests")


def test_clients_of_tei_on_several_models(small: Small) -> None:
    """TEI's clients name no model: the one whose own server would take the body answers, and /info has the type of each."""
    engines = small.engines
    app = Recorder(engines["dense"], engines["ranker"])
    for path in ("/", "/embed", "/invocations"):
        np.testing.assert_array_equal(np.array(app.ask(path, {"inputs": QUERY})[0], np.float32), engines["dense"].embed(QUERY))
    for path in ("/", "/rerank", "/invocations"):
        ranked = app.ask(path, {"query": QUERY, "texts": TEXTS})
        found = np.array([each["score"] for each in sorted(ranked, key=lambda each: each["index"])], np.float32)
        np.testing.assert_array_equal(found, expected("ranker:sigmoid", small))
    predictions = app.ask("/vertex", {"instances": [{"inputs": QUERY}, {"inputs": "a"}]})["predictions"]
    np.testing.assert_array_equal(np.array(predictions, np.float32)[:, 0], engines["dense"].embed([QUERY, "a"]))
    assert app.ask("/pooling", {"input": [QUERY]})["data"][0]["object"] == "pooling"
    assert app.ask("/info")["model_type"].keys() == {"embedding", "reranker"}
    app.ask("/predict", {"inputs": [[3]]}, status=422)
    app.said.check("wild/TEI_s_clients_on_several_models")


def test_every_name_of_a_model_is_listed(tmp_path: Path) -> None:
    """langchain-ollama and mem0 look for a name in a list; Mistral's client reads more of each entry of /v1/models."""
    WRITE["dense"](tmp_path)
    with Engine(str(tmp_path), dtype="float32", served_name="dense", aliases=("embed", "embed-2")) as engine:  # pyright: ignore[reportCallIssue]
        app, names = Recorder(engine), ["dense", "embed", "embed-2"]
        for path in ("/v1/models", "/models"):
            assert [each["id"] for each in app.ask(path)["data"]] == names
        for path in ("/api/tags", "/api/ps"):
            assert [each["name"] for each in app.ask(path)["models"]] == [f"{name}:latest" for name in names]
        for each in app.ask("/v1/models")["data"]:
            assert (each["type"], each["object"], each["max_context_length"]) == ("base", "model", engine.plan.max_length)
            assert sorted([each["id"], *each["aliases"]]) == names
            assert set(each["capabilities"].values()) == {False}
        missing = app.ask("/v1/embeddings", {"model": "nobody", "input": "a"}, status=404)
        assert "this server serves dense, embed, embed-2." in missing["error"]["message"]
        app.ask("/api/embed", {"model": "embed-2:latest", "input": QUERY})
        app.said.check("wild/every_name_of_a_model")


def test_long_texts_in_parts(tmp_path: Path) -> None:
    """With the switch of the server a long text runs in parts, unless a request says otherwise (vLLM's chunked processing)."""
    WRITE["dense"](tmp_path)
    with Engine(str(tmp_path), dtype="float32", split_long=True, served_name="dense") as engine:  # pyright: ignore[reportCallIssue]
        app = Recorder(engine)
        split, cut = engine.embed(LONG), engine.embed(LONG, truncate=True)
        assert not np.allclose(split, cut, atol=1e-3)
        for says, vector_D in (
            ({}, split),
            ({"split_long": True}, split),
            ({"split_long": False}, cut),
            ({"truncate": True}, cut),
            ({"truncate": "right"}, cut),
            ({"truncate": "END"}, cut),
            ({"truncate_prompt_tokens": -1}, cut),
        ):
            found = embedding(app.ask("/v1/embeddings", {"input": LONG, **says}))
            np.testing.assert_array_equal(np.array(found, np.float32), vector_D)
        np.testing.assert_array_equal(np.array(app.ask("/embed", {"inputs": LONG})[0], np.float32), cut)
        app.said.check("wild/long_texts_in_parts")


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
        printed = one.body.decode()
        texts = [
            orjson.dumps(np.float32(each["score"]), option=orjson.OPT_SERIALIZE_NUMPY).decode()
            for each in orjson.loads(printed)
        ]
        assert all(text in printed for text in texts), "the shortest text that reads back as float32"
        said = Exchanges()
        for body in ({"inputs": TEXTS[0]}, {"inputs": TEXTS[0], "parameters": {"aggregation_strategy": "none"}}):
            first = orjson.loads(asyncio.run(post(body=orjson.dumps(body))).body)[0]
            kinds = [{name: type(value).__name__ for name, value in first.items()}]  # words depend on the tokenizer
            said.note("/", orjson.dumps(body), 200, orjson.dumps(kinds))
        said.check("wild/entities_at_the_root")
        for wrong, status in (({"inputs": []}, 400), ({"inputs": [3]}, 422), ({"inputs": [["a", "b"]]}, 422)):
            assert asyncio.run(post(body=orjson.dumps(wrong))).status == status
        instances = {"instances": [{"inputs": TEXTS[0]}, {"inputs": TEXTS[1]}]}
        vertex = asyncio.run(
            call(app, "POST", "/vertex", body=orjson.dumps(instances), headers={"content_type": "application/json"})
        )
        assert orjson.loads(vertex.body)["predictions"] == [
            orjson.loads(asyncio.run(post(body=orjson.dumps({"inputs": text}))).body) for text in TEXTS[:2]
        ]
