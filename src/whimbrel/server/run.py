"""Runs an app on Granian in this process until a signal asks it to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

import uvloop
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server
from starlette.applications import Starlette

from whimbrel.errors import SetupError
from whimbrel.server.connections import connection_limit, limit_silence
from whimbrel.server.options import DEFAULTS, GuardOptions


def find_address(host: str, port: int) -> tuple[str, int]:
    """The address of `host`, and `port` or a free one for 0.

    Raises SetupError if it cannot be bound, before anything is loaded.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise SetupError(f"cannot listen on {host}: {error}.", hint="--host takes an address of this machine") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _cannot_listen(host, port, error) from None
        return str(address[0]), probe.getsockname()[1]


def run(app: Starlette, *, host: str, port: int, started: Callable[[], None], guards: GuardOptions = DEFAULTS) -> None:
    """Serve on an IP address until SIGINT or SIGTERM; requests in flight are finished. `started` is called once it answers.

    Raises SetupError if the address has been taken meanwhile.
    """
    try:
        uvloop.run(_serve(app, host, port, started, guards))
    except OSError as error:
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> SetupError:
    hint = f"choose another: --port {port + 1}" if 1024 <= port < 65535 else "choose another --port or --host"
    return SetupError(f"cannot listen on {host}:{port}: {error.strerror or error}.", hint=hint)


async def _serve(app: Starlette, host: str, port: int, started: Callable[[], None], guards: GuardOptions) -> None:
    server = Server(
        app,
        address=host,
        port=port,
        interface=Interfaces.ASGI,
        http=HTTPModes.http1,
        http1_settings=HTTP1Settings(header_read_timeout=int(guards.header_timeout * 1000), max_buffer_size=128 * 1024),
        websockets=False,
        backlog=1024,
        backpressure=connection_limit(guards.max_connections),
        log_level=LogLevels.error,
    )
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, server.stop)
    running = asyncio.ensure_future(server.serve())
    await _wait_until_open(host, port, running)
    if not running.done():
        limit_silence(port, guards.write_pause)
        started()
    await running


async def _wait_until_open(host: str, port: int, running: asyncio.Future[None]) -> None:
    while not running.done():
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(0.01)
        else:
            writer.close()
            return
