"""Faults of HTTP itself: heads, framing, times, sizes, and clients that come and go. After each the server answers as before."""

from __future__ import annotations

import base64
import os
import re
import select
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from fake_embedder import FakeServer
from fuzz import Grammar
from process_resources import open_files, open_sockets, peak_memory
from raw_http import PATH, Answer, Connection, ask, chunked, head, post
from serving import Server
from texts import TEXTS
from waiting import wait_for
from whimbrel import Engine

GOLDEN = "A whimbrel is a wader."
LIMITS = {"header_timeout": 3, "body_idle_timeout": 4, "write_pause": 3, "lingering_timeout": 20, "min_write_rate": 50_000}
MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(WHIMBREL_GUARDS=orjson.dumps(LIMITS).decode()) as server:
        yield server


@pytest.fixture(autouse=True)
def still_answers(server: Server, engine: Engine) -> Iterator[None]:
    """Whatever a test did: the server is ready, says nothing of a bug, and a text has the same bits as in-process."""
    yield
    assert_well(server, engine)


def assert_well(server: Server, engine: Engine) -> None:
    assert ask(server.port, head("GET", "/health/ready")).status == 200
    assert np.array_equal(vector(ask(server.port, post(golden()))), engine.embed(GOLDEN))
    assert "Traceback" not in server.log


def golden(**fields: object) -> dict[str, object]:
    return {"input": GOLDEN, "encoding_format": "base64"} | fields


def vector(answer: Answer) -> Any:
    assert answer.status == 200, answer
    return np.frombuffer(base64.b64decode(answer.json()["data"][0]["embedding"]), np.float32)


def large_answer() -> bytes:
    """A request whose answer has about 16 MB."""
    return post({"input": ["a"] * 2048, "encoding_format": "float"})


def send_slowly(connection: Connection, data: bytes, size: int, pause: float) -> None:
    for start in range(0, len(data), size):
        connection.send(data[start : start + size])
        time.sleep(pause)


def read_slowly(connection: Connection, size: int, pause: float) -> None:
    """Until a minute is over, or the connection."""
    for _ in range(int(60 / pause)):
        assert connection.socket.recv(size), "the connection ended as if all had been sent"
        time.sleep(pause)


# Time


