"""The client against faulty servers: truncated, slow and false responses, disconnects and crashes."""

from __future__ import annotations

import base64
import json
import time
from email.utils import formatdate
from typing import Any

import numpy as np
import pytest

from scripted_server import Script, ScriptedServer, array, ask, good, http, numbered
from whimbrel import AsyncClient, Client, errors

ONES = np.ones((2, 3), np.float32)
BROKEN: dict[str, tuple[bytes | None, str]] = {
    "reset": (None, "the connection to http://127.0.0.1:[0-9]+ broke: "),
    "nothing": (b"", "broke: Server disconnected"),
    "half a head": (b"HTTP/1.1 200 OK\r\nconte", "broke"),
    "half a body": (array(ONES)[:-5], r"broke: .*received 19 bytes, expected 24"),
    "half an error": (http(400, b'{"error"', content_length="99"), "broke"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.9\r\n", "broke"),
    "short": (http(body=ONES.tobytes()[:12], metadata=array(ONES).split(b"metadata: ")[1].split(b"\r")[0].decode()), "cannot be read: .*24 of 12"),
    "a page": (http(body=b"<html>Log in</html>", content_type="text/html"), r"no header 'metadata'.*text/html, 19 bytes that begin with '<html>Log in"),
    "a gateway's page": (http(502, b"<html>Bad gateway</html>"), "http://127.0.0.1:[0-9]+ answered 502: <html>Bad gateway"),
    "no words": (http(500), r"answered 500\.$"),
    "redirect": (http(307, location="https://b/v1/embed"), "answered 307: it moved to https://b/v1/embed. Use the base URL"),
    "no route": (http(404, b"Not Found"), "answered 404: Not Found. Are the base URL and the dialect right"),
    "no key": (http(401), "answered 401. Pass the key to the client as `api_key`"),
    "no array": (http(metadata='{"arrays": []}'), "it has no dense"),
    "other type": (array(ONES.astype(np.float16), dtype="float16"), r"dense is float16 of shape \[2, 3\]"),
    "one dimension": (array(ONES[0, :2]), r"dense is float32 of shape \[2\]"),
    "no columns": (array(ONES[:, :0]), "dense has no columns"),
    "NaN": (array(ONES * np.nan), "dense has numbers that are NaN"),
    "deep JSON": (http(500, b"[" * 100_000), r"answered 500: \[\["),
    "a code that is none": (http(400, b'{"error": {"message": "no", "code": ["a"], "param": {"b": 1}}}'), "^no$"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_every_bad_answer_is_an_error_that_says_what_and_where(name: str, kind: type[Any]) -> None:
    sent, says = BROKEN[name]
    with ScriptedServer(lambda *_: sent, keep=False) as server, pytest.raises(errors.WhimbrelError, match=says):
        ask(kind(server.url, max_retries=0), ["1", "2"])


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_body_that_drips_ends_with_the_timeout(kind: type[Any]) -> None:
    def script(number: int, path: str, texts: list[str]) -> list[bytes]:
        head, body = good(texts).split(b"\r\n\r\n")
        return [head + b"\r\n\r\n", *(body[i : i + 1] for i in range(len(body)))]

    started = time.monotonic()
    with ScriptedServer(script) as server, pytest.raises(errors.Unavailable, match=r"within 0.2 seconds\. Increase `timeout`"):
        ask(kind(server.url, timeout=0.2, max_retries=0), [str(i) for i in range(20)])
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("after", ["900", "in 900 seconds, as a date", "1000000000"])
def test_who_would_wait_too_long_is_told_at_once(after: str) -> None:
    if "date" in after:
        after = formatdate(time.time() + 900, usegmt=True)
    with ScriptedServer(lambda *_: http(429, retry_after=after)) as server, pytest.raises(errors.Overloaded, match=after):
        ask(Client(server.url), ["1"])
    assert server.num_requests == 1


@pytest.mark.parametrize("after", ["-1", "soon", "", "1e9", "Wed, 99 Foo 2026"])
def test_nonsense_in_retry_after_is_no_wait_of_its_own(after: str) -> None:
    def script(number: int, path: str, texts: list[str]) -> bytes:
        return good(texts) if number else http(503, retry_after=after)

    with ScriptedServer(script) as server:
        assert ask(Client(server.url), ["7"]).tolist() == [[7]]


def test_servers_that_are_not_there_do_not_count_as_tries() -> None:
    with ScriptedServer(lambda *_: http(429, retry_after="3600")) as busy, ScriptedServer(numbered) as server:
        dead = [f"http://127.0.0.1:{port}" for port in (1, 2, 3, 4)]
        assert ask(Client([*dead, busy.url, server.url], max_retries=0), ["7"]).tolist() == [[7]]
        with pytest.raises(errors.Unavailable, match=r"127.0.0.1:[1-4]: .*refused. Is the server running"):
            ask(Client(dead, max_retries=0), ["7"])


def test_a_server_that_closes_idle_connections_costs_no_wait() -> None:
    with ScriptedServer(numbered, keep=False) as server, Client(server.url) as client:
        started = time.monotonic()
        assert [client.embed(str(i)).item() for i in range(30)] == list(range(30))
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.sample(1)
def test_nothing_is_lost_in_the_midst_of_faults(kind: type[Any]) -> None:
    def script(number: int, path: str, texts: list[str]) -> bytes | None:
        whole = good(texts)
        faults = {1: None, 3: whole[:-3], 5: http(503), 7: http(413), 9: http(429, retry_after="0"), 11: b""}
        return faults.get(number % 40, whole)

    with ScriptedServer(script, keep=False) as first, ScriptedServer(script, keep=False) as second:
        vectors = ask(kind([first.url, second.url], max_items=30, max_in_flight=4), (str(i) for i in range(3000)))
        assert np.array_equal(vectors[:, 0], np.arange(3000))
        assert min(first.num_requests, second.num_requests) > 10


def test_a_server_that_dies_in_mid_list_is_left() -> None:
    with (
        ScriptedServer(lambda number, path, texts: good(texts) if number < 5 else None, keep=False) as first,
        ScriptedServer(numbered) as second,
    ):
        vectors = ask(Client([first.url, second.url], max_items=10), [str(i) for i in range(1000)])
    assert np.array_equal(vectors[:, 0], np.arange(1000))
    assert first.num_requests < 20


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_connections_are_few_and_requests_are_made_as_they_are_sent(kind: type[Any]) -> None:
    with ScriptedServer(numbered) as server:
        vectors = ask(kind(server.url), (str(i) for i in range(100_000)))
        assert np.array_equal(vectors[:, 0], np.arange(100_000))
        assert server.num_connections <= 8


def test_the_text_that_is_too_large_is_named() -> None:
    def script(number: int, path: str, texts: list[str]) -> bytes:
        return http(413, b'{"error": "too large"}') if any(len(text) > 100 for text in texts) else good(texts)

    with ScriptedServer(script) as server, pytest.raises(errors.TooLarge, match=r"^input\[70\]: too large"):
        ask(Client(server.url), ["1"] * 70 + ["2" * 101] + ["3"] * 30)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_servers_of_different_models_are_found_out(kind: type[Any]) -> None:
    def script(number: int, path: str, texts: list[str]) -> bytes:
        return array(np.ones((len(texts), 2 + number % 2), np.float32))

    with ScriptedServer(script) as server, pytest.raises(errors.WhimbrelError, match="Do all servers serve the same model"):
        ask(kind(server.url, max_items=2), ["1"] * 10)


# Other servers


def tei(limit: int, status: int) -> Script:
    """TEI 1.9 answers 422 to too many texts, older versions 413. Errors have no location."""

    def script(number: int, path: str, texts: list[str]) -> bytes:
        def refuse(message: str) -> bytes:
            return http(status, json.dumps({"error": message, "error_type": "Validation"}).encode())

        if len(texts) > limit:
            return refuse(f"batch size {len(texts)} > maximum allowed batch size {limit}")
        if any(len(text) > 100 for text in texts):
            return refuse("Input validation error: `inputs` must have less than 512 tokens. Given: 600")
        rows: Any = [[float(text)] for text in texts]
        if path == "/rerank":
            rows = [{"index": i, "score": row[0]} for i, row in sorted(enumerate(rows), key=lambda each: -each[1][0])]
        return http(body=json.dumps(rows).encode())

    return script


@pytest.mark.parametrize(("limit", "num_requests"), [(32, 4), (8, 22)])
@pytest.mark.parametrize("status", [413, 422])
def test_tei_takes_few_texts_at_a_time(limit: int, num_requests: int, status: int) -> None:
    texts = [str(i) for i in range(100)]
    with ScriptedServer(tei(limit, status)) as server, Client(server.url, dialect="tei") as client:
        assert client.embed(texts)[:, 0].tolist() == list(range(100))
        assert server.num_requests == num_requests
        assert [each.index for each in client.rerank("q", texts, top_n=2)] == [99, 98]
        with pytest.raises(errors.InvalidRequest, match="must have less than 512 tokens") as caught:
            client.embed([*texts, "1" * 200])
        assert caught.value.param == ("input[100]" if status == 413 else None)
        if status == 422 and limit == 32:
            assert caught.value.__notes__ == ["The request was over items 96 to 100 of the list."]


def test_places_in_messages_are_those_of_the_whole_list() -> None:
    def script(number: int, path: str, texts: list[str]) -> bytes:
        if "bad" in texts:
            return http(
                422, json.dumps({"error": f"inputs[{texts.index('bad')}]: is bad", "error_type": "Validation"}).encode()
            )
        return tei(32, 422)(number, path, texts)  # pyright: ignore

    with ScriptedServer(script) as server, Client(server.url, dialect="tei") as client:
        with pytest.raises(errors.InvalidRequest, match=r"^input\[70\]: is bad"):
            client.embed(["1"] * 70 + ["bad"] * 3)
        server.script = lambda *_: http(424, b'{"error": "no reranker", "error_type": "Backend"}')
        with pytest.raises(errors.ComputeError, match=r"^no reranker$"):
            client.rerank("q", ["1"])


def test_openai_s_and_cohere_s_base_urls_and_shapes() -> None:
    def script(number: int, path: str, texts: list[str]) -> bytes:
        paths.append(path)
        rows = [base64.b64encode(np.float32(text).tobytes()).decode() for text in texts]
        openai = {"data": [{"index": i, "embedding": row} for i, row in enumerate(rows)][::-1]}
        cohere = {"id": "x", "embeddings": {"base64": rows}, "response_type": "embeddings_by_type", "meta": {}}
        return http(body=json.dumps(openai if path == "/v1/embeddings" else cohere).encode())

    paths: list[str] = []
    texts = [str(i) for i in range(100)]
    with ScriptedServer(script) as server:
        for version, dialect in (("/v1", "openai"), ("/v2", "cohere")):
            assert ask(Client(server.url + version, dialect=dialect, model="m"), texts)[:, 0].tolist() == list(range(100))  # pyright: ignore
    assert sorted(paths) == ["/v1/embeddings", "/v2/embed", "/v2/embed"]
