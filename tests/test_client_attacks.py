"""The client against servers that break off, drip, lie, hang up and die; and used after a fork, from many threads and loops."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any, Self

import numpy as np
import pytest

from whimbrel import AsyncClient, Client, errors

Script = Callable[[int, str, list[str]], bytes | list[bytes] | None]
"""(how many requests before, path, texts) -> what is sent, in pieces with pauses if it is a list; None: the connection is reset."""


class Hostile:
    """A server that sends what its script says, byte for byte."""

    def __init__(self, script: Script, *, keep: bool = True, pause: float = 0.0) -> None:
        self.script, self.keep, self.pause = script, keep, pause
        self.num_requests = self.num_connections = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            try:
                while (line := file.readline()) and self._answer(connection, file, line.split()[1].decode()):
                    pass
            except (OSError, ValueError):  # the client has left
                return

    def _answer(self, connection: socket.socket, file: Any, path: str) -> bool:
        headers = dict(line.lower().split(b": ") for line in iter(file.readline, b"\r\n"))
        body = json.loads(file.read(int(headers[b"content-length"])))
        with self._lock:
            number, self.num_requests = self.num_requests, self.num_requests + 1
        time.sleep(self.pause)
        sent = self.script(number, path, next(body[name] for name in ("input", "inputs", "texts", "documents") if name in body))
        if sent is None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        for piece in [sent] if isinstance(sent, bytes) else sent:
            connection.sendall(piece)
            time.sleep(0.05 if isinstance(sent, list) else 0)
        return self.keep


def http(status: int = 200, body: bytes = b"", **headers: str) -> bytes:
    """An answer; names of headers are written with _ for -."""
    named = {"content_length": str(len(body))} | headers
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items()]
    return f"HTTP/1.1 {status} X\r\n{''.join(lines)}\r\n".encode() + body


def array(vectors: Any, **changes: Any) -> bytes:
    block = {
        "name": "dense",
        "dtype": "float32",
        "endianness": "little",
        "start": 0,
        "end": vectors.nbytes,
        "shape": vectors.shape,
    }
    return http(body=vectors.tobytes(), metadata=json.dumps({"arrays": [block | changes]}))


def good(texts: list[str]) -> bytes:
    """The vector of a text that is a number is that number."""
    return array(np.array([[float(text)] for text in texts], np.float32))


def numbered(number: int, path: str, texts: list[str]) -> bytes:
    return good(texts)


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
    "redirect": (http(307, location="https://b/v1/embed"), "answered 307: it is at https://b/v1/embed. Give the base URL"),
    "no route": (http(404, b"Not Found"), "answered 404: Not Found. Are the base URL and the dialect right"),
    "no key": (http(401), "answered 401. Here the key is the client's `api_key`"),
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
    with Hostile(lambda *_: sent, keep=False) as server, pytest.raises(errors.WhimbrelError, match=says):
        ask(kind(server.url, max_retries=0), ["1", "2"])


def ask(client: Any, texts: Any) -> Any:
    """Embed, with either client, and close it."""
    if isinstance(client, Client):
        with client:
            return client.embed(texts)

    async def wait() -> Any:
        async with client:
            return await client.embed(texts)

    return asyncio.run(wait())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_body_that_drips_ends_with_the_timeout(kind: type[Any]) -> None:
    def script(number: int, path: str, texts: list[str]) -> list[bytes]:
        head, body = good(texts).split(b"\r\n\r\n")
        return [head + b"\r\n\r\n", *(body[i : i + 1] for i in range(len(body)))]

    started = time.monotonic()
    with Hostile(script) as server, pytest.raises(errors.Unavailable, match=r"within 0.2 seconds\. Give more time"):
        ask(kind(server.url, timeout=0.2, max_retries=0), [str(i) for i in range(20)])
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("after", ["900", formatdate(time.time() + 900, usegmt=True), "1000000000"])
def test_who_would_wait_too_long_is_told_at_once(after: str) -> None:
    with Hostile(lambda *_: http(429, retry_after=after)) as server, pytest.raises(errors.Overloaded, match=after):
        ask(Client(server.url), ["1"])
    assert server.num_requests == 1


@pytest.mark.parametrize("after", ["-1", "soon", "", "1e9", "Wed, 99 Foo 2026"])
def test_nonsense_in_retry_after_is_no_wait_of_its_own(after: str) -> None:
    def script(number: int, path: str, texts: list[str]) -> bytes:
        return good(texts) if number else http(503, retry_after=after)

    with Hostile(script) as server:
        assert ask(Client(server.url), ["7"]).tolist() == [[7]]


def test_servers_that_are_not_there_do_not_count_as_tries() -> None:
    with Hostile(lambda *_: http(429, retry_after="3600")) as busy, Hostile(numbered) as server:
        dead = [f"http://127.0.0.1:{port}" for port in (1, 2, 3, 4)]
        assert ask(Client([*dead, busy.url, server.url], max_retries=0), ["7"]).tolist() == [[7]]
        with pytest.raises(errors.Unavailable, match=r"127.0.0.1:[1-4]: .*refused. Is the server running"):
            ask(Client(dead, max_retries=0), ["7"])


def test_a_server_that_closes_idle_connections_costs_no_wait() -> None:
    with Hostile(numbered, keep=False) as server, Client(server.url) as client:
        started = time.monotonic()
        assert [client.embed(str(i)).item() for i in range(30)] == list(range(30))
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_nothing_is_lost_in_the_midst_of_faults(kind: type[Any]) -> None:
    def script(number: int, path: str, texts: list[str]) -> bytes | None:
        whole = good(texts)
        faults = {1: None, 3: whole[:-3], 5: http(503), 7: http(413), 9: http(429, retry_after="0"), 11: b""}
        return faults.get(number % 40, whole)

    with Hostile(script, keep=False) as first, Hostile(script, keep=False) as second:
        vectors = ask(kind([first.url, second.url], max_items=30, max_in_flight=4), (str(i) for i in range(3000)))
        assert np.array_equal(vectors[:, 0], np.arange(3000))
        assert min(first.num_requests, second.num_requests) > 10


def test_a_server_that_dies_in_mid_list_is_left() -> None:
    with (
        Hostile(lambda number, path, texts: good(texts) if number < 5 else None, keep=False) as first,
        Hostile(numbered) as second,
    ):
        vectors = ask(Client([first.url, second.url], max_items=10), [str(i) for i in range(1000)])
    assert np.array_equal(vectors[:, 0], np.arange(1000))
    assert first.num_requests < 20


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_connections_are_few_and_requests_are_made_as_they_are_sent(kind: type[Any]) -> None:
    with Hostile(numbered) as server:
        vectors = ask(kind(server.url), (str(i) for i in range(100_000)))
        assert np.array_equal(vectors[:, 0], np.arange(100_000))
        assert server.num_connections <= 8


def test_the_text_that_is_too_large_is_named() -> None:
    def script(number: int, path: str, texts: list[str]) -> bytes:
        return http(413, b'{"error": "too large"}') if any(len(text) > 100 for text in texts) else good(texts)

    with Hostile(script) as server, pytest.raises(errors.TooLarge, match=r"^input\[70\]: too large"):
        ask(Client(server.url), ["1"] * 70 + ["2" * 101] + ["3"] * 30)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_servers_of_different_models_are_found_out(kind: type[Any]) -> None:
    def script(number: int, path: str, texts: list[str]) -> bytes:
        return array(np.ones((len(texts), 2 + number % 2), np.float32))

    with Hostile(script) as server, pytest.raises(errors.WhimbrelError, match="Do all servers serve the same model"):
        ask(kind(server.url, max_items=2), ["1"] * 10)


# Lives of a client


@pytest.fixture
def slow() -> Iterator[Hostile]:
    with Hostile(numbered, pause=0.2) as server:
        yield server


def test_closing_ends_what_another_thread_asks(slow: Hostile) -> None:
    client = Client(slow.url, max_items=1, max_in_flight=2)
    threading.Timer(0.3, client.close).start()
    with pytest.raises(errors.Unavailable, match=r"^the client is closed\.$"):
        client.embed(["1"] * 50)
    assert slow.num_requests < 8
    client = Client(slow.url)
    threading.Timer(0.1, client.close).start()
    assert client.embed("7") == [7]  # what is on its way arrives


def test_a_wait_for_another_try_ends_with_the_client() -> None:
    started = time.monotonic()
    with Hostile(lambda *_: http(429, retry_after="30")) as server:
        client = Client(server.url)
        threading.Timer(0.2, client.close).start()
        with pytest.raises(errors.Unavailable, match="is closed"):
            client.embed("1")
    assert time.monotonic() - started < 5


def test_an_interrupt_does_not_wait_for_answers() -> None:
    started = time.monotonic()
    with Hostile(numbered, pause=3) as server:
        threading.Timer(0.3, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            ask(Client(server.url, max_items=1), ["1"] * 50)
    assert time.monotonic() - started < 2
    assert server.num_requests <= 8


FORK = """
import os, sys
import numpy as np
from whimbrel import Client

