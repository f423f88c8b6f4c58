"""A conformance suite for HTTP/1.1 servers, in the manner of h1spec, against a real server: right requests are answered,
wrong ones are refused with 4xx and the connection ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import orjson
import pytest

from http_cases import Reply, Target, replies, right, wrong
from serving import Server

TARGETS = {
    sign: Target(sign, b"/health/live", b"/v1/embeddings", orjson.dumps({"input": "a whimbrel"}), b"application/json")
    for sign in (b"1", b"2")
}
AFTER = right(TARGETS[b"2"])["get"].data
WHOLE = pytest.mark.parametrize("step", [2**20, 1], ids=["whole", "in bytes"])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--workers", "1") as server:
        yield server
        assert "Traceback" not in server.log
        assert len(server.children("worker")) == 1
        assert "started again" not in server.log


def spoken(server: Server, data: bytes, step: int, method: bytes = b"GET") -> list[Reply]:
    """All answers to these bytes, sent in pieces of `step`."""
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # the server ended it while more was sent
            for start in range(0, len(data), step):
                client.sendall(data[start : start + step])
            client.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while piece := client.recv(2**16):
                received += piece
    return replies(received, [method])


@WHOLE
@pytest.mark.parametrize("name", right(TARGETS[b"1"]))
def test_A8_what_is_right_is_answered(name: str, step: int, server: Server) -> None:
    made = right(TARGETS[b"1"])[name]
    got = spoken(server, made.data + AFTER, step, made.method)
    assert [each.status for each in got] == [200] * (1 if made.closes else 2)
    assert b"embedding" in got[0].body if made.body else got[0].body == b'{"status":"ok"}'


@WHOLE
@pytest.mark.parametrize("name", wrong(TARGETS[b"1"]))
def test_A8_what_is_wrong_is_refused(name: str, step: int, server: Server) -> None:
    got = spoken(server, wrong(TARGETS[b"1"])[name] + AFTER, step)
    assert len(got) == 1
    assert 400 <= got[0].status < 500
    assert got[0].headers["connection"] == "close"
    assert orjson.loads(got[0].body)


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        (b"HEAD", b"/health/live", 200), (b"OPTIONS", b"*", 404), (b"OPTIONS", b"/v1/embeddings", 405), (b"PUT", b"/v1/embeddings", 405),
        (b"TRACE", b"/health", 405), (b"DELETE", b"/v1/models", 405), (b"GET", b"/v1/embeddings", 405), (b"POST", b"/health", 405),
        (b"GET", b"/%2e%2e/etc/passwd", 404), (b"GET", b"/" + b"a" * 100_000, 431), (b"CONNECT", b"localhost:80", 400),
    ],
)  # fmt: skip
def test_A10_methods_and_targets(method: bytes, target: bytes, status: int, server: Server) -> None:
    data = b"%b %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (method, target)
    got = spoken(server, data, 2**20, method)
    assert [each.status for each in got] == [status]


def test_A13_a_body_is_asked_for(server: Server) -> None:
    """100-continue; without the body there is an error."""
    target = TARGETS[b"1"]
    made = right(target)["a length"].data.replace(b"\r\nHost", b"\r\nExpect: 100-continue\r\nHost", 1)
    head, _, body = made.partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(head + b"\r\n\r\n")
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(2**16).startswith(b"HTTP/1.1 200 OK\r\n")
