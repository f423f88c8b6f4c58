"""Connections by a grammar: each right request has its own answer, in order, and nothing is answered after a wrong one."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import struct
import time
from contextlib import suppress
from hashlib import sha256
from typing import Any

import pytest
import uvloop

from http_cases import Talk, Target, digest, replies, right, talk, wrong
from whimbrel.errors import WhimbrelError
from whimbrel.server.app.routing import render_error
from whimbrel.server.http.limits import HttpLimits
from whimbrel.server.http.listener import Server

BY_GUARDS = {name for name in wrong(Target(b"")) if "Host" in name} | {"a coding before chunked"}
"""Faults that the app's guards find, not the connection."""


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An app that tells what it was asked."""
    hashed, more = sha256(), True
    status = 200
    try:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            hashed.update(message["body"])
            more = message.get("more_body", False)
    except WhimbrelError as error:
        status = error.status
    sign = dict(scope["headers"]).get(b"x-canary", b"")
    headers = [
        (b"content-length", b"2"),
        (b"x-canary", sign),
        (b"x-digest", hashed.hexdigest().encode()),
        (b"x-method", scope["method"].encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


async def converse(address: Any, spoken: Talk) -> bytes:
    """Send the pieces, then the end; everything that comes back within a minute."""
    loop, received = asyncio.get_running_loop(), b""

    async def send() -> None:
        with suppress(OSError):  # the server ended it while more came
            for piece in spoken.pieces:
                await loop.sock_sendall(client, piece)
            client.shutdown(socket.SHUT_WR)

    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(client, address)
        if spoken.leaves:
            with suppress(OSError):
                await loop.sock_sendall(client, b"".join(spoken.pieces))
            if len(spoken.pieces) % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
            return b""
        sending = asyncio.ensure_future(send())
        with suppress(ConnectionError):
            async with asyncio.timeout(60):
                while piece := await loop.sock_recv(client, 2**16):
                    received += piece
        await sending
    return received


def check(spoken: Talk, received: bytes) -> None:
    """Raise AssertionError unless these are the answers."""
    got = replies(received, [made.method for _, made in spoken.answered])
    assert b"smuggled" not in received
    assert len(got) == len(spoken.answered) + (spoken.refused is not None), [each.status for each in got]
    for (sign, made), answer in zip(spoken.answered, got, strict=False):
        assert answer.status == 200
        assert answer.headers["x-canary"] == sign.decode()
        assert answer.headers["x-method"] == made.method.decode()
        assert answer.headers["x-digest"] == digest(made.body)
    if spoken.refused is not None:
        assert 400 <= got[-1].status < 500
        assert got[-1].headers["connection"] == "close"
        assert spoken.refused


def fuzzed(seed: int, seconds: float, loop: Any) -> int:
    """Talk for so long; the number of connections."""
    chance, count = random.Random(seed), 0

    async def main() -> None:
        nonlocal count
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = Server(echo, listener.fileno(), HttpLimits(), render_error)
            serving = asyncio.ensure_future(server.serve())
            address, end = listener.getsockname(), time.monotonic() + seconds
            while time.monotonic() < end:
                talks = [talk(chance, count + number, BY_GUARDS) for number in range(20)]
                answers = await asyncio.gather(*(converse(address, spoken) for spoken in talks))
                for spoken, received in zip(talks, answers, strict=True):
                    if spoken.leaves:
                        continue
                    try:
                        check(spoken, received)
                    except (AssertionError, ValueError, KeyError) as error:
                        sent = b"".join(spoken.pieces)
                        raise AssertionError(
                            f"seed {seed}: {spoken.names}: {error!r}\nsent {sent[:3000]!r}\ngot {received[:2000]!r}"
                        ) from error
                count += len(talks)
            for _ in range(100):
                if not server.places.taken:
                    break
                await asyncio.sleep(0.1)
            assert not server.places.taken
            server.stop()
            await serving

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    return count


LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@LOOPS
def test_A14_connections_by_chance(loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert fuzzed(1, 3, loop) > 50
    assert not caplog.records


@LOOPS
@pytest.mark.slow
def test_A14_many_connections_by_chance(loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert fuzzed(random.SystemRandom().randrange(2**32), 120, loop) > 1000
    assert not caplog.records


@LOOPS
def test_A8_each_request_alone(loop: Any) -> None:
    """Every right and wrong one, in one piece and byte by byte, before another request."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = Server(echo, listener.fileno(), HttpLimits(), render_error)
            serving = asyncio.ensure_future(server.serve())
            address, target = listener.getsockname(), Target(b"1")
            after = right(Target(b"2"))["get"]
            talks = list[Talk]()
            for name, made in right(target).items():
                answered = [(b"1", made)] + [(b"2", after)] * (not made.closes)
                talks.append(Talk([made.data + after.data], answered, None, [name]))
            for name, data in wrong(target).items():
                if name not in BY_GUARDS:
                    talks.append(Talk([data + after.data], [], name, [name]))
            failed = list[str]()
            for spoken in talks:
                for pieces in (spoken.pieces, [bytes([byte]) for byte in spoken.pieces[0]]):
                    received = await converse(address, Talk(pieces, spoken.answered, spoken.refused))
                    try:
                        check(spoken, received)
                    except (AssertionError, ValueError, KeyError) as error:
                        failed.append(f"{spoken.names}: {error!r} {received[:150]!r}")
            assert not failed, "\n".join(failed)
            server.stop()
            await serving

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
