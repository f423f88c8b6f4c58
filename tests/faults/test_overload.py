"""E of the catalogue: overload, deadlines, fairness and clients that leave. The fault backend holds the lanes up meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import httpx2
import numpy as np
import openai
import pytest

import fault_injection
from load import ask, holds, queued_tokens, vectors_of
from raw_http import Connection, post
from serving import Server
from texts import TEXTS
from waiting import wait_for
from whimbrel import Engine
from whimbrel.types.arrays import Float32Array

SOME = [text for text in TEXTS if 20 < len(text) < 200][:16]
MODEL = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Float32Array:
    return engine.embed(SOME)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--max-queue-tokens", "3000", "--max-queue-seconds", "1000", **fault_injection.ENVIRONMENT) as server:
        yield server


@contextmanager
def held_up(server: Server, threads: ThreadPoolExecutor, seconds: str = "2") -> Iterator[None]:
    """For so long the lanes do nothing, and what they hold is too urgent to be overtaken."""
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        holding = [threads.submit(ask, client, [holds(seconds)], priority=-1) for _ in range(4)]
        time.sleep(0.8)
        yield
        assert [future.result().status_code for future in holding] == [200] * 4


def test_E1_E2_a_full_queue_refuses_bulk_and_admits_queries(server: Server, expected: Float32Array) -> None:
    client = httpx2.Client(base_url=server.url, timeout=60, limits=httpx2.Limits(max_connections=100))
    with client, ThreadPoolExecutor(64) as threads:
        with held_up(server, threads):
            bulk = [threads.submit(ask, client, SOME * 2) for _ in range(30)]
            refused = [future.result() for future in wait(bulk, timeout=1)[0]]  # those that are admitted wait for the lanes
            query = threads.submit(ask, client, SOME[:1])
        answers = [future.result() for future in bulk]
        assert {answer.status_code for answer in refused} == {429}
        assert {answer.status_code for answer in answers} == {200, 429}
        assert all(
            np.array_equal(vectors_of(answer), np.tile(expected, (2, 1))) for answer in answers if answer.status_code == 200
        )
        assert query.result().status_code == 200
        waits = {int(answer.headers["retry-after"]) for answer in refused}
        assert min(waits) >= 1
        assert len(refused) >= 10
        assert "wait already" in refused[0].json()["error"]["message"]


@pytest.mark.extended
def test_E3_a_greedy_key_does_not_starve_another() -> None:
    with Server(
        "--api-key", "greedy", "--api-key", "polite", "--max-queue-seconds", "1000", **fault_injection.ENVIRONMENT
    ) as server:
        done: list[str] = []

        def send(key: str) -> None:
            with httpx2.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {key}"}) as client:
                assert ask(client, SOME).status_code == 200
            done.append(key)

        with ThreadPoolExecutor(64) as threads, httpx2.Client(base_url=server.url, timeout=60) as client:
            client.headers["authorization"] = "Bearer greedy"
            holding = [threads.submit(ask, client, [f"{word} @@sleep:2"]) for word in "abcd"]
            time.sleep(0.5)
            greedy = [threads.submit(send, "greedy") for _ in range(40)]
            assert wait_for(lambda: queued_tokens(client) > 4000)
            polite = threads.submit(send, "polite")
            for future in (*holding, *greedy, polite):
                future.result()
        assert done.index("polite") < 20


@pytest.mark.extended
def test_E3_a_key_whose_queue_is_full_locks_out_no_other(expected: Float32Array) -> None:
    keys = ("--api-key", "greedy", "--api-key", "polite")
    with Server(*keys, "--max-queue-tokens", "3000", "--max-queue-seconds", "1000", **fault_injection.ENVIRONMENT) as server:

        def send(key: str, texts: list[str]) -> httpx2.Response:
            with httpx2.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {key}"}) as client:
                return ask(client, texts)

        with ThreadPoolExecutor(64) as threads:
            holding = [threads.submit(send, "greedy", [holds("3")]) for _ in range(4)]
            time.sleep(0.8)
            greedy = [threads.submit(send, "greedy", SOME) for _ in range(40)]
            assert wait_for(lambda: any(future.done() and future.result().status_code == 429 for future in greedy))
            polite = [threads.submit(send, "polite", texts) for texts in (SOME, SOME[:1])]
            answers = [future.result() for future in polite]
            assert [future.result().status_code for future in holding] == [200] * 4
        assert {future.result().status_code for future in greedy} == {200, 429}
        assert [answer.status_code for answer in answers] == [200, 200]
        assert np.array_equal(vectors_of(answers[0]), expected)


@pytest.mark.extended
def test_E4_queued_work_of_a_client_that_left_does_not_run(server: Server) -> None:
    """It would have killed the engine."""
    before = server.children("engine")
    with ThreadPoolExecutor(8) as threads, held_up(server, threads):
        with Connection(server.port) as connection:
            connection.send(post({"input": ["@@abort"] * 20}))
            time.sleep(0.3)
        time.sleep(0.5)
    assert server.children("engine") == before


def test_E5_a_client_that_leaves_while_it_is_served(server: Server, expected: Float32Array) -> None:
    with Connection(server.port) as connection:
        connection.send(post({"input": ["@@sleep:1", *SOME]}))
        time.sleep(0.3)
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        assert np.array_equal(vectors_of(ask(client, SOME)), expected)
        assert wait_for(lambda: queued_tokens(client) == 0)


@pytest.mark.parametrize("seconds", ["0", "0.5"])
@pytest.mark.sample(1)
def test_E6_what_is_late_does_not_run(seconds: str, server: Server) -> None:
    """It would have killed the engine."""
    before = server.children("engine")
    with ThreadPoolExecutor(8) as threads, held_up(server, threads):
        with httpx2.Client(base_url=server.url, timeout=60, headers={"x-request-timeout": seconds}) as client:
            started = time.monotonic()
            answer = ask(client, ["@@abort late"])
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert answer.headers["x-should-retry"] == "false"
        assert time.monotonic() - started < 1.9
    assert server.children("engine") == before


@pytest.mark.parametrize("seconds", ["", "soon", "-1", "nan", "1;2", "1_0"])
def test_E6_a_timeout_that_is_none(seconds: str, server: Server) -> None:
    with httpx2.Client(base_url=server.url, timeout=60, headers={"x-request-timeout": seconds}) as client:
        answer = ask(client, ["a"])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"


def test_E6_time_enough(server: Server, expected: Float32Array) -> None:
    with httpx2.Client(base_url=server.url, timeout=60, headers={"x-request-timeout": "50"}) as client:
        assert np.array_equal(vectors_of(ask(client, SOME)), expected)


@pytest.mark.extended
def test_E7_a_query_overtakes_bulk(expected: Float32Array) -> None:
    with (
        Server("--max-queue-seconds", "1000") as server,
        ThreadPoolExecutor(4) as threads,
        httpx2.Client(base_url=server.url, timeout=200) as client,
    ):
        bulk = [threads.submit(ask, client, SOME * 64) for _ in range(2)]
        assert wait_for(lambda: queued_tokens(client) > 20_000)
        for _ in range(5):
            assert np.array_equal(vectors_of(ask(client, SOME[:1])), expected[:1])
        assert not any(future.done() for future in bulk)
        assert [future.result().status_code for future in bulk] == [200, 200]


@pytest.mark.extended
def test_priority_decides_who_is_first(server: Server) -> None:
    done: list[int] = []

    def send(priority: int) -> None:
        with httpx2.Client(base_url=server.url, timeout=60) as client:
            assert ask(client, SOME[:8], priority=priority).status_code == 200
        done.append(priority)

    with ThreadPoolExecutor(16) as threads:
        with held_up(server, threads):
            sent = [threads.submit(send, 5) for _ in range(6)]
            time.sleep(0.3)
            sent.append(threads.submit(send, -5))
        for future in sent:
            future.result()
    assert done.index(-5) <= 1  # there are two lanes


@pytest.mark.extended
def test_E8_openai_s_client_succeeds_after_a_storm(server: Server, expected: Float32Array) -> None:
    """With its own retries, which honour Retry-After."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=5)

    def send(_: int) -> Float32Array:
        return np.array([row.embedding for row in client.embeddings.create(model=MODEL, input=SOME).data], np.float32)

    with client, ThreadPoolExecutor(48) as threads, held_up(server, threads, "1"):
        vectors = list(threads.map(send, range(20)))
    assert all(np.array_equal(each, expected) for each in vectors)
    with httpx2.Client(timeout=60, base_url=server.url) as probe:
        assert 'outcome="overloaded"' in probe.get("/metrics").text


