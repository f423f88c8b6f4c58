"""However the bytes of requests are cut up on their way, the answers are the same."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.server.app.routing import render_error
from whimbrel.server.http.connection import Connection
from whimbrel.server.http.limits import HttpLimits
from whimbrel.server.http.places import Places

HEAD = b"Host: here\r\n"
OFFER = HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
CHUNKS = b'3\r\nabc\r\n10;a="b;c"\r\n0123456789abcdef\r\n0\r\nHost: evil\r\nContent-Type: x\r\n\r\n'
CHUNKED = b"Transfer-Encoding: chunked\r\n"
REQUESTS: dict[bytes, bytes] = {
    b"GET /a?b=c here ": b"GET /a?b=c HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET / here ": b"\r\nGET / HTTP/1.1\r\nX-A: a,\tb\r\nX-Empty:\r\n" + HEAD + b"\r\n",
    b"HEAD /d": b"HEAD /d HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET /e far:80 ": b"GET http://far:80/e HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"POST /f here abcde": b"POST /f HTTP/1.1\r\nContent-Length: 5\r\n" + HEAD + b"\r\nabcde",
    b"POST /g here abcdef": b"POST /g HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 6\r\n" + HEAD + b"\r\nabcdef",
    b"POST /h here ": b"POST /h HTTP/1.1\r\nContent-Length: 00\r\n" + HEAD + b"\r\n",
    b"POST /i here abc0123456789abcdef": b"POST /i HTTP/1.1\r\n" + HEAD + CHUNKED + b"\r\n" + CHUNKS,
    b"GET /j here ": b"GET /j HTTP/1.1\r\n" + OFFER + b"\r\n",
    b"POST /k here abcdefgh": b"POST /k HTTP/1.1\r\nContent-Length: 8\r\n" + OFFER + b"\r\nabcdefgh",
    b"POST /l here abc0123456789abcdef": b"POST /l HTTP/1.1\r\n" + OFFER + CHUNKED + b"\r\n" + CHUNKS,
    b"POST /m here ": b"POST /m HTTP/1.1\r\nContent-Length: 00\r\n" + OFFER + b"\r\n",
    b"GET /n here ": b"GET /n HTTP/1.0\r\nConnection: keep-alive\r\n" + HEAD + b"\r\n",
}
LAST = {
    b"": b"",
    b"GET /o here ": b"GET /o HTTP/1.1\r\nConnection: close\r\n" + HEAD + b"\r\n",
    b"GET /p here ": b"GET /p HTTP/1.0\r\n" + HEAD + b"\r\n",
    b"no HTTP": b"\x16\x03\x01 garbage\r\n\r\n",
    b"no path": b"GET nowhere HTTP/1.1\r\n" + HEAD + b"\r\n",
}


class Wire(asyncio.Transport):
    """A transport that keeps the bytes that are written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.reading = asyncio.Event()
        self.reading.set()
        self.ended = False

    def write(self, data: Any) -> None:
        assert not self.ended
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ended = True

    abort = close

    def pause_reading(self) -> None:
        self.reading.clear()

    def resume_reading(self) -> None:
        self.reading.set()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Says what was asked."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    text = b"%b %b %b " % (scope["method"].encode(), target, b",".join(hosts))
    more = True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        text, more = text + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": text})


async def ask(pieces: list[bytes]) -> bytes:
    """Return the answers to bytes that come in these pieces, without the parts that may differ."""
    places = Places(HttpLimits(), 1000)
    connection, wire = Connection(echo, HttpLimits(), render_error, places), Wire()
    connection.connection_made(wire)
    for piece in pieces:
        await asyncio.wait_for(wire.reading.wait(), 5)
        connection.data_received(piece)
        for _ in range(3):
            await asyncio.sleep(0)
    for _ in range(200):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    return re.sub(rb"date: [^\r]*\r\n|HTTP/1.1 100 Continue\r\n\r\n", b"", wire.written)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in pieces that end at `places`, modulo its length."""
    ends = sorted({place % len(data) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def bodies(answers: bytes) -> list[bytes]:
    """Return the bodies of the answers."""
    return [body.split(b"HTTP/1.1", 1)[0] for body in answers.split(b"\r\n\r\n")[1:]]


@given(
    names=st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=12),
    last=st.sampled_from(sorted(LAST)),
    places=st.lists(st.integers(0, 5000), max_size=40),
)
def test_the_answers_to_requests_in_pieces(names: list[bytes], last: bytes, places: list[int]) -> None:
    data = b"".join(REQUESTS[name] for name in names) + LAST[last]
    whole = asyncio.run(ask([data]))
    assert asyncio.run(ask(cut(data, places))) == whole
    told = bodies(whole)
    assert len(told) == len(names) + (last != b"")
    for name, body in zip(names, told, strict=False):
        assert body == (b"" if name.startswith(b"HEAD") else name)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_answers_to_all_requests_byte_by_byte(size: int) -> None:
    data = b"".join(REQUESTS.values())
    whole = asyncio.run(ask([data]))
    assert len(bodies(whole)) == len(REQUESTS)
    assert asyncio.run(ask([data[start : start + size] for start in range(0, len(data), size)])) == whole