with Client(sys.argv[1], max_items=10) as client:
    client.embed(["1"] * 60)
    pid = os.fork()
    for count in (1, 60):
        first = 0 if pid else 100_000
        expected = np.arange(first, first + count)
        for _ in range(40):
            assert np.array_equal(client.embed([str(i) for i in expected])[:, 0], expected)
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
"""
LOOPS = """
import asyncio, sys, threading
from whimbrel import AsyncClient

client = AsyncClient(sys.argv[1], max_items=1, max_in_flight=3)
texts = [str(i) for i in range(9)]
found = [asyncio.run(client.embed(texts)), asyncio.run(client.embed(texts))]
threads = [threading.Thread(target=lambda: found.append(asyncio.run(client.embed(texts)))) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert [vectors[:, 0].tolist() for vectors in found] == [list(range(9))] * 4
"""


@pytest.mark.parametrize("program", [FORK, LOOPS])
def test_a_child_or_an_event_loop_has_connections_of_its_own(program: str) -> None:
    with Hostile(numbered, pause=0.005) as server:
        done = subprocess.run(
            [sys.executable, "-c", program, server.url], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr


def test_after_an_error_no_task_is_left(slow: Hostile) -> None:
    slow.script = lambda number, path, texts: http(400) if number == 3 else good(texts)

    async def fail() -> int:
        async with AsyncClient(slow.url, max_items=1, max_in_flight=2) as client:
            with pytest.raises(errors.InvalidRequest):
                await client.embed(["1"] * 50)
            return len(asyncio.all_tasks())

    assert asyncio.run(fail()) == 1
    assert slow.num_requests < 10


def test_closing_ends_what_other_tasks_ask(slow: Hostile) -> None:
    async def close() -> None:
        client = AsyncClient(slow.url, max_items=1, max_in_flight=2)
        asking = asyncio.ensure_future(client.embed(["1"] * 50))
        await asyncio.sleep(0.3)
        await client.close()
        with pytest.raises(errors.Unavailable, match=r"^the client is closed\.$"):
            await asking

    asyncio.run(close())


def test_threads_share_what_may_be_in_flight() -> None:
    with Hostile(numbered, pause=0.005) as server, Client(server.url, max_items=5, max_in_flight=4) as client:
        wrong: list[int] = []

        def run(first: int) -> None:
            for start in range(first, first + 200, 50):
                expected = np.arange(start, start + 50)
                if not np.array_equal(client.embed([str(i) for i in expected])[:, 0], expected):
                    wrong.append(start)

        threads = [threading.Thread(target=run, args=(number * 1000,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not wrong
        assert server.num_connections <= 4


# What is given


@pytest.mark.parametrize(
    "url",
    ["http://a:99999", "http://a:b", "http://[::1", "http://a..b", "http://a?b=1", "http://a#b", "ftp://a", "http://", "a", 5, None, [5],
     b"http://a", [], f"http://{'a' * 70}"],
)  # fmt: skip
def test_a_url_that_is_none(url: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"^base_url: "):
        Client(url)


@pytest.mark.parametrize(
    "options",
    [{"api_key": "a\n"}, {"api_key": "ü"}, {"api_key": 5}, {"timeout": float("inf")}, {"timeout": 0}, {"timeout": None},
     {"max_in_flight": 2.5}, {"max_items": True}, {"max_retries": 0.5}],
)  # fmt: skip
def test_settings_that_cannot_be_meant(options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"^{next(iter(options))}: must be "):
        AsyncClient(**options)


def test_a_base_url_may_end_with_the_version() -> None:
    paths: list[str] = []
    with Hostile(lambda number, path, texts: paths.append(path) or good(texts)) as server:
        for end in ("", "/", "/v1", "/v1/", "/api"):
            ask(Client(server.url + end), "1")
    assert paths == ["/v1/embed"] * 4 + ["/api/v1/embed"]


def test_a_password_in_the_url_is_not_shown() -> None:
    with pytest.raises(errors.Unavailable) as caught:
        ask(Client("http://user:secret@127.0.0.1:1", max_retries=0), "1")
    assert "secret" not in str(caught.value)


def test_the_text_that_cannot_be_sent_is_named() -> None:
    with Hostile(numbered) as server, Client(server.url, max_items=3) as client:
        with pytest.raises(errors.InvalidRequest, match=r"^input\[10\]: holds a lone surrogate"):
            client.embed(["1"] * 10 + ["\ud800"])
        assert client.embed(np.array(["1", "2"])).tolist() == [[1], [2]]
        assert client.embed([" " * 10**6 + "1", "2"]).tolist() == [[1], [2]]
    with Client() as client:
        with pytest.raises(errors.InvalidRequest, match=r"^documents\[10\]: holds a lone surrogate"):
            client.rerank("q", ["1"] * 10 + ["\ud800"])
        with pytest.raises(errors.InvalidRequest, match=r"^query: holds a lone surrogate"):
            client.rerank("\ud800", ["1"] * 10)


@pytest.mark.parametrize("dialect", ["whimbrel", "tei", "cohere"])
def test_of_no_documents_nothing_is_asked(dialect: Any) -> None:
    client = Client("http://127.0.0.1:1", dialect=dialect)
    assert client.rerank("q", []) == []
    if dialect == "whimbrel":
        assert client.score("q", []).shape == (0,)
        assert asyncio.run(AsyncClient("http://127.0.0.1:1").explain("q", [])) == []


def test_there_may_be_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    with Hostile(numbered) as server:
        monkeypatch.setattr("sys.stderr", None)
        assert ask(Client(server.url, max_items=1), ["1", "2"]).tolist() == [[1], [2]]


# Other servers


def tei(limit: int, status: int) -> Script:
    """TEI 1.9: 422 for too many, older ones 413; errors name no place."""

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
    with Hostile(tei(limit, status)) as server, Client(server.url, dialect="tei") as client:
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

    with Hostile(script) as server, Client(server.url, dialect="tei") as client:
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
    with Hostile(script) as server:
        for version, dialect in (("/v1", "openai"), ("/v2", "cohere")):
            assert ask(Client(server.url + version, dialect=dialect, model="m"), texts)[:, 0].tolist() == list(range(100))  # pyright: ignore
    assert sorted(paths) == ["/v1/embeddings", "/v2/embed", "/v2/embed"]