def test_A1_a_partial_head_is_cut(server: Server) -> None:
    partial = [b"", b"POST /v1/emb", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-", b"\r\n" * 10]

    def seconds(sent: bytes) -> float:
        started = time.monotonic()
        with Connection(server.port) as connection:
            assert connection.send(sent).is_closed(), sent
        return time.monotonic() - started

    with ThreadPoolExecutor(len(partial)) as threads:
        assert min(threads.map(seconds, partial)) >= LIMITS["header_timeout"] * 0.9


@pytest.mark.extended
def test_A1_a_head_that_drips_is_cut(server: Server) -> None:
    with Connection(server.port) as connection, pytest.raises(ConnectionError):
        send_slowly(connection, b"GET /health HTTP/1.1\r\nX-A: " + b"x" * 1000, 1, 0.1)


@pytest.mark.extended
def test_A1_an_idle_connection_is_closed(server: Server) -> None:
    with Connection(server.port) as connection:
        assert connection.send(head("GET", "/health")).answer().status == 200
        assert connection.is_closed()


def test_A1_500_partial_heads_hold_nobody_up(server: Server) -> None:
    def seconds() -> float:
        started = time.monotonic()
        assert ask(server.port, post(golden())).status == 200
        return time.monotonic() - started

    alone = statistics.median(seconds() for _ in range(9))
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(Connection(server.port)).send(b"POST /v1/embeddings HTTP/1.1\r\nHost: loc")
        beside = statistics.median(seconds() for _ in range(9))
    assert beside < max(2 * alone, 1.0)


def test_A2_a_body_that_stops_is_given_up(server: Server) -> None:
    with Connection(server.port) as connection:
        answer = connection.send(head(content_length=100) + b'{"i').answer()
        assert (answer.status, answer.error["code"]) == (408, "body_timeout")
        assert "3 bytes" in answer.error["message"]
        assert connection.is_closed()


@pytest.mark.extended
def test_A2_a_body_that_drips_is_given_up(server: Server) -> None:
    """One byte at a time never stands still for long, but comes to less than the least rate."""
    body = orjson.dumps(golden())
    with Connection(server.port) as connection:
        connection.send(head(content_length=len(body)))
        for start in range(len(body)):
            connection.send(body[start : start + 1])
            if select.select([connection.socket], [], [], 0.5)[0]:
                break
        assert connection.answer().status == 408


@pytest.mark.extended
def test_A2_a_slow_but_honest_body_is_read(server: Server, engine: Engine) -> None:
    """It takes longer than any pause may."""
    body = orjson.dumps(golden(user="x" * 20_000))
    with Connection(server.port) as connection:
        connection.send(head(content_length=len(body)))
        send_slowly(connection, body, 500, 0.15)
        assert np.array_equal(vector(connection.answer()), engine.embed(GOLDEN))


# Size


def test_A3_an_announced_length_over_the_limit(server: Server) -> None:
    """Answered though not a byte of the body was sent."""
    with Connection(server.port) as connection:
        answer = connection.send(head(content_length=32 * MIB + 1)).answer()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert "33,554,432" in answer.error["message"]
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("path", [PATH, "/nope"])
def test_A3_the_answer_reaches_a_client_that_sends_all_of_its_body_first(path: str, server: Server) -> None:
    request = head(path=path, content_length=50_000_000), b" " * 50_000_000
    with Connection(server.port) as connection:
        for part in request:
            connection.send(part)
        assert connection.answer().status == (413 if path == PATH else 404)


def test_A4_a_chunked_body_over_the_limit(server: Server) -> None:
    def run() -> None:
        answer = ask(server.port, head(transfer_encoding="chunked"), chunked(b" " * 50 * MIB, MIB))
        assert answer.status == 413
        assert "33,554,432" in answer.error["message"]

    run()
    assert peak_memory(worker(server), run) < 2 * 32 * MIB


def test_A5_100000_chunks_of_one_byte(server: Server, engine: Engine) -> None:
    body = chunked(orjson.dumps(golden(user="x" * 100_000)), 1)

    def run() -> None:
        assert np.array_equal(vector(ask(server.port, head(transfer_encoding="chunked"), body)), engine.embed(GOLDEN))

    run()
    assert peak_memory(worker(server), run) < 8 * MIB


def test_A6_a_header_of_1_mib(server: Server) -> None:
    assert ask(server.port, head("GET", "/health", x_a="a" * MIB)).status == 431


@pytest.mark.parametrize("count", [100, 20_000])
def test_A6_too_many_headers(count: int, server: Server) -> None:
    assert ask(server.port, head("GET", "/health", **{f"x_{i}": i for i in range(count)})).status == 431


def test_A6_headers_over_our_own_limit(server: Server) -> None:
    answer = ask(server.port, head("GET", "/health", x_a="a" * 50_000, x_b="b" * 30_000))
    assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
    assert "65,536" in answer.error["message"]


def test_A6_99_headers_are_fine(server: Server) -> None:
    assert ask(server.port, head("GET", "/health", **{f"x_{i}": i for i in range(98)})).status == 200


@pytest.mark.parametrize("size", [70_000, MIB])
def test_A7_a_long_url(size: int, server: Server) -> None:
    assert ask(server.port, head("GET", "/" + "a" * size)).status in (414, 431)


def test_A7_what_a_client_sent_is_quoted_briefly(server: Server) -> None:
    answer = ask(server.port, head("GET", "/" + "a" * 60_000))
    assert answer.status == 404
    assert len(answer.body) < 400
    answer = ask(server.port, head("A" * 10_000, "/health"))
    assert answer.status == 400
    assert len(answer.body) < 400


# Framing

BODY = b'{"input":"a"}'
AMBIGUOUS = {
    "a length beside chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "lines that end in LF": b"X-A: a\nContent-Length: 13\n\n" + BODY,
    "two lengths": b"Content-Length: 13\r\nContent-Length: 12\r\n\r\n" + BODY,
    "a list of lengths": b"Content-Length: 13, 13\r\n\r\n" + BODY,
    "a length with a sign": b"Content-Length: +13\r\n\r\n" + BODY,
    "a negative length": b"Content-Length: -1\r\n\r\n" + BODY,
    "a length of 23 digits": b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "a space after the name": b"Content-Length : 13\r\n\r\n" + BODY,
    "a folded header": b"X-A: a\r\n b\r\nContent-Length: 13\r\n\r\n" + BODY,
    "a bare CR": b"X-A: a\rX-B: b\r\nContent-Length: 13\r\n\r\n" + BODY,
    "NUL in a value": b"X-A: a\0b\r\nContent-Length: 13\r\n\r\n" + BODY,
    "NUL in a name": b"X\0A: ab\r\nContent-Length: 13\r\n\r\n" + BODY,
    "a line without a colon": b"garbage\r\nContent-Length: 13\r\n\r\n" + BODY,
    "identity": b"Transfer-Encoding: identity\r\n\r\n" + BODY,
    "an unknown coding": b"Transfer-Encoding: xchunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunked, but not last": b"Transfer-Encoding: chunked, identity\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "compressed chunks": b"Transfer-Encoding: gzip, chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a negative chunk": b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
    "a chunk of 72 bits": b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    "a chunk that is no number": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a chunk longer than it says": b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk's line that ends in LF": b"Transfer-Encoding: chunked\r\n\r\nd\n" + BODY + b"\r\n0\r\n\r\n",
    "1 MiB of chunk extension": b"Transfer-Encoding: chunked\r\n\r\nd;" + b"x" * MIB + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "1 MiB of trailers": b"Transfer-Encoding: chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n" + b"X: y\r\n" * 200_000 + b"\r\n",
}


@pytest.mark.parametrize("how", AMBIGUOUS)
def test_A8_ambiguous_framing_is_refused_and_the_connection_closed(how: str, server: Server) -> None:
    with Connection(server.port) as connection:
        with suppress(ConnectionError):
            connection.send(
                b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + AMBIGUOUS[how]
            )
        assert connection.answer().status == 400
        assert connection.is_closed()


@pytest.mark.parametrize(
    "host",
    ["a/?x=", "a b", "user@localhost", "localhost:x", "localhost:123456", "[::1", "[zz]", "", "localhost,evil.com", "\xe9"],
)
def test_A9_a_malformed_host(host: str, server: Server) -> None:
    with Connection(server.port) as connection:
        answer = connection.send(head("GET", "/health", host=host)).answer()
        assert (answer.status, answer.error["code"]) == (400, "malformed_http")
        assert connection.is_closed()


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], ["localhost", "evil.com"]])
def test_A9_no_host_or_two(hosts: list[str], server: Server) -> None:
    lines = "".join(f"Host: {host}\r\n" for host in hosts)
    assert ask(server.port, f"GET /health HTTP/1.1\r\n{lines}\r\n".encode()).status == 400


