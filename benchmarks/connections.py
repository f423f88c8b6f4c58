"""Cost of HTTP connections, ours beside uvicorn's (httptools, uvloop), of the same ASGI app with a short answer.

    python benchmarks/connections.py [--rounds 5] [--connections 2000]

1. processor time of the server for a new connection with one request, and for a request on a connection that is open;
2. beside 256 connections that are always busy: the time from connecting to the answer, on new connections one after another.

Rounds take turns between the servers. Figures are medians over the rounds, and ratios of these.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection as Pipe
from typing import Any

import uvloop

ANSWER = b'{"status":"ok"}'
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
BUSY = 256


async def app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


async def serve_whimbrel(listener: socket.socket) -> None:
    from whimbrel.server.app.routing import render_error
    from whimbrel.server.http.limits import HttpLimits
    from whimbrel.server.http.listener import Server

    await Server(app, listener.fileno(), HttpLimits(), render_error).serve()


async def serve_uvicorn(listener: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(
        app, log_level="error", access_log=False, http="httptools", loop="uvloop", lifespan="off", backlog=1024
    )
    await uvicorn.Server(config).serve([listener])


SERVERS: dict[str, Callable[[socket.socket], Any]] = {"whimbrel": serve_whimbrel, "uvicorn": serve_uvicorn}


def run_server(name: str, listener: socket.socket, pipe: Pipe) -> None:
    """Serve; tell the processor time so far for each message."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def tell() -> None:
            pipe.recv()
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(usage.ru_utime + usage.ru_stime)

        loop.add_reader(pipe.fileno(), tell)
        await SERVERS[name](listener)

    uvloop.run(main())


class Running:
    """A server in a process of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = self.listener.getsockname()
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=run_server, args=(name, self.listener, theirs), daemon=True)
        self.process.start()

    def processor_seconds(self) -> float:
        self.pipe.send(None)
        return self.pipe.recv()


async def new_connections(server: Running, count: int) -> None:
    """Connect, ask and leave, sixteen at a time."""

    async def client(number: int) -> None:
        for _ in range(number):
            await ask_once(server)

    await asyncio.gather(*[client(count // 16) for _ in range(16)])


async def ask_once(server: Running) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, server.address)
        await loop.sock_sendall(sock, LAST)
        while await loop.sock_recv(sock, 4096):
            pass


async def kept_connections(server: Running, count: int) -> None:
    """Ask on sixteen connections that stay open."""

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection(*server.address)
        for _ in range(number):
            writer.write(REQUEST)
            await reader.readuntil(ANSWER)
        writer.close()

    await asyncio.gather(*[client(count // 16) for _ in range(16)])


async def beside_busy(server: Running, count: int) -> float:
    """Return the median time of a new connection with its answer while others are busy, in seconds."""
    done = False

    async def busy() -> None:
        reader, writer = await asyncio.open_connection(*server.address)
        while not done:
            writer.write(REQUEST)
            await reader.readuntil(ANSWER)
        writer.close()

    tasks = [asyncio.ensure_future(busy()) for _ in range(BUSY)]
    await asyncio.sleep(0.5)
    times: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        await asyncio.to_thread(ask_blocking, server)
        times.append(time.perf_counter() - started)
    done = True
    await asyncio.gather(*tasks)
    return statistics.median(times)


def ask_blocking(server: Running) -> None:
    with socket.create_connection(server.address) as sock:
        sock.sendall(LAST)
        while sock.recv(4096):
            pass


def measured(server: Running, kind: str, count: int) -> float:
    """Return microseconds of the server's processor for each of `count`, or milliseconds beside busy connections."""
    if kind == "beside busy":
        return uvloop.run(beside_busy(server, 50)) * 1e3
    before = server.processor_seconds()
    uvloop.run((new_connections if kind == "new" else kept_connections)(server, count))
    return (server.processor_seconds() - before) / (count // 16 * 16) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=2000)
    arguments = parser.parse_args()
    servers = [Running(name) for name in SERVERS]
    kinds = {"new": "µs/connection", "kept": "µs/request", "beside busy": "ms to the answer"}
    try:
        for kind, unit in kinds.items():
            for server in servers:  # warm
                measured(server, kind, 320)
            rounds = [[measured(server, kind, arguments.connections) for server in servers] for _ in range(arguments.rounds)]
            ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
            print(f"{kind:<12} whimbrel {ours:8.1f}  uvicorn {theirs:8.1f} {unit}  ratio {ours / theirs:.2f}", flush=True)
    finally:
        for server in servers:
            with suppress(OSError):
                server.process.kill()


if __name__ == "__main__":
    main()