def test_E11_an_indexing_job_waits_for_memory_and_nothing_of_it_fails(expected: Float32Array) -> None:
    """There is memory for the bodies of three of its requests. Two retries, as OpenAI's client has by default."""
    guards = {"WHIMBREL_GUARDS": '{"max_body_bytes": 100000, "max_inflight_bytes": 300000}'}
    texts = [text.ljust(5000) for text in SOME]
    with Server(**guards) as server, ThreadPoolExecutor(24) as threads:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")

        def send(_: int) -> int:
            return len(client.embeddings.create(model=MODEL, input=texts).data)

        with client:
            assert list(threads.map(send, range(72))) == [len(SOME)] * 72
        with httpx2.Client(timeout=60, base_url=server.url) as probe:
            metrics = probe.get("/metrics").text
            assert 'outcome="ok"' in metrics
            assert 'outcome="overloaded"' not in metrics


def test_E11_who_leaves_while_waiting_for_memory_gives_up_the_place(expected: Float32Array) -> None:
    guards = {"WHIMBREL_GUARDS": '{"max_body_bytes": 100000, "max_inflight_bytes": 100000}'}
    with (
        Server(**guards, **fault_injection.ENVIRONMENT) as server,
        ThreadPoolExecutor(8) as threads,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        holding = threads.submit(ask, client, ["@@sleep:2".ljust(80_000)])
        time.sleep(0.5)
        for _ in range(20):
            with Connection(server.port) as connection:
                connection.send(post({"input": ["@@abort".ljust(80_000)]}))
                time.sleep(0.02)
        assert np.array_equal(vectors_of(ask(client, [text.ljust(5000) for text in SOME])), expected)
        assert holding.result().status_code == 200


def test_E12_who_gives_up_and_comes_back_is_served_before_those_that_came_later(server: Server) -> None:
    done: list[str] = []
    returning = {"x-stainless-retry-count": "1", "x-stainless-read-timeout": "30"}

    def send(name: str, headers: dict[str, str]) -> None:
        with httpx2.Client(base_url=server.url, timeout=60, headers=headers) as client:
            assert ask(client, SOME).status_code == 200
        done.append(name)

    with ThreadPoolExecutor(16) as threads, httpx2.Client(base_url=server.url, timeout=60) as client:
        ask(client, SOME)  # so that the rate is known
        with held_up(server, threads, "4"):
            sent = [threads.submit(send, f"later {i}", {}) for i in range(8)]
            assert wait_for(lambda: queued_tokens(client) >= 8 * 219)  # the tokens of SOME
            sent.append(threads.submit(send, "returning", returning))
            assert wait_for(lambda: queued_tokens(client) >= 9 * 219)
        for future in sent:
            future.result()
    assert done.index("returning") <= 3  # there are two lanes, and a batch has room for two of these requests


@pytest.mark.extended
def test_E8_returning_requests_find_room_in_a_queue_that_others_keep_full(expected: Float32Array) -> None:
    """Clients with two retries, as OpenAI's has by default; there is room for a third of their requests."""
    with Server("--max-queue-tokens", "3000") as server, ThreadPoolExecutor(9) as threads:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")

        def send(_: int) -> bool:
            rows = client.embeddings.create(model=MODEL, input=SOME * 2).data
            return np.array_equal(np.array([row.embedding for row in rows], np.float32), np.tile(expected, (2, 1)))

        with client:
            assert all(threads.map(send, range(60)))


@pytest.mark.extended
def test_K5_health_is_told_while_all_are_busy(server: Server) -> None:
    client = httpx2.Client(base_url=server.url, timeout=60)
    with client, ThreadPoolExecutor(32) as threads:
        load = [threads.submit(ask, client, ["word " * 200] * 100) for _ in range(16)]
        times: list[float] = []
        while not all(future.done() for future in load):
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            times.append(time.monotonic() - started)
        assert sorted(times)[len(times) // 2] < 1