def test_A9_http_1_0_needs_no_host(server: Server) -> None:
    assert ask(server.port, b"GET /health HTTP/1.0\r\n\r\n").status == 200


@pytest.mark.parametrize("target", ["http://evil.com/health", "http://user:password@localhost/health"])
def test_A9_an_absolute_target_is_no_way_around(target: str, server: Server) -> None:
    assert ask(server.port, f"GET {target} HTTP/1.1\r\n\r\n".encode()).status in (400, 403)


# Routes and methods


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", PATH, 405), ("DELETE", "/info", 405), ("GET", "/health/x", 404), ("PATCH", "/docs", 405),
     ("GET", "/../health", 404), ("GET", "/%2e%2e/etc/passwd", 404), ("GET", "/a%zz%ff%00", 404)],
)  # fmt: skip
def test_A10_wrong_routes(method: str, path: str, status: int, server: Server) -> None:
    answer = ask(server.port, head(method, path))
    assert answer.status == status
    assert sorted(answer.error) == ["code", "message", "param", "type"]
    assert ("allow" in answer.headers) == (status == 405)


def test_A11_head_and_options(server: Server) -> None:
    with Connection(server.port) as connection:
        answer = connection.send(head("HEAD", "/health")).answer(to_head=True)
        assert (answer.status, answer.headers["content-length"]) == (200, "15")
        answer = connection.send(head("OPTIONS", PATH)).answer()
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert connection.send(head("HEAD", "/nope")).answer(to_head=True).status == 404
        assert connection.send(head("GET", "/health")).answer().status == 200


