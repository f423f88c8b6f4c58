"""HTTP server on a listening socket that other processes may share."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
from typing import Final

from starlette.types import ASGIApp

from whimbrel.server.http.connection import Connection, RenderError
from whimbrel.server.http.limits import HttpLimits
from whimbrel.server.http.places import Places

_PAUSE: Final = 0.1
"""Seconds until a server that cannot accept, or has no place, looks again."""
_BATCH: Final = 16
"""Connections that are accepted in one turn of the event loop."""
_OPEN_FILES: Final = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_SPARE_FILES: Final = 24
"""Files that a process may open besides connections."""


class Server:
    """`serve()` until `stop()`, in one event loop."""

    def __init__(
        self, app: ASGIApp, listener: int, limits: HttpLimits, render_error: RenderError, tls: ssl.SSLContext | None = None
    ) -> None:
        """Make it in the event loop that it serves in. `listener` is the socket's descriptor, which stays open.

        `tls` may be replaced, for connections from then on.
        """
        self._loop = asyncio.get_running_loop()
        self._app = app
        self._limits = limits
        self._render_error = render_error
        self.tls = tls
        self._listener = socket.socket(fileno=os.dup(listener))
        self._listener.setblocking(False)
        self.places = Places(limits, connection_limit(limits.max_connections), self._on_release)
        self._watching = False
        self._stop = asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    def stop(self) -> None:
        """Accept no more connections; `serve` returns once the running requests are answered."""
        self._stop.set()

    async def serve(self) -> None:
        """Accept connections up to the limit; further ones wait."""
        with self._listener:
            self._watch()
            await self._stop.wait()
            self._unwatch()
        if self._connecting:
            await asyncio.wait(self._connecting)
        for connection in list(self.places.taken):
            assert isinstance(connection, Connection)
            connection.shut_down()
        while self.places.taken:
            self._closed.clear()
            await self._closed.wait()

    def _watch(self) -> None:
        """Accept what waits, from the next turn of the loop on."""
        if not self._watching and not self._stop.is_set():
            self._watching = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        """Accept some of the connections that wait, as far as there are places."""
        for _ in range(_BATCH):
            try:
                if not self.places.find_room():
                    raise OSError
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no place, too many open files, or a client that has left already
                self._unwatch()
                self._loop.call_later(_PAUSE, self._watch)
                return
            connection = Connection(self._app, self._limits, self._render_error, self.places, sock)
            task = self._loop.create_task(self._connect(connection, sock))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: Connection, sock: socket.socket) -> None:
        """Make the transport of a connection. It is never cancelled: uvloop would not report the loss of the transport."""
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=self.tls,
                ssl_handshake_timeout=self._limits.header_timeout if self.tls else None,
            )
        except OSError:  # the client has left, or does not speak TLS
            sock.close()
            self.places.release(connection)

    def _on_release(self) -> None:
        self._closed.set()
        self._watch()


def connection_limit(limit: int) -> int:
    """Return the number of connections for this process: `limit`, or fewer so that it never runs out of files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limit
    return max(1, min(limit, soft // 2, soft - len(os.listdir(_OPEN_FILES)) - _SPARE_FILES))
