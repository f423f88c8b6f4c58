"""The HTTP server by itself, under small apps, on both event loops. What breaks HTTP is in faults/test_http.py."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import uvloop

from whimbrel.server.app.routing import render_error
from whimbrel.server.http.connection import Connection
from whimbrel.server.http.exchange import ClientDisconnected, RequestResponseCycle
from whimbrel.server.http.limits import HttpLimits
from whimbrel.server.http.listener import Server

MIB = 2**20
GET = b"GET /a%20b?c=d HTTP/1.1\r\nHost: here\r\nX-A: 1\r\n\r\n"
OFFER = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
App = Callable[[Any, Any, Any], Awaitable[None]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Any:
    """asyncio.run on one of the loops, for a minute at most."""

    def run(main: Awaitable[None]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if request.param == "uvloop" else None) as runner:
            runner.run(asyncio.wait_for(main, 60))  # pyright: ignore[reportArgumentType]

    return run


@asynccontextmanager
async def serving(app: App, **limits: Any) -> AsyncIterator[tuple[Server, Callable[[], Awaitable[Streams]]]]:
    """A server, and how to connect to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(app, listener.fileno(), replace(HttpLimits(), **limits), render_error)
        task = asyncio.ensure_future(server.serve())
        writers: list[asyncio.StreamWriter] = []

        async def connect() -> Streams:
            streams = await asyncio.open_connection(*listener.getsockname())
            writers.append(streams[1])
            return streams

        yield server, connect
        for writer in writers:
            writer.close()
        server.stop()
        await task


def post(size: int, *more: bytes) -> bytes:
    return b"\r\n".join([b"POST / HTTP/1.1", b"Host: here", b"Content-Length: %d" % size, *more, b"", b""])


async def head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def answering(*bodies: bytes | memoryview, status: int = 200, headers: dict[bytes, bytes] | None = None) -> App:
    """It reads the request and sends this."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body", False):
            pass
        await send({"type": "http.response.start", "status": status, "headers": list((headers or {}).items())})
        for i, body in enumerate(bodies):
            await send({"type": "http.response.body", "body": body, "more_body": i + 1 < len(bodies)})

    return app


def noting(scopes: list[Any]) -> Any:
    """An app that answers with nothing and keeps what it was asked."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await answering(b"")(scope, receive, send)

    return app


def test_the_scope_says_what_was_asked(run: Any) -> None:
    scopes: list[Any] = []
    app = noting(scopes)

    async def main() -> None:
        async with serving(app) as (_, connect):
            reader, writer = await connect()
            writer.write(GET)
            assert (await head(reader)).startswith(b"HTTP/1.1 200 OK\r\n")
            assert scopes[0]["client"] == writer.get_extra_info("sockname")
            assert scopes[0]["server"] == writer.get_extra_info("peername")

    run(main())
    (scope,) = scopes
    assert (scope["method"], scope["path"], scope["raw_path"], scope["query_string"]) == ("GET", "/a b", b"/a%20b", b"c=d")
    assert scope["headers"] == [(b"host", b"here"), (b"x-a", b"1")]
    assert (scope["type"], scope["http_version"], scope["scheme"], scope["root_path"]) == ("http", "1.1", "http", "")


def test_a_body_waits_in_the_socket_until_the_app_reads_it(run: Any) -> None:
    pieces: list[int] = []
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        while True:
            message = await receive()
            pieces.append(len(message["body"]))
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def main() -> None:
        go.clear()
        async with serving(app) as (_, connect):
            reader, writer = await connect()
            writer.write(post(32 * MIB))
            writer.write(bytes(32 * MIB))
            await asyncio.sleep(0.2)
            go.set()
            assert b"content-length: 4\r\n" in await head(reader)
            assert await reader.readexactly(4) == b"done"

    run(main())
    assert sum(pieces) == 32 * MIB
    assert max(pieces) <= MIB


@pytest.mark.parametrize("named", [True, False])
def test_an_array_goes_out_as_it_lies(named: bool) -> None:
    """The loop is uvloop's; that of asyncio joins pieces before Python 3.12."""
    array = np.arange(16 * MIB, dtype=np.float32)
    headers = {b"content-length": b"%d" % array.nbytes} if named else {}

    async def main() -> None:
        bodies = [array.view(np.uint8).data] if named else [array.view(np.uint8).data, b""]
        async with serving(answering(*bodies, headers=headers)) as (_, connect):
            reader, writer = await connect()
            received = 0
            tracemalloc.start()
            for _ in range(2):
                writer.write(GET)
                start = await head(reader)
                assert (b"transfer-encoding: chunked" in start) != named
                left = array.nbytes if named else array.nbytes + len(b"%x\r\n\r\n0\r\n\r\n" % array.nbytes)
                while left:
                    left -= (got := len(await reader.read(min(left, 2**16))))
                    received += got
            assert tracemalloc.get_traced_memory()[1] < 4 * MIB
            tracemalloc.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_answers_without_a_body(run: Any) -> None:
    async def main() -> None:
        async with serving(answering(b"abc")) as (_, connect):
            reader, writer = await connect()
            writer.write(GET.replace(b"GET", b"HEAD") + GET)
            assert b"content-length: 3" not in await head(reader)  # what an app does not say of a HEAD is not made up
            assert b"content-length: 3" in await head(reader)
            assert await reader.readexactly(3) == b"abc"
        async with serving(answering(b"", status=204)) as (_, connect):
            reader, writer = await connect()
            writer.write(GET * 2)
            for _ in range(2):
                start = await head(reader)
                assert start.startswith(b"HTTP/1.1 204 No Content\r\n")
                assert b"content-length" not in start
                assert b"transfer-encoding" not in start

    run(main())