@pytest.mark.parametrize(
    "sent",
    [
        bytes.fromhex("1603010200010001fc0303") + bytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/2.0\r\n\r\n",
        b"GET /health HTTP/3.0\r\n\r\n",
        b"FOO /health HTTP/1.1\r\n\r\n",
        b"GET health HTTP/1.1\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\n",
    ],
)
def test_A12_tls_and_other_protocols(sent: bytes, server: Server) -> None:
    with Connection(server.port) as connection:
        assert connection.send(sent).answer().status == 400
        assert connection.is_closed()


def test_A13_expect_100_continue(server: Server, engine: Engine) -> None:
    body = orjson.dumps(golden())
    with Connection(server.port) as connection:
        assert connection.send(head(content_length=len(body), expect="100-continue")).answer().status == 100
        assert np.array_equal(vector(connection.send(body).answer()), engine.embed(GOLDEN))


@pytest.mark.parametrize(("changed", "status"), [({"content_length": 50_000_000}, 413), ({"content_type": "text/plain"}, 415)])
def test_A13_a_body_that_is_not_wanted_is_not_asked_for(changed: dict[str, Any], status: int, server: Server) -> None:
    """The connection is closed at once, since the bytes that come next on it would be taken for the body."""
    headers = {"content_length": 100, "expect": "100-continue"} | changed
    with Connection(server.port, timeout=LIMITS["lingering_timeout"] / 2) as connection:
        assert connection.send(head(**headers)).answer().status == status
        assert connection.is_closed()


