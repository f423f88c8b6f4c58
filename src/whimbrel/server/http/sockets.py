"""Socket limits: the connections of a process, and the timeouts that the kernel keeps."""

from __future__ import annotations

import os
import resource
import socket
from typing import Final

_OPEN_FILES: Final = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_SPARE_FILES: Final = 24
"""For what a process opens besides connections."""
BACKLOG: Final = 1024
"""Connections that wait to be accepted."""


def connection_limit(wanted: int) -> int:
    """Return the limit of connections of this process: at most half of the files it may open, so that none run out."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft // 2, soft - len(os.listdir(_OPEN_FILES)) - _SPARE_FILES))


def limit_silence(listener: socket.socket, seconds: float) -> None:
    """Connections accepted from now on are cut if their client takes nothing for so long. Only on Linux."""
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # accepted sockets inherit it
        listener.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))
