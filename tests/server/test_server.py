"""The server through a real socket, with real clients and every bad input; after each it still answers the same."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import orjson
import pytest

from serving import Server
from texts import TEXTS
from waiting import wait_for
from whimbrel import AsyncClient, Client, Engine, errors
from whimbrel.model.runner import probe

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
GOLDEN = "A whimbrel is a wader."
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def http_client(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def still_answers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did: the server is ready, and a text has the same bits as in-process."""
    if not {"server", "http_client"} & set(request.fixturenames):
        yield
        return
    url, engine = request.getfixturevalue("server").url, request.getfixturevalue("engine")
    yield
    assert httpx2.get(f"{url}/health/ready").status_code == 200
    with Client(url) as client:
        assert np.array_equal(client.embed(GOLDEN), engine.embed(GOLDEN))


def post(client: httpx2.Client, body: Any, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    return client.post(PATH, content=content, headers={"content-type": "application/json"} | headers)


# Real clients


def test_openai_client(server: Server, engine: Engine) -> None:
    expected = engine.embed(TEXTS[:30])
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}, {"user": "u"}, {"dimensions": 384}):
            answer = client.embeddings.create(model=MODEL, input=TEXTS[:30], **options)
            rows = [row.embedding for row in answer.data]
            if options.get("encoding_format") == "base64":  # asked for by name, the client hands the text on as it came
                rows = [np.frombuffer(__import__("base64").b64decode(row), np.float32) for row in rows]  # pyright: ignore
            assert np.array_equal(np.array(rows, np.float32), expected)
            assert [row.index for row in answer.data] == list(range(30))
            assert answer.model == MODEL
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum_of_tokens(engine, TEXTS[:30])
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError) as not_found:
            client.embeddings.create(model="text-embedding-3-small", input="a")
        assert not_found.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            client.embeddings.create(model=MODEL, input=[])
        assert bad.value.param == "input"


def test_openai_client_with_token_ids(server: Server, engine: Engine) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        one = client.embeddings.create(model=MODEL, input=[101, 7592, 102]).data
        two = client.embeddings.create(model=MODEL, input=[[101, 7592, 102], [101, 102]]).data
    expected = engine.embed(["hello", ""])
    assert np.array_equal(np.array([row.embedding for row in two], np.float32), expected)
    assert np.array_equal(np.array(one[0].embedding, np.float32), expected[0])


def test_async_openai_client(server: Server, engine: Engine) -> None:
    async def main() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            return await asyncio.gather(*(client.embeddings.create(model=MODEL, input=text) for text in TEXTS[20:60]))

    vectors = np.array([answer.data[0].embedding for answer in asyncio.run(main())], np.float32)
    assert np.array_equal(vectors, engine.embed(TEXTS[20:60]))


def test_whimbrel_s_own_clients(server: Server, engine: Engine) -> None:
    async def main() -> Any:
        async with AsyncClient(server.url, model=MODEL) as client:
            assert (await client.embed("a")).shape == (384,)
            with pytest.raises(errors.InvalidRequest):
                await client.embed("a", dimensions=3)
            return await client.embed(TEXTS[:20])

    assert np.array_equal(asyncio.run(main()), engine.embed(TEXTS[:20]))
    with Client(server.url) as client:
        assert np.array_equal(client.embed(TEXTS[:20], normalize=False), engine.embed(TEXTS[:20], normalize=False))
        with pytest.raises(errors.InvalidRequest, match="prompts: none") as caught:
            client.embed("a", prompt="query")
        assert (caught.value.status, caught.value.param) == (400, "prompt_name")
        assert np.array_equal(client.embed("a", prompt="query: "), engine.embed("a", prompt="query: "))
        with pytest.raises(errors.InvalidRequest, match="lone surrogate"):
            client.embed("\ud800")
        assert client.embed(["a"] * 2049).shape == (2049, 384)
        with pytest.raises(errors.TooLong) as caught:
            client.embed("word " * 300, truncate=False)
        assert caught.value.code == "context_length_exceeded"
    with Client(server.url, model="other") as client, pytest.raises(errors.ModelNotFound) as caught:
        client.embed("a")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    with Client("http://127.0.0.1:1") as client, pytest.raises(errors.Unavailable, match="Is the server running"):
        client.embed("a")


def sum_of_tokens(engine: Engine, texts: list[str]) -> int:
    from whimbrel.types.request import Request

    return engine.run(Request(texts)).num_tokens


# Extra fields


def test_extra_fields(http_client: httpx2.Client, engine: Engine) -> None:
    body = {
        "input": ["one two three", "four"],
        "prompt": "query: ",
        "truncate_prompt_tokens": 6,
        "normalize": False,
        "truncate": "right",
    }
    answer = post(http_client, body)
    vectors = np.array([row["embedding"] for row in answer.json()["data"]], np.float32)
    assert np.array_equal(vectors, engine.embed(["query : one two three four"[:16], "query: four"], normalize=False)[[0, 1]])
    assert answer.json()["usage"]["prompt_tokens"] == 6 + 5
    assert answer.headers["x-whimbrel-truncated"] == "1"
    assert answer.headers["x-whimbrel-tokens"] == "11"
    assert "compute;dur=" in answer.headers["server-timing"]