async def raising(scope: Any, receive: Any, send: Any) -> None:
    raise ValueError("on purpose")


async def stopping(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
    await send({"type": "http.response.body", "body": b"abc", "more_body": True})


SILENT = (stopping, answering())
"""Apps that raise nothing."""


@pytest.mark.parametrize(
    "app",
    [
        *SILENT,
        raising,
        answering(b"abc", headers={b"content-length": b"2"}),
        answering(b"abc", headers={b"content-length": b"4"}),
        answering(b"abc", headers={b"x-a": b"1\r\nx-b: 2"}),
        answering(b"abc", headers={b"x-a": b"1\n"}),
    ],
)
def test_an_app_at_fault_ends_the_connection(app: App, run: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(app) as (_, connect):
            reader, writer = await connect()
            writer.write(GET)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(len(await head(reader)) + 9)
            reader, writer = await connect()
            writer.write(GET)

    run(main())
    assert ("This is a bug" in caplog.text) == (app not in SILENT)


@pytest.mark.parametrize("reset", [True, False])
def test_an_app_learns_that_its_client_left(reset: bool, run: Any) -> None:
    heard: list[Any] = []
    done = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        heard.append((await receive())["type"])
        await asyncio.sleep(0.05)
        with pytest.raises(ClientDisconnected):
            await answering(b"abc")(scope, receive, send)
        heard.append("sent to nobody")
        done.set()

    async def main() -> None:
        done.clear()
        async with serving(app) as (_, connect):
            _, writer = await connect()
            if reset:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.write(GET)
            await asyncio.sleep(0.05)
            writer.close()
            await done.wait()

    run(main())
    assert heard == ["http.disconnect", "sent to nobody"]


def test_a_client_that_breaks_off_its_body_is_answered(run: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            assert message["more_body"]
        await answering(b"cut")(scope, receive, send)

    async def main() -> None:
        async with serving(app) as (_, connect):
            reader, writer = await connect()
            writer.write(post(10) + b"half")
            writer.write_eof()
            assert b"connection: close" in await head(reader)
            assert await reader.read() == b"cut"

    run(main())


async def answering_at_once(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"now"})


@pytest.mark.parametrize("leave", ["half", "wholly", "by reset"])
def test_a_client_that_leaves_where_nobody_wants_its_body(leave: str, run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its connection is given up at once."""

    async def main() -> None:
        async with serving(answering_at_once, max_connections=1, lingering_timeout=60) as (_, connect):
            reader, writer = await connect()
            writer.write(post(10) + b"half")
            if leave == "half":
                await head(reader)
                writer.write_eof()
            else:
                if leave == "by reset":
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            reader, writer = await connect()
            writer.write(GET)
            await asyncio.wait_for(reader.readuntil(b"now"), 5)

    run(main())
    assert "bug" not in caplog.text


def test_a_body_that_was_read_in_one_go_leaves_the_connection_usable(run: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            await go.wait()
        await answering(b"abc")(scope, receive, send)

    go = asyncio.Event()

    async def main() -> None:
        async with serving(app) as (_, connect):
            reader, writer = await connect()
            writer.write(post(400_000) + bytes(399_999))
            await asyncio.sleep(0.1)
            writer.write(b"x")  # more than may wait has come, or all of it
            await asyncio.sleep(0.1)
            go.set()
            await reader.readuntil(b"abc")
            writer.write(GET)
            await asyncio.wait_for(reader.readuntil(b"abc"), 5)

    run(main())


@pytest.mark.parametrize("request_", [GET, OFFER], ids=["get", "offer"])
def test_only_so_many_requests_may_wait_on_a_connection(request_: bytes, run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes are few where the objects made of them are many."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await answering(b"abc")(scope, receive, send)

    go = asyncio.Event()

    async def main() -> None:
        async with serving(app) as (_, connect):
            reader, writer = await connect()
            writer.write(request_ * 3000)
            await asyncio.sleep(0.2)
            assert sum(type(thing) is RequestResponseCycle for thing in gc.get_objects()) <= 257
            go.set()
            answers = await reader.read()
            assert answers.count(b" 200 OK") <= 257
            assert answers.count(b" 429 ") == 1

    with caplog.at_level(logging.INFO):
        run(main())
    assert not caplog.records


def test_1_0_knows_neither_chunks_nor_100_continue(run: Any) -> None:
    async def main() -> None:
        async with serving(answering(b"abc")) as (_, connect):
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n")
            await asyncio.sleep(0.1)
            writer.write(b"x")
            assert (await head(reader)).startswith(b"HTTP/1.1 200 OK\r\n")
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert b"connection: close\r\n" in answer

    run(main())


def test_nobody_is_asked_for_a_body_once_the_answer_has_begun(run: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive(), 0.1)
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        async with serving(app) as (_, connect):
            reader, writer = await connect()
            writer.write(post(1, b"Expect: 100-continue"))
            assert (await reader.read()).endswith(b"3\r\nabc\r\n0\r\n\r\n")

    run(main())


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        (b"http://there:1/a?b=/", b"there:1", "/a"),
        (b"http://there", b"there", "/"),
        (b"http://there?a/b", b"there", "/"),
        (b"http://[::1]:8/", b"[::1]:8", "/"),
        (b"http://here@there/", b"here@there", "/"),
        (b"//there/a", b"here", "//there/a"),
    ],
)
def test_the_host_of_a_whole_url_is_the_host(target: bytes, host: bytes, path: str, run: Any) -> None:
    scopes: list[Any] = []
    app = noting(scopes)

    async def main() -> None:
        async with serving(app) as (_, connect):
            reader, writer = await connect()
            writer.write(b"GET %b HTTP/1.1\r\nHost: here\r\n\r\n" % target)
            await head(reader)

    run(main())
    assert (dict(scopes[0]["headers"])[b"host"], scopes[0]["path"]) == (host, path)


def test_a_bug_in_reading_is_no_fault_of_the_client(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Connection) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(Connection, "_scope", broken)
    heard: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
        async with serving(answering(b"")) as (_, connect):
            reader, writer = await connect()
            writer.write(GET)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await head(reader)

    run(main())
    assert isinstance(heard[0]["exception"].__context__, ValueError)


def test_a_connection_leaves_no_garbage() -> None:
    """So that memory does not depend on when the collector runs. (Tasks of asyncio's own loop leave some.)"""

    async def main() -> None:
        async with serving(answering(b"abc")) as (_, connect):
            for last in (b"", b"garbage\r\n\r\n", GET[:9], post(10), b"GET nowhere HTTP/1.1\r\n\r\n"):
                reader, writer = await connect()
                writer.write(GET + OFFER + post(3) + b"123")
                for _ in range(3):
                    await reader.readuntil(b"abc")
                writer.write(last)
                writer.write_eof()
                await reader.read()
                writer.close()
                await writer.wait_closed()
            await asyncio.sleep(0.05)
            assert not [thing for thing in gc.get_objects() if type(thing) in (Connection, RequestResponseCycle)]

    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("size", "pause", "end"), [(0, 0.1, "cut"), (2**16, 0.1, "cut"), (2**22, 0.01, "all")], ids=["still", "slow", "steady"]
)
def test_the_pace_at_which_an_answer_is_taken(size: int, pause: float, end: str, run: Any) -> None:
    ends: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for _ in range(24):
                await send({"type": "http.response.body", "body": bytes(MIB), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            ends.append("all")
        except OSError:
            ends.append("cut")
            raise

    async def main() -> None:
        async with serving(app, write_pause=0.5, min_write_rate=4 * MIB) as (_, connect):
            reader, writer = await connect()
            writer.write(GET)
            while not ends:
                if size:
                    await reader.read(size)
                await asyncio.sleep(pause)

    run(main())
    assert ends == [end]


def test_stopping_lets_requests_finish(run: Any) -> None:
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await answering(b"last")(scope, receive, send)

    async def main() -> None:
        go.clear()
        async with serving(app) as (server, connect):
            busy, idle, partial = [await connect() for _ in range(3)]
            busy[1].write(GET)
            partial[1].write(GET[:10])
            await asyncio.sleep(0.1)
            server.stop()
            assert await idle[0].read() == b""
            assert await partial[0].read() == b""
            go.set()
            assert b"connection: close" in await head(busy[0])
            assert await busy[0].read() == b"last"

    run(main())


@pytest.mark.parametrize("sent", [b"", GET])
def test_stopping_while_a_client_comes(sent: bytes, run: Any) -> None:
    """Whatever has become of its connection in that moment."""

    async def main() -> None:
        for turns in range(12):
            async with serving(answering(b"abc"), header_timeout=60) as (server, connect):
                await asyncio.sleep(0.01)
                _, writer = await connect()
                writer.write(sent)
                for _ in range(turns):
                    await asyncio.sleep(0)
                server.stop()

    run(main())


def test_stopping_lets_the_last_answer_be_read(run: Any) -> None:
    """A client that is still busy sending reads its answer."""

    async def main() -> None:
        async with serving(answering_at_once) as (server, connect):
            reader, writer = await connect()
            writer.write(post(10 * MIB) + bytes(MIB))
            await asyncio.sleep(0.1)
            server.stop()
            writer.write(bytes(9 * MIB))
            await writer.drain()
            assert (await reader.read()).endswith(b"\r\n\r\nnow")

    run(main())


def test_connections_over_the_limit_wait_for_those_that_work(run: Any) -> None:
    """A connection over the limit takes the place of one that ends with its answer."""
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await answering(b"abc")(scope, receive, send)

    async def main() -> None:
        go.clear()
        async with serving(app, max_connections=2) as (server, connect):
            streams = [await connect() for _ in range(3)]
            for _, writer in streams:
                writer.write(GET)
            await asyncio.sleep(0.3)
            assert len(server.places.taken) == 2
            go.set()
            for reader, _ in streams[:2]:
                assert b"connection: close\r\n" in await reader.readuntil(b"abc")
            assert b"connection: close" not in await streams[2][0].readuntil(b"abc")

    run(main())


@pytest.mark.parametrize("offer", [b"CONNECT here:80 HTTP/1.1", b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket"])
@pytest.mark.parametrize(
    "framing",
    [b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked, x", b"Content-Length: 5\r\nTransfer-Encoding: chunked"],
)
def test_an_offer_with_bad_framing_is_refused_after_those_before_it(
    offer: bytes, framing: bytes, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The good request before it on the connection keeps its answer, and nothing is logged as a bug."""

    async def main() -> None:
        async with serving(answering_at_once) as (_, connect):
            reader, writer = await connect()
            writer.write(GET + offer + b"\r\nHost: here\r\n" + framing + b"\r\n\r\n")
            assert b"200" in await head(reader)
            assert await reader.readexactly(3) == b"now"
            rest = await reader.read()
            assert rest == b"" or rest.startswith((b"HTTP/1.1 400", b"HTTP/1.1 200"))

    with caplog.at_level(logging.WARNING):
        run(main())
    assert caplog.records == []


def test_headers_are_counted_as_they_come(run: Any) -> None:
    """A head of tiny headers that never ends costs no more memory than the limit on their number."""

    async def main() -> None:
        async with serving(answering(b"fine")) as (server, connect):
            reader, writer = await connect()
            tracemalloc.start()
            writer.write(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 16_000)
            assert b"431" in await head(reader)
            (connection,) = server.places.taken
            assert len(connection._headers) == HttpLimits().max_headers
            tracemalloc.stop()

    run(main())


@pytest.mark.parametrize(
    "header",
    [b"Host: here \t", b"Host:\there\t ", b"Transfer-Encoding: chunked ", b"Expect: 100-continue \t", b"X-A: a \t b  "],
)
def test_white_space_around_a_value_is_no_part_of_it(header: bytes, run: Any) -> None:
    """RFC 9110, 5.5. With it, a Host, a coding and an expectation would not be known as such."""
    scopes: list[Any] = []
    app = noting(scopes)
    framing = b"" if header.startswith(b"Transfer-Encoding") else b"\r\nTransfer-Encoding: chunked"

    async def main() -> None:
        async with serving(app) as (_, connect):
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.1\r\n" + header + framing + b"\r\n\r\n")
            if header.startswith(b"Expect"):
                assert b"100 Continue" in await head(reader)
            writer.write(b"1\r\nx\r\n0\r\n\r\n")
            assert b"200 OK" in await head(reader)

    run(main())
    name, _, value = header.partition(b":")
    assert scopes[0]["headers"][0] == (name.lower(), value.strip(b" \t"))


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize(
    "wish",
    [
        b"close",
        b"close, keep-alive",
        b"keep-alive,\tClose ",
        b"keep-alive\r\nConnection: close",
        b"close\r\nConnection: keep-alive",
    ],
)
def test_close_ends_a_connection_whatever_stands_beside_it(wish: bytes, version: bytes, run: Any) -> None:
    """RFC 9112, 9.3: `close` goes before the version and before `keep-alive`."""

    async def main() -> None:
        async with serving(answering(b"fine")) as (_, connect):
            reader, writer = await connect()
            writer.write(GET.replace(b"1.1", version).replace(b"X-A: 1", b"Connection: " + wish) + GET)
            assert b"connection: close\r\n" in await head(reader)
            assert await reader.read() == b"fine"

    run(main())