def test_A13_an_offer_of_http_2_is_not_taken_and_the_body_is_read(server: Server, engine: Engine) -> None:
    """Java's client makes one with each first request."""
    offer = {
        "connection": "Upgrade, HTTP2-Settings",
        "upgrade": "h2c",
        "http2_settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    }
    body = orjson.dumps(golden())
    whole = head(content_length=len(body), **offer) + body
    in_chunks = head(transfer_encoding="chunked", **offer) + chunked(body, 7)
    for request in (whole, in_chunks):
        for size in (len(request), 1, 100):
            with Connection(server.port) as connection:
                send_slowly(connection, request, size, 0)
                assert np.array_equal(vector(connection.answer()), engine.embed(GOLDEN))
                connection.send(head("GET", "/health", **offer) + post(golden()))
                assert connection.answer().status == 200
                assert np.array_equal(vector(connection.answer()), engine.embed(GOLDEN))


def test_A13_trailers_are_no_headers(server: Server, engine: Engine) -> None:
    body = chunked(orjson.dumps(golden()), 50).removesuffix(b"\r\n") + b"Host: evil.com\r\nExpect: 100-continue\r\n\r\n"
    with Connection(server.port) as connection:
        connection.send(head(transfer_encoding="chunked") + body + head("GET", "/health"))
        assert np.array_equal(vector(connection.answer()), engine.embed(GOLDEN))
        assert connection.answer().status == 200


def test_A14_http_1_0_may_be_kept_alive_and_knows_no_chunks(server: Server) -> None:
    large = orjson.dumps({"input": ["a"] * 300, "encoding_format": "float"})
    asked = b"POST /v1/embeddings HTTP/1.0\r\nConnection: keep-alive\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with Connection(server.port) as connection:
        connection.send(b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "keep-alive")
        connection.send(asked % len(large) + large)
        received = b""
        while piece := connection.socket.recv(65536):
            received += piece
    start, _, rest = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in start
    assert b"connection: close" in start
    assert len(orjson.loads(rest)["data"]) == 300


def test_A14_what_breaks_http_after_good_requests_is_answered_after_them(server: Server, engine: Engine) -> None:
    with Connection(server.port) as connection:
        connection.send(post(golden()) + head("GET", "/health") + b"garbage\r\n\r\n" + head("GET", "/health"))
        assert np.array_equal(vector(connection.answer()), engine.embed(GOLDEN))
        assert [connection.answer().status for _ in range(2)] == [200, 400]
        assert connection.is_closed()


def test_A14_pipelined_requests_are_answered_in_order(server: Server, engine: Engine) -> None:
    texts = TEXTS[20:36]
    with Connection(server.port) as connection:
        connection.send(b"".join(post(golden(input=text)) + head("GET", "/nope") for text in texts))
        for text in texts:
            assert np.array_equal(vector(connection.answer()), engine.embed(text))
            assert connection.answer().status == 404


# Clients that leave, and slow ones


@pytest.mark.parametrize("sent", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("reset", [False, True])
def test_A16_a_client_that_leaves(sent: float, reset: bool, server: Server) -> None:
    """After none, half or all of its body; by FIN or by RST."""
    body = orjson.dumps({"input": TEXTS[:200]})
    before = left(server)
    with Connection(server.port) as connection:
        if reset:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.send(head(content_length=len(body)) + body[: int(sent * len(body))])
        time.sleep(0.1)
    if sent == 1:
        assert wait_for(lambda: left(server) == before + 1)


def worker(server: Server) -> int:
    """The process that holds the connections."""
    (pid,) = server.children("worker")
    return pid


def left(server: Server) -> float:
    """Requests whose client left, so far."""
    lines = ask(server.port, head("GET", "/metrics")).body.decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("whimbrel_requests_total") and 'status="499"' in line
    )


@pytest.mark.parametrize("reset", [False, True])
def test_A16_a_client_that_leaves_during_the_answer(reset: bool, server: Server) -> None:
    files = open_sockets(worker(server))
    with Connection(server.port, receive_buffer=65536) as connection:
        if reset:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.send(large_answer())
        assert connection.socket.recv(100).startswith(b"HTTP/1.1 200")
    assert wait_for(lambda: open_sockets(worker(server)) <= files)


def test_A16_a_client_that_only_stops_sending_gets_its_answer(server: Server, engine: Engine) -> None:
    with Connection(server.port) as connection:
        connection.send(head(content_length=5) + b"{")
        connection.socket.shutdown(socket.SHUT_WR)
        assert connection.answer().status == 400
        assert connection.is_closed()


def test_A17_ranges_are_ignored(server: Server) -> None:
    """No route has any."""
    ranges = ",".join(f"{i}-{i + 1}" for i in range(5000))
    started = time.monotonic()
    answer = ask(server.port, head("GET", "/docs", range=f"bytes={ranges}"))
    assert answer.status == 200
    assert len(answer.body) == int(answer.headers["content-length"])
    assert time.monotonic() - started < 10


@pytest.mark.extended
def test_E9_a_reader_that_is_slow_but_steady_gets_all(server: Server, engine: Engine) -> None:
    request = post({"input": [TEXTS[20]] * 512, "encoding_format": "float"})
    with Connection(server.port, receive_buffer=65536) as connection:
        connection.send(request)
        received = b""
        while len(received) < 2 * MIB:
            received += connection.socket.recv(65536)
            time.sleep(0.1)
        connection._read = received  # pyright: ignore[reportPrivateUsage]
        answer = connection.answer()
    rows = np.array([row["embedding"] for row in answer.json()["data"]], np.float32)
    assert np.array_equal(rows, np.tile(engine.embed([TEXTS[20]]), (512, 1)))


@pytest.mark.extended
def test_E9_what_waits_to_be_read_is_not_written_over(engine: Engine) -> None:
    """Answers go out from the memory that the engine wrote them to, which is used again, or are made of it as they are read."""

    def request(text: str, form: str = "bytes_only") -> bytes:
        return post({"input": [text] * 2048, "encoding_format": form})

    def expected(text: str) -> bytes:
        return engine.embed([text]).tobytes() * 2048

    def sent(answer: Answer) -> bytes:
        return b"".join(base64.b64decode(row["embedding"]) for row in answer.json()["data"])

    with Server() as patient, ExitStack() as stack:
        late = [stack.enter_context(Connection(patient.port, receive_buffer=4096)) for _ in range(2)]
        for connection, form in zip(late, ("bytes_only", "base64"), strict=True):
            connection.send(request("a", form))
            assert connection.socket.recv(1, socket.MSG_PEEK)  # the answer is on its way
        for text in ("b", "c", "d"):
            assert ask(patient.port, request(text)).body == expected(text)
        assert late[0].answer().body == expected("a")
        assert sent(late[1].answer()) == expected("a")


@pytest.mark.extended
def test_E9_a_reader_that_is_as_good_as_still_is_cut(server: Server) -> None:
    """It takes 1 kB/s of 16 MB. (This is the kernel's doing.)"""
    files = open_sockets(worker(server))
    with Connection(server.port, receive_buffer=4096) as connection:
        connection.send(large_answer())
        with pytest.raises(ConnectionError):
            read_slowly(connection, 100, 0.1)
    assert wait_for(lambda: open_sockets(worker(server)) <= files)


def test_E9_a_reader_below_the_least_rate_is_cut() -> None:
    """It takes 200 kB/s and never stands still, where at least 5 MB/s are asked for. (This is our own doing.)"""
    with FakeServer(write_pause=4, min_write_rate=5_000_000) as server:
        assert ask(server.port, head("GET", "/health")).status == 200
        time.sleep(0.2)
        files = open_sockets(server.process.pid)
        with Connection(server.port, receive_buffer=2**18) as connection:
            connection.send(post({"input": ["a"] * 2048, "dimensions": 2048}))
            with pytest.raises(ConnectionError):
                read_slowly(connection, 20_000, 0.1)
        assert wait_for(lambda: open_sockets(server.process.pid) <= files)


@pytest.mark.extended
def test_E9_a_small_answer_that_nobody_reads_is_forgotten(server: Server) -> None:
    files = open_sockets(worker(server))
    with Connection(server.port, receive_buffer=2048) as connection:
        connection.send(post({"input": ["a"] * 100, "encoding_format": "float"}) * 20)
        assert wait_for(lambda: open_sockets(worker(server)) > files)
        assert wait_for(lambda: open_sockets(worker(server)) <= files)


def test_E10_where_files_run_out_accepting_pauses_and_recovers() -> None:
    """With 64 files, 100 connections: as many as there is room for are held, the rest wait their turn, and nothing spins."""
    with FakeServer(max_files=64, header_timeout=2) as server:
        pid = server.process.pid
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(Connection(server.port)).send(b"GET /hea")
            assert wait_for(lambda: open_files(pid) > 30)
            time.sleep(0.5)
            before, files = processor_seconds(pid), open_files(pid)
            assert files < 64
            time.sleep(1)
            assert processor_seconds(pid) - before < 0.5
            assert ask(server.port, head("GET", "/health")).status == 200  # once those before it are given up
        assert wait_for(lambda: open_files(pid) < 20)
        assert ask(server.port, head("GET", "/health")).status == 200


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.extended
def test_A18_4000_requests_by_a_grammar(engine: Engine) -> None:
    """None hangs, none is answered with a 5xx; and all kinds of answers occur, or the grammar is no good."""
    statuses = answers_to_a_grammar(80, engine)
    assert {200, 400, 403, 404, 405, 408, 413, 415, 431} <= set(statuses), statuses
    assert statuses[200] > 400


def test_A18_200_requests_by_a_grammar(engine: Engine) -> None:
    assert {200, 400, 404, 405, 408} <= set(answers_to_a_grammar(4, engine))


def answers_to_a_grammar(each: int, engine: Engine) -> Counter[int]:
    """The statuses of all answers to `each` requests of 50 clients; none is a 5xx."""
    statuses: Counter[int] = Counter()

    def work(seed: int) -> None:
        grammar = Grammar(seed)
        for _ in range(each):
            statuses.update(fuzz(server.port, grammar.request()))

    with Server(WHIMBREL_GUARDS='{"header_timeout": 1, "body_idle_timeout": 1, "lingering_timeout": 1}') as server:
        with ThreadPoolExecutor(50) as pool:
            list(pool.map(work, range(50)))
        assert not [status for status in statuses if status >= 500], statuses
        assert_well(server, engine)
    return statuses


LAST = head("GET", "/health/live", x_request_id="the-last", connection="close")


def fuzz(port: int, request: bytes) -> list[int]:
    """The statuses of all answers to these bytes, until the server ends the connection; TimeoutError if it does not."""
    received = b""
    with Connection(port) as connection:
        try:
            connection.send(request + LAST)
            while piece := connection.socket.recv(65536):
                received += piece
        except TimeoutError:
            raise
        except OSError:  # the server was the first to end it
            pass
    statuses = re.findall(rb"HTTP/1\.[01] ([0-9]{3}) ", received)
    return [int(status) for status in statuses[: -1 if b"the-last" in received else None]]
