"""Lifecycle of a client: close, interrupt, fork, threads and event loops; and its arguments."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from inspect import iscoroutinefunction, signature
from typing import Any

import numpy as np
import pytest

from scripted_server import ScriptedServer, ask, good, http, numbered
from whimbrel import AsyncClient, Client, Engine, errors

VERBS = "embed sparse multi_vector muvera encode score rerank explain classify token_classify".split()


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_look_as_they_are_called(verb: str) -> None:
    now, awaited, ours = (signature(getattr(kind, verb)) for kind in (Client, AsyncClient, Engine))
    assert now == awaited
    assert list(now.parameters) == list(ours.parameters)
    assert now.return_annotation == ours.return_annotation
    assert getattr(Client, verb).__doc__ == getattr(AsyncClient, verb).__doc__ != ""
    assert iscoroutinefunction(getattr(AsyncClient, verb))


@pytest.fixture
def slow() -> Iterator[ScriptedServer]:
    with ScriptedServer(numbered, pause=0.2) as server:
        yield server


def test_closing_ends_what_another_thread_asks(slow: ScriptedServer) -> None:
    client = Client(slow.url, max_items=1, max_in_flight=2)
    threading.Timer(0.3, client.close).start()
    with pytest.raises(errors.Unavailable, match=r"^the client is closed\.$"):
        client.embed(["1"] * 50)
    assert slow.num_requests < 8
    client = Client(slow.url)
    threading.Timer(0.1, client.close).start()
    assert client.embed("7") == [7]  # a request in flight finishes


def test_a_wait_for_another_try_ends_with_the_client() -> None:
    started = time.monotonic()
    with ScriptedServer(lambda *_: http(429, retry_after="30")) as server:
        client = Client(server.url)
        threading.Timer(0.2, client.close).start()
        with pytest.raises(errors.Unavailable, match="is closed"):
            client.embed("1")
    assert time.monotonic() - started < 5


def test_an_interrupt_does_not_wait_for_answers() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore it
    try:
        interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    started = time.monotonic()
    with ScriptedServer(numbered, pause=3) as server:
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
@pytest.mark.sample(1)
def test_a_child_or_an_event_loop_has_connections_of_its_own(program: str) -> None:
    with ScriptedServer(numbered, pause=0.005) as server:
        done = subprocess.run(
            [sys.executable, "-c", program, server.url], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr


def test_after_an_error_no_task_is_left(slow: ScriptedServer) -> None:
    slow.script = lambda number, path, texts: http(400) if number == 3 else good(texts)

    async def fail() -> int:
        async with AsyncClient(slow.url, max_items=1, max_in_flight=2) as client:
            with pytest.raises(errors.InvalidRequest):
                await client.embed(["1"] * 50)
            return len(asyncio.all_tasks())

    assert asyncio.run(fail()) == 1
    assert slow.num_requests < 10


def test_closing_ends_what_other_tasks_ask(slow: ScriptedServer) -> None:
    async def close() -> None:
        client = AsyncClient(slow.url, max_items=1, max_in_flight=2)
        asking = asyncio.ensure_future(client.embed(["1"] * 50))
        await asyncio.sleep(0.3)
        await client.close()
        with pytest.raises(errors.Unavailable, match=r"^the client is closed\.$"):
            await asking

    asyncio.run(close())


def test_threads_share_what_may_be_in_flight() -> None:
    with ScriptedServer(numbered, pause=0.005) as server, Client(server.url, max_items=5, max_in_flight=4) as client:
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


# Arguments


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
    with ScriptedServer(lambda number, path, texts: paths.append(path) or good(texts)) as server:
        for end in ("", "/", "/v1", "/v1/", "/api"):
            ask(Client(server.url + end), "1")
    assert paths == ["/v1/embed"] * 4 + ["/api/v1/embed"]


@pytest.mark.parametrize(
    ("name", "value"), [("ALL_PROXY", "socks4://a"), ("HTTP_PROXY", "x://a"), ("SSL_CERT_FILE", "/nowhere")]
)
def test_an_environment_that_lets_nobody_out(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(errors.SetupError, match="Check the environment variables .*" + name):
        Client("https://a")


def test_a_proxy_that_is_in_the_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:1")
    with pytest.raises(errors.Unavailable, match=r"through the proxy http://127\.0\.0\.1:1 of the environment"):
        ask(Client("http://whimbrel.invalid", max_retries=0), "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(errors.Unavailable, match=r"running\?$"):
        ask(Client("http://127.0.0.1:1", max_retries=0), "1")


def test_a_password_in_the_url_is_not_shown() -> None:
    with pytest.raises(errors.Unavailable) as caught:
        ask(Client("http://user:secret@127.0.0.1:1", max_retries=0), "1")
    assert "secret" not in str(caught.value)


def test_the_text_that_cannot_be_sent_is_named() -> None:
    with ScriptedServer(numbered) as server, Client(server.url, max_items=3) as client:
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
    with ScriptedServer(numbered) as server:
        monkeypatch.setattr("sys.stderr", None)
        assert ask(Client(server.url, max_items=1), ["1", "2"]).tolist() == [[1], [2]]
