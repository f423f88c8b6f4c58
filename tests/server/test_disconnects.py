"""Clients that leave at any moment, over the whole app and a real socket: each request ends once, and holds nothing then."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from fake_embedder import FakeEmbedder
from raw_http import post
from whimbrel.errors import Overloaded
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.routing import ModelRegistry, render_error
from whimbrel.server.http.listener import Server
from whimbrel.telemetry import trace
from whimbrel.telemetry.trace import RequestFinished
from whimbrel.types.request import Request
from whimbrel.types.result import Result
from whimbrel.types.scheduling import Scheduling

LOOPS = {"asyncio": None, "uvloop": uvloop.new_event_loop}
FORMS = ("base64", "float", "npy")
"""Forms of an answer: made at once, printed in pieces, and sent from the array's memory."""


class Embedder(FakeEmbedder):
    """Does what it is told before it answers."""

    async def before(self) -> None: ...

    async def run(self, request: Request, scheduling: Scheduling) -> Result:
        await self.before()
        return await super().run(request, scheduling)


class World:
    """A server in this loop, and what became of its requests."""

    def __init__(self, listener: socket.socket, options: ServerLimits) -> None:
        self.address = listener.getsockname()
        self.embedder: Any = Embedder()
        self.served = ModelRegistry(self.embedder)
        self.app: Any = create_app(self.served, guards=options)
        self.server: Any = Server(self.app, listener.fileno(), options, render_error)
        self.finished: list[RequestFinished] = []

    @property
    def held(self) -> int:
        """Bytes that are counted as held."""
        return self.app._app.memory.used

    async def connect(self, receive_buffer: int = 2**16) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, self.address)
        return client

    async def ask(self, body: object, receive_buffer: int = 2**16, times: int = 1) -> socket.socket:
        client = await self.connect(receive_buffer)
        await asyncio.get_running_loop().sock_sendall(client, post(body) * times)
        return client

    async def until(self, met: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not met():
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[World]:
    """In the end nothing is left of any request."""
    wrong: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        world = World(listener, replace(ServerLimits(), **limits))
        end = trace.subscribe(RequestFinished, world.finished.append)
        task = asyncio.ensure_future(world.server.serve())
        try:
            yield world
        finally:
            world.server.stop()
            await asyncio.wait_for(task, 10)
            await asyncio.wait_for(world.served.idle.wait(), 10)
            end()
    assert not wrong
    assert world.held == 0


def run(loop: str, main: Any) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(asyncio.wait_for(main, 60))


async def read(client: socket.socket, size: int = 2**30) -> bytes:
    """Read this number of bytes, or all until the end."""
    received = bytearray()
    while len(received) < size and (piece := await asyncio.get_running_loop().sock_recv(client, min(size, 2**16))):
        received += piece
    return bytes(received)


def large(form: str, width: int = 512) -> dict[str, object]:
    return {"input": ["a"] * 1000, "dimensions": width, "encoding_format": form}


def cut(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


async def act(chance: random.Random) -> None:
    """Do one of the things that an engine may do."""
    await asyncio.sleep(chance.choice([0, 0, 0.001, 0.01, 0.05]))
    match chance.randrange(10):
        case 0:
            raise RuntimeError("on purpose")
        case 1:
            raise Overloaded("on purpose.", retry_after=1)
        case 2:
            with suppress(asyncio.CancelledError):  # it is told, and answers all the same
                await asyncio.sleep(0.05)
        case 3:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                raise ValueError("on purpose") from None


async def come_and_go(world: World, chance: random.Random) -> None:
    """Do one of the things that a client may do."""
    body = chance.choice([b"{", {"input": "a"}, {"input": "a" * 300_000}, *map(large, FORMS)])
    request = post(body, expect=chance.choice([None, "100-continue"]), connection=chance.choice([None, "close"]))
    request = (request.replace(b"1.1", b"1.0", 1) if chance.random() < 0.2 else request) * chance.choice([1, 1, 2, 3])
    client = await world.connect(chance.choice([4096, 2**18]))
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(chance.choice([0.01, 0.1, 0.3])):
            size = len(request) if chance.random() < 0.7 else chance.randrange(len(request))
            await asyncio.get_running_loop().sock_sendall(client, request[:size])
            await asyncio.sleep(chance.choice([0, 0, 0.001, 0.01]))
            await read(client, chance.choice([0, 1, 2**16, 2**20]))
        if chance.random() < 0.3:
            client.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.01)
    (cut if chance.random() < 0.5 else socket.socket.close)(client)


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_whose_clients_leave_at_any_moment_end_once(loop: str) -> None:
    chance = random.Random(0)

    async def main() -> None:
        received: list[Any] = []
        end = trace.subscribe(trace.RequestStarted, received.append)
        async with serving() as world:
            world.embedder.before = lambda: act(chance)
            for _ in range(6):
                await asyncio.gather(*[come_and_go(world, chance) for _ in range(20)])
            await world.until(lambda: not world.server.places.taken)
        end()
        assert len(world.finished) == len(received)
        assert {each.outcome for each in world.finished} == {"ok", "invalid", "overloaded", "error", "client_gone"}

    run(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("ends", ["result", "error", "bug"])
@pytest.mark.parametrize("turns", range(4))
def test_a_client_that_leaves_as_its_result_comes(loop: str, ends: str, turns: int) -> None:
    """Before it, with it or after it: there is one outcome, and no task is left cancelled."""

    async def main() -> None:
        coming = asyncio.get_running_loop().create_future()
        async with serving() as world:
            world.embedder.before = lambda: coming
            client = await world.ask({"input": "a"})
            await world.until(lambda: not world.served.idle.is_set())
            await asyncio.sleep(0.005)
            (connection,) = world.server.places.taken
            connection.reset()
            for _ in range(turns):
                await asyncio.sleep(0)
            if not coming.done():
                {
                    "result": lambda: coming.set_result(None),
                    "error": lambda: coming.set_exception(Overloaded("on purpose.", retry_after=1)),
                    "bug": lambda: coming.set_exception(ValueError("on purpose")),
                }[ends]()
            await world.until(lambda: world.finished)
            client.close()
        assert len(world.finished) == 1
        # the answer may have been made before the loss was heard of
        assert world.finished[0].outcome in ("client_gone", {"result": "ok", "error": "overloaded", "bug": "error"}[ends])

    run(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_answers_that_are_being_read_are_finished_before_the_end(loop: str) -> None:
    """The server says that it is idle only then, and what waits behind them is refused."""

    async def main() -> None:
        async with serving() as world:
            clients = [await world.ask(large(form, 2048), 4096, times=2) for form in FORMS]
            await asyncio.sleep(0.1)
            world.served.draining = True
            idle = asyncio.ensure_future(world.served.idle.wait())
            idle.add_done_callback(lambda _: world.server.stop())
            await asyncio.sleep(0.1)
            assert not idle.done()
            assert world.held > 2**20
            for client in clients:
                answers = await read(client)
                assert len(answers) > 2**22
                assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"503"]
                assert answers.endswith(b"}")
                client.close()
        assert {each.outcome for each in world.finished} == {"ok", "unavailable"}

    run(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_a_reader_that_is_cut_is_left(loop: str, form: str) -> None:
    async def main() -> None:
        async with serving(write_pause=0.2) as world:
            client = await world.ask(large(form, 2048), 4096)
            await world.until(lambda: world.finished)
            await world.until(lambda: not world.server.places.taken)
            assert (world.finished[0].outcome, world.finished[0].status) == ("client_gone", 200)
            assert (world.held, world.served.idle.is_set()) == (0, True)
            client.close()

    run(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_body_that_stops_while_the_server_drains_ends_the_connection_once(loop: str) -> None:
    async def main() -> None:
        async with serving(body_idle_timeout=0.2) as world:
            client = await world.connect()
            await asyncio.get_running_loop().sock_sendall(client, post({"input": "a"})[:-1])
            await world.until(lambda: not world.served.idle.is_set())
            world.served.draining = True
            answer = await read(client)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert answer.count(b"connection: close\r\n") == 1
            client.close()

    run(loop, main())
