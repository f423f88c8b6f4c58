"""HTTP server on a listening socket that other processes may share."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from functools import partial
from typing import Final

from starlette.types import ASGIApp

from whimbrel.server.http.connection import Connection, RenderError
from whimbrel.server.http.limits import HttpLimits

_PAUSE: Final = 0.1
"""Seconds from a failed attempt to accept to the next."""
_OPEN_FILES: Final = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_SPARE_FILES: Final = 24
"""Files that a process may open besides connections."""


class Server:
    """`serve()` until `stop()`, in one event loop."""

    def __init__(self, app: ASGIApp, listener: int, limits: HttpLimits, render_error: RenderError) -> None:
        """`listener` is the socket's descriptor, which stays open."""
        self._listener = listener
        self._connections: set[Connection] = set()
        self._protocol = partial(Connection, app, limits, render_error, self._connections, self._on_lost)
        self._room = asyncio.Semaphore(connection_limit(limits.max_connections))
        self._stop = asyncio.Event()
        self._closed = asyncio.Event()

    def stop(self) -> None:
        """Accept no more connections; `serve` returns once the running requests are answered."""
        self._stop.set()

    async def serve(self) -> None:
        """Accept connections up to the limit; further ones wait."""
        with socket.socket(fileno=os.dup(self._listener)) as listener:
            listener.setblocking(False)
            accepting = asyncio.ensure_future(self._accept(listener))
            accepting.add_done_callback(lambda _: self._stop.set())  # it failed
            await self._stop.wait()
            accepting.cancel()
            await asyncio.wait({accepting})
        if not accepting.cancelled():
            accepting.result()
        for connection in list(self._connections):
            connection.shut_down()
        while self._connections:
            self._closed.clear()
            await self._closed.wait()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # too many open files, or a client that has left already
                self._room.release()
                await asyncio.sleep(_PAUSE)
                continue
            await self._connect(sock)

    async def _connect(self, sock: socket.socket) -> None:
        """Make the connection, even if cancelled: uvloop never reports the loss of a transport whose creation was cancelled."""
        connecting = asyncio.ensure_future(asyncio.get_running_loop().connect_accepted_socket(self._protocol, sock))
        try:
            await asyncio.shield(connecting)
        except OSError:
            sock.close()
            self._room.release()
        except asyncio.CancelledError:
            await asyncio.wait({connecting})
            raise

    def _on_lost(self) -> None:
        self._room.release()
        self._closed.set()


def connection_limit(limit: int) -> int:
    """Return the number of connections for this process: `limit`, or fewer so that it never runs out of files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limit
    return max(1, min(limit, soft // 2, soft - len(os.listdir(_OPEN_FILES)) - _SPARE_FILES))
