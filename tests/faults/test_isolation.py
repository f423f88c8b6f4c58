"""D of the catalogue: a text that fails, kills, hangs or gives nonsense harms no other request. The fault backend obeys the texts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx2
import numpy as np
import pytest

import fault_injection
from load import ask, holds, vectors_of
from serving import Server
from texts import TEXTS
from waiting import wait_for
from whimbrel import Engine
from whimbrel.types.arrays import Float32Array

SOME = [text for text in TEXTS if 20 < len(text) < 200][:31]


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Float32Array:
    return engine.embed(SOME)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--step-timeout", "5", "--max-queue-seconds", "1000", **fault_injection.ENVIRONMENT) as server:
        yield server


@pytest.fixture(autouse=True)
def still_right(server: Server, expected: Float32Array) -> Iterator[None]:
    """Whatever a test did: the server is ready, and its vectors have the same bits."""
    at = len(server.log)
    yield
    print(server.log[at:])  # noqa: T201
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        assert wait_for(lambda: client.get("/health/ready").status_code == 200)
        assert np.array_equal(vectors_of(ask(client, SOME)), expected)
        assert "" in client.get("/metrics").text.replace(".0\n", "\n")


def together(server: Server, poison: str) -> tuple[list[httpx2.Response], httpx2.Response]:
    """31 good requests and a poisonous one, which meet in a batch: the lanes are held up while they come."""
    client = httpx2.Client(base_url=server.url, timeout=120, limits=httpx2.Limits(max_connections=64))
    with client, ThreadPoolExecutor(40) as threads:
        holding = [threads.submit(ask, client, [holds("1")], priority=-1) for _ in range(4)]
        time.sleep(0.3)
        texts = [*SOME[:16], poison, *SOME[16:]]
        futures: list[Future[httpx2.Response]] = [threads.submit(ask, client, [text]) for text in texts]
        answers = [future.result(120) for future in futures]
        assert [future.result().status_code for future in holding] == [200] * 4
    return answers[:16] + answers[17:], answers[16]


def all_right(answers: list[httpx2.Response], expected: Float32Array) -> None:
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert np.array_equal(np.concatenate([vectors_of(answer) for answer in answers]), expected)


def refused(answer: httpx2.Response, code: str, status: int = 500) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, "input[0]")
    assert answer.headers["x-should-retry"] == "false"
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("poison", ["@@raise", "@@rows", "@@width"])
@pytest.mark.sample(1)
def test_D1_D5_a_text_that_fails_alone_fails_alone(poison: str, server: Server, expected: Float32Array) -> None:
    before = server.children()
    good, bad = together(server, poison)
    all_right(good, expected)
    refused(bad, "compute_error")
    assert server.children() == before


def test_D2_a_poisonous_text_of_a_request_is_named(server: Server) -> None:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        for text, code in (("@@raise", "compute_error"), ("@@nan", "non_finite"), ("@@oom", "out_of_memory")):
            answer = ask(client, [*SOME[:5], text, *SOME[5:9]])
            assert answer.json()["error"]["param"] == "input[5]"
            assert answer.json()["error"]["code"] == code


SLOW = pytest.mark.slow


@pytest.mark.parametrize("poison", ["@@abort", pytest.param("@@segv", marks=SLOW), pytest.param("@@exit", marks=SLOW)])
@pytest.mark.extended
def test_D3_a_text_that_kills_the_engine_is_found_and_refused(poison: str, server: Server, expected: Float32Array) -> None:
    before = server.children("engine")
    good, bad = together(server, f"{poison} now")
    all_right(good, expected)
    refused(bad, "engine_crash")
    assert wait_for(lambda: server.children("engine"))
    after = server.children("engine")
    assert after != before
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        assert wait_for(lambda: client.get("/health/ready").status_code == 200)
        for _ in range(3):  # it is remembered: no engine dies of it again
            refused(ask(client, [f"{poison} now"]), "engine_crash")
    assert server.children("engine") == after


def test_D3_copies_of_a_text_that_kills_are_refused_together(server: Server, expected: Float32Array) -> None:
    def restarts(client: httpx2.Client) -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("whimbrel_engine_restarts_total"))

    with httpx2.Client(base_url=server.url, timeout=120) as client, ThreadPoolExecutor(8) as threads:
        before = restarts(client)
        answers = list(threads.map(lambda _: ask(client, ["@@abort copies"]), range(8)))
        for answer in answers:
            refused(answer, "engine_crash")
        assert wait_for(lambda: client.get("/health/ready").status_code == 200)
        assert restarts(client) - before <= 7


@pytest.mark.extended
def test_F7_a_lost_device_replaces_the_engine(server: Server, expected: Float32Array) -> None:
    """Its process starts again, the others are answered, and the text that loses it twice is refused."""
    before = server.children("engine")
    good, bad = together(server, "@@lost now")
    all_right(good, expected)
    refused(bad, "engine_crash")
    assert wait_for(lambda: server.children("engine") and server.children("engine") != before)
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        assert wait_for(lambda: client.get("/health/ready").status_code == 200)


@pytest.mark.parametrize("poison", ["@@hang", pytest.param("@@hang-gil", marks=SLOW)])
@pytest.mark.extended
def test_D4_a_text_that_hangs_the_engine_is_found_and_refused(poison: str, server: Server, expected: Float32Array) -> None:
    with httpx2.Client(base_url=server.url, timeout=120) as client:
        answers: list[httpx2.Response] = []
        asking = threading.Thread(target=lambda: answers.append(ask(client, [*SOME[:2], poison])))
        asking.start()
        asking.join(100)
        assert answers[0].status_code == 500
        error = answers[0].json()["error"]
        assert (error["code"], error["param"]) == ("engine_crash", "input[2]")
        assert wait_for(lambda: client.get("/health/ready").status_code == 200)
        assert np.array_equal(vectors_of(ask(client, SOME)), expected)


@pytest.mark.parametrize("word", ["@@nan", "@@nan-low"])
@pytest.mark.sample(1)
def test_D6_a_row_that_is_not_finite_is_an_error_for_its_request(word: str, server: Server, expected: Float32Array) -> None:
    good, bad = together(server, word)
    all_right(good, expected)
    refused(bad, "non_finite")
    assert "--dtype float32" in bad.json()["error"]["message"]


def test_D7_the_same_request_id_at_once_mixes_nothing_up(server: Server, expected: Float32Array) -> None:
    client = httpx2.Client(base_url=server.url, timeout=60, headers={"x-request-id": "same"})
    with client, ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda text: ask(client, [text]), SOME * 4))
    assert np.array_equal(np.concatenate([vectors_of(answer) for answer in answers]), np.tile(expected, (4, 1)))
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}


def test_F5_out_of_memory_halves_the_batch_and_passes(server: Server, expected: Float32Array, engine: Engine) -> None:
    good, greedy = together(server, "@@oom>8")
    all_right(good, expected)
    assert np.array_equal(vectors_of(greedy)[0], engine.embed("@@oom>8"))
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        refused(ask(client, ["@@oom"]), "out_of_memory", status=507)
