"""Child process of a server: its channel to the supervisor, its limits and its end."""

import os
import resource
import socket
import sys
from contextlib import suppress
from typing import Final, NoReturn

from whimbrel.telemetry import logs

_MAX_FILES: Final = 65_536

CHANNEL_BROKEN: Final = 71
"""Exit code of a process that received a message that it cannot read, or had no descriptor left for it."""

CONTROL_FD: Final = "WHIMBREL_CONTROL_FD"
"""Environment variable with the descriptor of a child's channel to the supervisor."""


def control_socket() -> socket.socket:
    """Return the child's end of its channel to the supervisor. Exit if there is none."""
    try:
        return socket.socket(fileno=int(os.environ.pop(CONTROL_FD)))
    except (KeyError, ValueError, OSError):
        sys.exit("this is a part of `whimbrel serve`; it cannot be run alone.")


def exit_process(code: int) -> NoReturn:
    """Write the queued log records, then end without waiting for other threads."""
    logs.flush()
    os._exit(code)


def max_segments(num_channels: int) -> int:
    """Return the limit of segments of shared memory for each channel: together a quarter of the files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(4, (_MAX_FILES if soft == resource.RLIM_INFINITY else soft) // 4 // num_channels)


def raise_file_limit() -> None:
    """Raise the limit of open files as far as the system allows, for sockets and shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
