"""Messages to the service manager that started the server, such as systemd.

The manager names a datagram socket in NOTIFY_SOCKET, and asks for signs of life by WATCHDOG_USEC. Without these variables
nothing is sent. A message that cannot be sent is lost: the server serves without its manager too.

Source: systemd's sd_notify(3).
"""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
ALIVE: Final = "WATCHDOG=1"
RELOADING: Final = "RELOADING=1"
_SECONDS: Final = 2.0
"""The longest wait for a manager that does not read. A sign of life is not waited for: the next one follows."""


class ServiceManager:
    """Sender of states to the service manager of this process, if it has one."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is that of the process, unless another is given."""
        variables = os.environ if environment is None else environment
        name = variables.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        pid = variables.get("WATCHDOG_PID", str(os.getpid()))
        self._watches = bool(variables.get("WATCHDOG_USEC")) and pid == str(os.getpid())

    def tell(self, state: str) -> None:
        """Send a state. A sign of life is sent only to a manager that waits for one, and RELOADING with the time."""
        if not self._address or (state == ALIVE and not self._watches):
            return
        if state == RELOADING:
            state += f"\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}"
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(0.0 if state == ALIVE else _SECONDS)
            sender.sendto(state.encode(), self._address)
