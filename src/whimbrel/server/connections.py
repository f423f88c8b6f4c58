"""What ASGI does not reach: this process' sockets, found among its open files.

Granian keeps them to itself. It has no limit for a client that does not read, and where files run out its accepting spins.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

_OPEN_FILES: Final = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_SPARE_FILES: Final = 24
"""For what a process opens besides connections."""
BACKLOG: Final = 1024
"""Connections that wait to be accepted."""


def connection_limit(wanted: int) -> int:
    """How many connections this process may hold at once: at most half of the files it may open, so that none run out."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft // 2, soft - len(os.listdir(_OPEN_FILES)) - _SPARE_FILES))


def limit_silence(listener: socket.socket, seconds: float) -> None:
    """Connections accepted from now on are cut if their client takes nothing for so long. Only on Linux."""
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # accepted sockets inherit it
        listener.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))


def cut(client: tuple[str, int]) -> bool:
    """Reset the connection from this address and drop what waits to be sent; False if there is none."""
    for connection in _sockets():
        with suppress(OSError):  # not connected
            if connection.getpeername()[:2] == client:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _sockets() -> Iterator[socket.socket]:
    """This process' IP sockets, each as a duplicate that is closed after use: nobody else's number is ever closed or reused."""
    for number in map(int, os.listdir(_OPEN_FILES)):
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.fromfd(number, -1, -1) as found:  # -1: whatever it is
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        yield found
