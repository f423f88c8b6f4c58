"""Runs an app on Granian, on a socket that listens already."""

from __future__ import annotations

from typing import Any

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server
from starlette.applications import Starlette

from whimbrel.server.connections import BACKLOG, connection_limit
from whimbrel.server.options import GuardOptions


class _SharedSocketServer(Server):
    """Granian's embeddable server on a socket that others accept from too, instead of one of its own."""

    def __init__(self, app: Starlette, listener: int, **settings: Any) -> None:
        super().__init__(app, **settings)
        self._listener = listener

    def _init_shared_socket(self) -> None:
        self._ssp = None
        self._shd = SocketHolder(self._listener, False, BACKLOG)  # pyright: ignore[reportCallIssue]
        self._sfd = self._listener


def make_server(app: Starlette, listener: int, guards: GuardOptions) -> Server:
    """A server of `app` on the listening socket `listener` (a descriptor): await its `serve()`; `stop()` ends that."""
    return _SharedSocketServer(
        app,
        listener,
        interface=Interfaces.ASGI,
        http=HTTPModes.http1,
        http1_settings=HTTP1Settings(header_read_timeout=int(guards.header_timeout * 1000), max_buffer_size=128 * 1024),
        websockets=False,
        backlog=BACKLOG,
        backpressure=connection_limit(guards.max_connections),
        log_level=LogLevels.error,
        log_dictconfig={"loggers": {"_granian": {"propagate": True}}},  # to our own handler, not to stdout
    )
