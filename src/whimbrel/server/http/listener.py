"""Accepts connections on a socket that listens already, and that other processes may accept from too."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from typing import Final

from starlette.types import ASGIApp

from whimbrel.server.http.connection import Connection, RenderError
from whimbrel.server.http.limits import HttpLimits

_PAUSE: Final = 0.1
"""Seconds until the next attempt to accept after a failure."""
_OPEN_FILES: Final = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_SPARE_FILES: Final = 24
"""Files that a process may open besides connections."""


def connection_limit(limit: int) -> int:
    """Return the number of connections for this process: `limit`, or fewer so that it never runs out of files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limit
    return max(1, min(limit, soft // 2, soft - len(os.listdir(_OPEN_FILES)) - _SPARE_FILES))


class Server:
    """`serve()` until `stop()`, in one event loop."""

    def __init__(self, app: ASGIApp, listener: int, limits: HttpLimits, render_error: RenderError) -> None:
        """`listener` is the socket's descriptor; it is left open."""
        self._app = app
        self._listener = listener
        self._limits = limits
        self._render_error = render_error
        self._connections: set[Connection] = set()
        self._room = asyncio.Semaphore(connection_limit(limits.max_connections))
        self._stop = asyncio.Event()
        self._closed = asyncio.Event()

    def stop(self) -> None:
        """Accept nothing more; `serve` returns once the requests at work are answered."""
        self._stop.set()

    async def serve(self) -> None:
        """Accept as many connections as there is room for; further ones wait."""
        with socket.socket(fileno=os.dup(self._listener)) as listener:
            listener.setblocking(False)
            accepting = asyncio.ensure_future(self._accept(listener))
            stopping = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait({accepting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            accepting.cancel()
            await asyncio.wait({accepting})
        if not accepting.cancelled():
            stopping.cancel()
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
                accepted, _ = await loop.sock_accept(listener)
            except OSError:  # files ran out, or a client has left already
                self._room.release()
                await asyncio.sleep(_PAUSE)
                continue
            await self._admit(accepted)

    async def _admit(self, accepted: socket.socket) -> None:
        """To the end, even if cancelled: a transport of uvloop that is cancelled at its birth never tells of its death."""
        connecting = asyncio.ensure_future(asyncio.get_running_loop().connect_accepted_socket(self._connect, accepted))
        try:
            await asyncio.shield(connecting)
        except OSError:
            accepted.close()
            self._room.release()
        except asyncio.CancelledError:
            await asyncio.wait({connecting})
            raise

    def _connect(self) -> Connection:
        return Connection(self._app, self._limits, self._render_error, self._connections, self._forget)

    def _forget(self) -> None:
        self._room.release()
        self._closed.set()