def test_the_request_id_is_echoed_if_it_is_one(http_client: httpx2.Client) -> None:
    assert post(http_client, {"input": "a"}, **{"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(post(http_client, {"input": "a"}, **{"x-request-id": "a b" * 99}).headers["x-request-id"]) == 32


# Bad input is in tests/faults


def test_work_of_a_client_that_left_is_dropped(server: Server, http_client: httpx2.Client) -> None:
    before = computed(http_client)
    body = orjson.dumps({"input": [text * 3 for text in TEXTS[20:1000]]})
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + body)
        assert wait_for(lambda: queued(http_client) > 10_000)
    assert wait_for(lambda: queued(http_client) == 0, seconds=5)
    assert wait_for(lambda: 'outcome="client_gone",route="/v1/embeddings",status="499"}' in http_client.get("/metrics").text)
    assert computed(http_client) == before


def computed(client: httpx2.Client) -> float:
    """Texts answered so far."""
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("whimbrel_texts_total"))


def queued(client: httpx2.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("whimbrel_queue_tokens"))


# What else it tells


def test_info(http_client: httpx2.Client) -> None:
    info = http_client.get("/info").json()
    model = info["models"][0]
    assert model["card"]["outputs"]["dense"]["width"] == 384
    assert model["plan"]["max_length"] == 256
    assert model["plan"]["dtype"] == ("bfloat16" if probe().fast_bfloat16 else "float32")
    assert model["plan"]["cpu"]["level"] == probe().cpu.level
    assert model["plan"]["same_bits"] is True


def test_health(http_client: httpx2.Client) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        assert http_client.get(path).json() == {"status": "ok"}


def test_metrics(http_client: httpx2.Client) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    post(http_client, {"input": ["a", "b"]})
    before = {family.name: family for family in text_string_to_metric_families(http_client.get("/metrics").text)}
    post(http_client, {"input": ["a", "word " * 300]})
    after = {family.name: family for family in text_string_to_metric_families(http_client.get("/metrics").text)}

    def difference(name: str) -> float:
        return after[name].samples[0].value - before[name].samples[0].value

    assert difference("whimbrel_texts") == 2
    assert difference("whimbrel_tokens") == 3 + 256
    assert difference("whimbrel_truncated_texts") == 1
    stages = {sample.labels["stage"] for sample in after["whimbrel_stage_seconds"].samples}
    assert stages == {"receive", "read", "tokenize", "queue", "pack", "compute", "collect", "write"}


def test_openapi_and_docs(http_client: httpx2.Client) -> None:
    document = http_client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    fields = document["components"]["schemas"]["EmbeddingsRequest"]["properties"]
    assert {
        "input",
        "model",
        "encoding_format",
        "dimensions",
        "user",
        "prompt",
        "prompt_name",
        "normalize",
        "truncate_prompt_tokens",
    } < set(fields)
    references = {text.split('"')[0] for text in http_client.get("/openapi.json").text.split("#/components/schemas/")[1:]}
    assert references <= set(document["components"]["schemas"])
    page = http_client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "truncate_prompt_tokens" in page.text
    for path, status, example in (
        ("/v1/embeddings", "400", {"error": {"message", "type", "param", "code"}, "detail": ""}),
        ("/embed", "422", {"error", "error_type"}),
        ("/v2/embed", "400", {"message"}),
    ):
        answer = document["paths"][path]["post"]["responses"][status]
        assert any(set(each["value"]) == set(example) for each in answer["content"]["application/json"]["examples"].values())
    assert re.findall(r"<script[^>]*>", page.text) == ['<script type="module" src="assets/docs.js">']


# Banner, signals


@pytest.mark.parametrize("key", ["", "s3cret key's $HOME"])
@pytest.mark.sample(1)
def test_what_the_banner_says_works_when_pasted(key: str) -> None:
    env = {"WHIMBREL_API_KEY": key} if key else {}
    with Server(**env) as server:
        curl = server.log.split("In a shell")[1].splitlines()[1]
        python = server.log.split("In Python")[1].split("\n", 1)[1]
        env = os.environ | env
        answer = orjson.loads(subprocess.run(["bash", "-c", curl], capture_output=True, check=True, env=env).stdout)
        assert len(answer["data"][0]["embedding"]) == 384
        assert len(python.strip().splitlines()) == 3
        assert (
            subprocess.run([sys.executable, "-c", python], capture_output=True, check=True, env=env).stdout.count(b".") >= 384
        )


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::1"])
@pytest.mark.sample(1)
def test_hosts(host: str) -> None:
    with Server("--host", host) as server, Client(server.url) as client:
        assert client.embed("a").shape == (384,)
        assert ("warning: anyone" in server.log) == (host == "0.0.0.0")
        named = httpx2.get(f"{server.url}/health", headers={"host": "vectors.example.com"})
        assert named.status_code == (200 if host == "0.0.0.0" else 403)


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.sample(1)
def test_a_signal_lets_requests_in_flight_finish(name: signal.Signals) -> None:
    with Server() as server:
        answers: list[int] = []

        def ask() -> None:
            with httpx2.Client(base_url=server.url, timeout=60) as client:
                answers.append(post(client, {"input": TEXTS[220:240]}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        with httpx2.Client(timeout=60, base_url=server.url) as client:
            assert wait_for(lambda: 'requests_in_flight{route="/v1/embeddings"} 2.0' in client.get("/metrics").text)
        assert server.stop(name) == 0
        for thread in threads:
            thread.join()
        assert answers == [200, 200]
        assert "Traceback" not in server.log
