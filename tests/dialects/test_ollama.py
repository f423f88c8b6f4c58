"""Ollama's dialect: every field, every error, and a real model through the app and through the `ollama` package.

What that sends and reads was seen in its version 0.6.3; what Ollama does, in server/routes.go.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import ollama as sdk
import orjson
import pytest
from hypothesis import given

from asgi import Answer, call
from checkpoints.classifiers import write_classifier
from checkpoints.encoders import write_bert
from checkpoints.sentence_layout import sentence_layout
from exchanges import Exchanges
from fake_embedder import FakeEmbedder
from serving import Server
from vectors import same_bits, vectors
from whimbrel import AsyncEngine, Engine, errors
from whimbrel.dialects import ollama
from whimbrel.errors import InvalidRequest, TooLarge
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.openapi import openapi_document
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Result, Timings

NAME = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = ["The whimbrel is a wader, with a long curved bill.", "birds fly far", ""]
MODEL: Any = SimpleNamespace(plan=SimpleNamespace(served_name="m", max_length=256))


def embed(**body: Any) -> Request | None:
    return ollama.parse_embed(orjson.dumps(body)).request(MODEL)


def embeddings(**body: Any) -> Request | None:
    return ollama.parse_embeddings(orjson.dumps(body)).request(MODEL)


def test_every_field() -> None:
    options = {"num_ctx": 64, "temperature": 0.5, "num_gpu": 1}
    body = {"input": ["a", "b"], "truncate": False, "dimensions": 3, "options": options, "keep_alive": "5m", "nobody": "knows"}
    assert embed(**body) == Request(["a", "b"], ("dense",), truncate="never", dimensions=3, normalize=True, max_tokens=64)
    least = Request(["a"], ("dense",), truncate="right", normalize=True)
    assert embed(input="a") == embed(input=["a"]) == embed(input="a", truncate=True, dimensions=0, keep_alive=-1) == least
    nulls = dict.fromkeys(ollama.OllamaEmbedRequest.__struct_fields__) | {"input": "a"}
    assert embed(**nulls) == least
    assert embeddings(prompt="a", options={"num_ctx": 9}) == Request(
        ["a"], ("dense",), truncate="never", normalize=False, max_tokens=9
    )


@pytest.mark.parametrize("num_ctx", [256, 8192, 0, None])
def test_a_longer_context_is_all_there_is(num_ctx: int | None) -> None:
    found = embed(input="a", options={"num_ctx": num_ctx})
    assert found is not None
    assert found.max_tokens is None


def test_nothing_to_encode() -> None:
    for body in ({}, {"input": ""}, {"input": []}, {"input": None}):
        parsed = ollama.parse_embed(orjson.dumps(body | {"model": "m:latest"}))
        sent, request = parsed.body, parsed.request
        assert request(MODEL) is None
        answer = orjson.loads(ollama.render_embed(sent, None, MODEL))
        assert (answer["model"], answer["embeddings"], answer["prompt_eval_count"]) == ("m:latest", [], 0)
    for body in ({}, {"prompt": ""}):
        parsed = ollama.parse_embeddings(orjson.dumps(body))
        sent, request = parsed.body, parsed.request
        assert request(MODEL) is None
        assert orjson.loads(ollama.render_embeddings(sent, None, MODEL)) == {"embedding": []}


@pytest.mark.parametrize(
    ("read", "body", "param"),
    [
        (ollama.parse_embed, {"input": 3}, "input"),
        (ollama.parse_embed, {"input": ["a", 3]}, "input[1]"),
        (ollama.parse_embed, {"input": [["a"]]}, "input[0]"),
        (ollama.parse_embed, {"input": ["a"] * 2049}, "input"),
        (ollama.parse_embed, {"input": "a", "truncate": "right"}, "truncate"),
        (ollama.parse_embed, {"input": "a", "dimensions": 1.5}, "dimensions"),
        (ollama.parse_embed, {"input": "a", "options": []}, "options"),
        (ollama.parse_embed, {"input": "a", "options": {"num_ctx": "many"}}, "options.num_ctx"),
        (ollama.parse_embed, {"input": "a", "options": {"num_ctx": -1}}, "options.num_ctx"),
        (ollama.parse_embed, {"input": "a", "options": {"rope_frequency_base": 1e6}}, "options.rope_frequency_base"),
        (ollama.parse_embeddings, {"prompt": ["a"]}, "prompt"),
        (ollama.parse_show, {"model": 3}, "model"),
    ],
)
def test_what_is_wrong_is_named(read: Callable[[bytes], Any], body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(orjson.dumps(body))
    assert caught.value.param == param
    assert isinstance(caught.value, TooLarge) == (body.get("input") == ["a"] * 2049)
    written = orjson.loads(ollama.render_error(caught.value))
    assert written.keys() == {"error"}
    assert written["error"].startswith(f"{param}: ")


def test_errors_have_the_words_that_clients_look_for() -> None:
    for error, status, words in (
        (errors.ModelNotFound("no model 'x' here.", param="model"), 404, "model not found: no model 'x' here."),
        (errors.TooLong("long.", item=0), 400, "the input length exceeds the context length: input[0]: long."),
        (errors.Overloaded("full.", retry_after=1), 503, "server busy, please try again. full."),
        (InvalidRequest("is wrong.", param="max_tokens"), 400, "options.num_ctx: is wrong."),
        (errors.NonFinite("NaN.", item=1), 500, "input[1]: NaN."),
    ):
        assert (ollama.status(error), orjson.loads(ollama.render_error(error))) == (status, {"error": words})
    written = orjson.loads(ollama.ROUTES[1].render_error(InvalidRequest("is wrong.", item=0)))
    assert written == {"error": "prompt: is wrong."}


@given(vectors(3, 5))
def test_vectors_read_back(rows: np.ndarray) -> None:
    result = Result(Outputs(rows), 7, 0, Timings(total=0.25))
    answer = orjson.loads(ollama.render_embed(ollama.OllamaEmbedRequest(model="m:latest"), result, MODEL))
    assert same_bits(answer["embeddings"], rows)
    assert (answer["total_duration"], answer["prompt_eval_count"], answer["model"]) == (250_000_000, 7, "m:latest")
    answer = orjson.loads(ollama.render_embeddings(ollama.OllamaEmbeddingsRequest(), result, MODEL))
    assert same_bits(answer["embedding"], rows[0])


def test_all_are_in_the_description() -> None:
    paths = openapi_document()["paths"]
    assert {"/api/embed", "/api/embeddings", "/api/show", "/api/tags", "/api/ps", "/api/version"} <= paths.keys()


# Through the app


def ask(engine: Engine, path: str, **body: Any) -> Answer:
    """Send a request as `curl -d` does."""
    headers = {"content_type": "application/x-www-form-urlencoded"}
    return asyncio.run(
        call(create_app(ModelRegistry(AsyncEngine(engine))), "POST", path, body=orjson.dumps(body), headers=headers)
    )


def test_a_model_that_is_not_normalised(tmp_path: Path) -> None:
    """Its vectors have norm 1, except for those of the old route."""
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    with Engine(str(tmp_path), dtype="float32", matryoshka=True, served_name="birds") as engine:
        for model in ({}, {"model": "birds"}, {"model": "birds:latest"}):
            found = orjson.loads(ask(engine, "/api/embed", input=TEXTS, **model).body)["embeddings"]
            assert np.array_equal(np.array(found, np.float32), engine.embed(TEXTS, normalize=True))
        cut = orjson.loads(ask(engine, "/api/embed", input=TEXTS, dimensions=8).body)["embeddings"]
        assert np.array_equal(np.array(cut, np.float32), engine.embed(TEXTS, normalize=True, dimensions=8))
        one = orjson.loads(ask(engine, "/api/embeddings", prompt=TEXTS[0]).body)["embedding"]
        assert np.array_equal(np.array(one, np.float32), engine.embed(TEXTS[0], normalize=False))
        for wrong, status, word in (
            ({"dimensions": 100}, 400, "dimensions: 100"),
            ({"model": "fish"}, 404, "model not found"),
            ({"model": ""}, 404, "model not found"),
            ({"options": {"num_ctx": 1}}, 400, "options.num_ctx: 1 tokens"),
        ):
            refused = ask(engine, "/api/embed", input="a", **wrong)
            assert (refused.status, orjson.loads(refused.body)["error"].startswith(word)) == (status, True)


def test_too_long(engine32: Engine) -> None:
    long = "far " * 400 + "away"
    cut = orjson.loads(ask(engine32, "/api/embed", input=long, options={"num_ctx": 9}).body)
    short = engine32.embed("far " * 7)
    assert np.array_equal(np.array(cut["embeddings"][0], np.float32), short)
    assert cut["prompt_eval_count"] == 9
    cut = orjson.loads(ask(engine32, "/api/embed", input=long).body)
    assert np.array_equal(np.array(cut["embeddings"][0], np.float32), engine32.embed(long, truncate="right"))
    for path, body in (("/api/embed", {"input": long, "truncate": False}), ("/api/embeddings", {"prompt": long})):
        refused = ask(engine32, path, **body)
        assert refused.status == 400
        assert orjson.loads(refused.body)["error"].startswith("the input length exceeds the context length: ")


def test_a_model_without_vectors(tmp_path: Path) -> None:
    write_classifier(tmp_path, "bert", num_labels=3)
    with Engine(str(tmp_path), dtype="float32", served_name="classes") as engine:
        refused = ask(engine, "/api/embed", input="a")
        assert (refused.status, "gives no 'dense'" in orjson.loads(refused.body)["error"]) == (400, True)
        assert orjson.loads(ask(engine, "/api/show", name="classes:latest").body)["capabilities"] == []


def test_bodies_that_are_none_and_what_comes_before_them() -> None:
    app = create_app(
        ModelRegistry(cast(Any, FakeEmbedder())), guards=ServerLimits(api_keys=("a-s3cret-key-of-ours",), max_body_bytes=1000)
    )
    draining = ModelRegistry(cast(Any, FakeEmbedder()))
    draining.draining = True
    key = {"authorization": "Bearer a-s3cret-key-of-ours"}
    for path in ("/api/embed", "/api/embeddings", "/api/show"):
        for body, headers, status in (
            (b"{}", {}, 401),
            (b"", key, 400),
            (b"{", key, 400),
            (b"[]", key, 400),
            (b" " * 1001, key, 413),
        ):
            told = asyncio.run(call(app, "POST", path, body=body, headers=headers))
            assert (told.status, orjson.loads(told.body).keys()) == (status, {"error"})
        told = asyncio.run(call(create_app(draining), "POST", path, body=b"{}"))
        assert (told.status, orjson.loads(told.body).keys()) == (503, {"error"})
        told = asyncio.run(call(app, "GET", path, headers=key))
        assert (told.status, orjson.loads(told.body).keys()) == (405, {"error"})
    for path in ("/api/tags", "/api/ps", "/api/version"):
        told = asyncio.run(call(app, "GET", path))
        assert (told.status, orjson.loads(told.body).keys()) == (401, {"error"})


# Through the package


def test_the_package(server32: Server, engine32: Engine) -> None:
    exchanges = Exchanges()
    with sdk.Client(host=server32.url, event_hooks={"response": [exchanges.hook]}) as client:
        (listed,) = client.list().models
        assert listed.model == f"{NAME}:latest"
        for name in (NAME, listed.model):
            answer = client.embed(name, TEXTS, options={"temperature": 0.5, "num_ctx": 4096}, keep_alive="5m")
            assert np.array_equal(np.array(answer.embeddings, np.float32), engine32.embed(TEXTS))
            assert answer.model == name
            assert (answer.total_duration or 0) > 0
        assert np.array_equal(np.array(client.embed(NAME, TEXTS[0]).embeddings, np.float32), engine32.embed(TEXTS[:1]))
        assert client.embed(NAME, "").embeddings == []
        one = client.embeddings(NAME, TEXTS[0]).embedding
        assert np.array_equal(np.array(one, np.float32), engine32.embed(TEXTS[0], normalize=False))
        shown = client.show(NAME)
        assert shown.capabilities == ["embedding"]
        assert shown.modelinfo is not None
        assert (shown.modelinfo["bert.embedding_length"], shown.modelinfo["bert.context_length"]) == (384, 256)
        assert [model.context_length for model in client.ps().models] == [256]
        with pytest.raises(sdk.ResponseError, match="not found") as unknown:
            client.embed("nomic-embed-text", "a")
        assert unknown.value.status_code == 404
        with pytest.raises(sdk.ResponseError, match="exceeds the context length") as long:
            client.embed(NAME, "far " * 300, truncate=False)
        assert long.value.status_code == 400
        exchanges.check("ollama/package")
        curl = ["curl", "-s", f"{server32.url}/api/embed", "-d", orjson.dumps({"model": NAME, "input": "a"}).decode()]
        answer = orjson.loads(subprocess.run(curl, capture_output=True, check=True).stdout)
        assert np.array_equal(np.array(answer["embeddings"], np.float32), engine32.embed(["a"]))


def test_the_package_awaited(server32: Server, engine32: Engine) -> None:
    async def ask_many(url: str) -> list[Any]:
        async with sdk.AsyncClient(host=url) as client:
            return await asyncio.gather(*(client.embed(NAME, text) for text in TEXTS[:2]))

    found = [answer.embeddings[0] for answer in asyncio.run(ask_many(server32.url))]
    assert np.array_equal(np.array(found, np.float32), engine32.embed(TEXTS[:2]))
