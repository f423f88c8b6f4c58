"""A minute of right requests of every API with bytes changed: no answer is a 5xx, no process ends, and vectors stay as they are."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx2
import msgspec
import pytest

from http_cases import replies
from serving import Server
from whimbrel.dialects import GET_ROUTES, ROUTES

SECONDS = 60
THREADS = 4
GOLDEN = {"input": ["A whimbrel is a wader.", "It winters in Africa."], "encoding_format": "base64"}
ODD = [
    b"0",
    b"-1",
    b"65536",
    b"4294967296",
    b"1e999",
    b"null",
    b"true",
    b'"',
    b"{",
    b"[",
    b"[" * 50,
    b",",
    b"\\ud800",
    b"\xff",
    b"\0",
    b"\r\n",
]


def framed(path: str, body: bytes, media_type: str, *more: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {media_type}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def corpus() -> Iterator[bytes]:
    """The example of every route, in JSON, in MessagePack where that is taken, and in chunks; and the pages."""
    for route in ROUTES:
        body = route.example.encode()
        yield framed(route.path, body, "application/json")
        yield framed(route.path, body, "application/json", "Accept: application/octet-stream", "X-Request-Timeout: 20")
        if "application/msgpack" in route.media_types:
            yield framed(route.path, msgspec.msgpack.encode(msgspec.json.decode(body)), "application/msgpack")
        whole = framed(route.path, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), "application/json")
        head, _, content = whole.partition(b"\r\n\r\n")
        yield (
            b"\r\n".join(
                b"Transfer-Encoding: chunked" if line.startswith(b"Content-Length") else line for line in head.split(b"\r\n")
            )
            + b"\r\n\r\n"
            + content
        )
    for path in ("/v1/models", "/health", "/info", "/metrics", "/openapi.json", "/docs", *(page.path for page in GET_ROUTES)):
        yield f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json;q=0.5, */*\r\n\r\n".encode()


def mutated(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """The request with one to eight changes. Those of the body keep the length right half of the time."""
    head, end, body = data.partition(b"\r\n\r\n")
    if body and chance.random() < 0.7:
        changed = changes(chance, body, others)
        old, new = b"Content-Length: %d" % len(body), b"Content-Length: %d" % len(changed)
        return (head.replace(old, new) if chance.random() < 0.8 else head) + end + changed
    return changes(chance, data, others)


def changes(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4, 8])):
        start = chance.randrange(len(out) + 1)
        stop = min(len(out), start + chance.choice([0, 1, 2, 10, 100]))
        match chance.randrange(7):
            case 0:
                out[start:stop] = b""
            case 1:
                out[start:stop] = chance.randbytes(stop - start)
            case 2:
                out[start:start] = chance.choice(ODD)
            case 3:
                out[start:stop] = chance.choice(ODD)
            case 4:
                out[start:start] = out[start:stop] * chance.choice([1, 2, 100])
            case 5 if start < len(out):
                out[start] ^= 1 << chance.randrange(8)
            case _:
                other = chance.choice(others)
                cut = chance.randrange(len(other))
                out[start:stop] = other[cut : cut + chance.choice([5, 50, 500])]
    return bytes(out)


def answers(port: int, data: bytes) -> list[int]:
    """The statuses of all answers to these bytes, after which the client sends nothing more."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=90) as client:
        with suppress(OSError):  # the server ended it while more was sent
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while piece := client.recv(2**16):
                received += piece
    return [each.status for each in replies(received, [b"HEAD" if data.startswith(b"HEAD") else b"GET"])]


@pytest.mark.extended
def test_A18_a_minute_of_mutations() -> None:
    requests, end = list(corpus()), time.monotonic() + SECONDS
    seed = random.SystemRandom().randrange(2**32)
    statuses = Counter[int]()

    def work(number: int) -> None:
        chance = random.Random(seed + number)
        while time.monotonic() < end:
            data = mutated(chance, chance.choice(requests), requests)
            try:
                got = answers(server.port, data)
            except (ValueError, KeyError, TimeoutError) as error:
                raise AssertionError(f"seed {seed}: {error!r} for {data[:2000]!r}") from error
            late = 504 if b"x-request-timeout" in data.lower() else 0  # a number that was made smaller
            assert all(status < 500 or status == late for status in got), f"seed {seed}: {got} for {data[:2000]!r}"
            statuses.update(got)

    with Server() as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        before, expected = server.children(), client.post("/v1/embeddings", json=GOLDEN).json()["data"]
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(work, range(THREADS)))
        assert client.post("/v1/embeddings", json=GOLDEN).json()["data"] == expected
        assert server.children() == before
        assert client.get("/health/ready").status_code == 200
    assert "Traceback" not in server.log
    assert {200, 400} <= set(statuses), statuses
    assert statuses.total() > 1000
