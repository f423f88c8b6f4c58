"""A of the catalogue, floods: what a client controls the number of is bounded when it happens, and others are still answered."""

from __future__ import annotations

import http.client
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import orjson
import pytest

from process_resources import peak_memory
from raw_http import Answer, Connection, ask, chunked, head, post
from serving import Server
from waiting import wait_for

MIB = 2**20
LIVE = "/health/live"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--workers", "1") as server:
        yield server
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """A server of 64 places, of which 4 are kept for probes."""
    limits = {"max_connections": 64, "header_timeout": 60, "body_idle_timeout": 60}
    with Server("--workers", "1", WHIMBREL_GUARDS=orjson.dumps(limits).decode()) as server:
        yield server
        assert "Traceback" not in server.log


@contextmanager
def probing(server: Server) -> Iterator[list[float]]:
    """Ask whether the server lives, on and on; the seconds that each answer took."""
    seconds: list[float] = []
    done = threading.Event()

    def probe() -> None:
        while not done.is_set():
            started = time.monotonic()
            assert ask(server.port, head("GET", LIVE, connection="close")).status == 200
            seconds.append(time.monotonic() - started)
            time.sleep(0.02)

    with ThreadPoolExecutor(1) as thread:
        probes = thread.submit(probe)
        try:
            yield seconds
        finally:
            done.set()
        probes.result()
    assert seconds


def test_A19_600_pages_at_once(server: Server) -> None:
    """They are made once for all, and no request waits for them."""
    with ExitStack() as stack, probing(server) as seconds:
        clients = [stack.enter_context(Connection(server.port)) for _ in range(600)]
        for number, client in enumerate(clients):
            client.send(head("GET", ("/openapi.json", "/docs", "/metrics")[number % 3], connection="close"))
        answers = [client.answer() for client in clients]
    assert {answer.status for answer in answers} == {200}
    assert max(seconds) < 20


def test_A20_heads_of_tiny_headers_that_never_end(server: Server) -> None:
    """They are counted as they come, so that they take no memory."""

    def run() -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(Connection(server.port)) for _ in range(200)]
            for client in clients:
                with suppress(ConnectionError):
                    client.send(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 32_000)
            assert {client.answer().status for client in clients} == {431}

    run()
    (pid,) = server.children("worker")
    assert peak_memory(pid, run) < 32 * MIB


def test_A21_chunks_of_one_byte_cost_others_nothing(server: Server) -> None:
    """After 131,072 of them they are refused; until then the connections take turns."""
    body = chunked(b" " * MIB, 1)
    answers: list[Answer] = []

    def flood(client: Connection) -> None:
        with suppress(ConnectionError):
            client.send(head(transfer_encoding="chunked") + body)
        answers.append(client.answer())

    with ExitStack() as stack, probing(server) as seconds, ThreadPoolExecutor(8) as threads:
        clients = [stack.enter_context(Connection(server.port)) for _ in range(8)]
        list(threads.map(flood, clients))
    assert {answer.status for answer in answers} == {400}
    assert all("send chunks of 64 bytes or more" in answer.error["message"] for answer in answers)
    assert max(seconds) < 20


def test_A22_more_clients_than_places_are_all_answered(narrow: Server) -> None:
    """Each keeps its connection open between requests, as far as the server does."""

    def client(number: int) -> list[int]:
        statuses: list[int] = []
        connection = http.client.HTTPConnection("127.0.0.1", narrow.port, timeout=60)
        for _ in range(4):
            connection.request("POST", "/v1/embeddings", b'{"input": "a"}', {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                answer.read()
                statuses.append(answer.status)
            time.sleep(0.05 * (number % 4))
        connection.close()
        return statuses

    with ThreadPoolExecutor(150) as threads:
        answered = list(threads.map(client, range(150)))
    assert answered == [[200] * 4] * 150


def test_A23_idle_connections_make_way_for_those_that_ask(narrow: Server) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(Connection(narrow.port)) for _ in range(200)]
        assert ask(narrow.port, head("GET", LIVE)).status == 200
        assert ask(narrow.port, post({"input": "a"})).status == 200
        page = ask(narrow.port, head("GET", "/metrics")).body.decode()
        assert sum(client.is_closed() for client in idle[:50]) == 50  # the oldest of them
    counts = {line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if line.startswith("whimbrel_")}
    assert counts["whimbrel_idle_connections_closed_total"] >= 50
    assert counts["whimbrel_connection_limit_total"] >= 1
    assert "all 60 places for connections are taken" in narrow.log


def test_A24_probes_are_answered_though_all_places_are_busy(narrow: Server) -> None:
    """Other requests are told to come later."""
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(Connection(narrow.port)).send(head(content_length=10) + b"{")
        for path in (LIVE, "/health", "/health/ready", "/ping"):
            assert ask(narrow.port, head("GET", path)).status == 200
        refused = ask(narrow.port, post({"input": "a"}))
        assert (refused.status, refused.headers["retry-after"], refused.headers["connection"]) == (503, "1", "close")
    assert wait_for(lambda: ask(narrow.port, post({"input": "a"})).status == 200)


def test_A25_ten_times_as_many_connections_as_descriptors() -> None:
    """Those that find no place wait or are dropped by the kernel. The server runs out of nothing."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))

    with Server("--workers", "1", preexec_fn=few) as server, ExitStack() as stack:
        for _ in range(3000):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(("127.0.0.1", server.port))
        time.sleep(2)
        stack.close()
        assert ask(server.port, post({"input": "a"})).status == 200
        assert ask(server.port, head("GET", LIVE)).status == 200
    assert "Traceback" not in server.log
    assert "it is started again" not in server.log
