"""HTTP server on a listening socket that other processes may share."""

import asyncio
import os
import resource
import socket
import ssl
from asyncio import BaseEventLoop
from collections.abc import Coroutine
from typing import Any, Final

from starlette.types import ASGIApp

from whimbrel.server.http.balance import LEAVE_SECONDS, Balance
from whimbrel.server.http.connection import Connection, RenderError
from whimbrel.server.http.limits import BACKLOG, HttpLimits
from whimbrel.server.http.places import Places

_PAUSE: Final = 0.1
"""Seconds until a server that cannot accept, or has no place, looks again."""
_FEW: Final = 0.5
_MANY: Final = 0.75
"""Shares of the places below and above which the event loop accepts, and this server."""
_BATCH: Final = 16
"""Connections that are accepted in one turn of the event loop."""
_OPEN_FILES: Final = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_SPARE_FILES: Final = 24
"""Files that a process may open besides connections."""


class Server:
    """`serve()` until `stop()`, in one event loop.

    While there are places enough, the event loop accepts, which is cheap. Near the limit, and if more has to be known of a
    connection before it is made (TLS, Unix sockets), the server accepts by itself, one after another. If other processes accept
    too, it leaves connections to them while it has more.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: int,
        limits: HttpLimits,
        render_error: RenderError,
        *,
        tls: ssl.SSLContext | None = None,
        balance: Balance | None = None,
    ) -> None:
        """Make it in the event loop that it serves in. `listener` stays open; `limits` and `tls` may be replaced, for later
        connections."""
        self._loop = asyncio.get_running_loop()
        self._app = app
        self.limits = limits
        self._render_error = render_error
        self._balance = balance
        if balance is not None:
            balance.note(0)
        self.tls = tls
        self._listener = socket.socket(fileno=os.dup(listener))
        self._listener.setblocking(False)
        self._is_simple = tls is None and self._listener.family != socket.AF_UNIX and not isinstance(self._loop, BaseEventLoop)
        """True if the event loop may accept. That of asyncio takes all that wait at once, places or not."""
        self._accepting: asyncio.Server | None = None
        """The event loop's own server, while that accepts."""
        self._changing = False
        """True while the event loop begins to accept."""
        self._watching = False
        """True while this server accepts by itself."""
        self.places = Places(limits, connection_limit(limits.max_connections), self._on_release)
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    def stop(self) -> None:
        """Accept no more connections; `serve` returns once the running requests are answered."""
        self._stop.set()

    async def serve(self) -> None:
        """Accept connections up to the limit; further ones wait."""
        with self._listener:
            self._choose()
            await self._stop.wait()
            self._unwatch()
            if self._tasks:
                await asyncio.wait(self._tasks)
            if self._accepting is not None:
                self._accepting.close()
        for connection in list(self.places.taken):
            assert isinstance(connection, Connection)
            connection.shut_down()
        while self.places.taken:
            self._closed.clear()
            await self._closed.wait()

    # Either of two ways to accept

    def _choose(self) -> None:
        """Go over to the way of accepting that fits the number of places."""
        if self._stop.is_set():
            return
        if self._accepting is not None:
            if self.places.share > _MANY:
                self._accepting.close()
                self._accepting = None
                self._watch()
        elif self._is_simple and self.places.share < _FEW:
            self._unwatch()
            if not self._changing:
                self._changing = True
                self._start_task(self._let_loop_accept())
        else:
            self._watch()

    async def _let_loop_accept(self) -> None:
        self._accepting = await self._loop.create_server(self._make, sock=self._listener.dup(), backlog=BACKLOG)
        self._changing = False
        self._choose()

    def _make(self) -> Connection:
        connection = Connection(self._app, self.limits, self._render_error, self.places)
        if self.places.share > _MANY:
            self._loop.call_soon(self._choose)
        elif self._is_ahead():
            self._loop.call_soon(self._leave_to_others)
        return connection

    def _on_release(self) -> None:
        self._closed.set()
        if self._balance is not None:
            self._balance.note(len(self.places.taken))
        if self._accepting is None:
            self._choose()

    def _is_ahead(self) -> bool:
        """Note a new connection. Return whether the next ones are for other processes."""
        if self._balance is None:
            return False
        self._balance.note(len(self.places.taken))
        return self._balance.is_ahead

    def _leave_to_others(self) -> None:
        """Accept nothing for a moment."""
        if self._accepting is not None:
            self._accepting.close()
            self._accepting = None
        self._unwatch()
        self._loop.call_later(LEAVE_SECONDS, self._choose)

    # Accepting by itself

    def _watch(self) -> None:
        """Accept what waits, from the next turn of the loop on."""
        if not self._watching:
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
                self._loop.call_later(_PAUSE, self._choose)
                return
            connection = Connection(self._app, self.limits, self._render_error, self.places, sock)
            self._start_task(self._connect(connection, sock))
            if self._is_ahead():
                self._leave_to_others()
                return

    async def _connect(self, connection: Connection, sock: socket.socket) -> None:
        """Make the transport of a connection. It is never cancelled: uvloop would not report the loss of the transport."""
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, sock, ssl=self.tls, ssl_handshake_timeout=self.limits.header_timeout if self.tls else None
            )
        except OSError:  # the client has left, or does not speak TLS
            sock.close()
            self.places.release(connection)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def connection_limit(limit: int) -> int:
    """Return the number of connections for this process: `limit`, or fewer so that it never runs out of files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limit
    return max(1, min(limit, soft // 2, soft - len(os.listdir(_OPEN_FILES)) - _SPARE_FILES))
