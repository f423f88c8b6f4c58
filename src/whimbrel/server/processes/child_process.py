"""Child processes: their channel to the supervisor, their limits, and their end."""

from __future__ import annotations

import os
import resource
import socket
import sys
from contextlib import suppress
from typing import Final, NoReturn

from whimbrel.telemetry import logs

_WANTED_FILES: Final = 65_536

CHANNEL_BROKEN: Final = 71
"""Exit code of a process that could not read what another sent, or had no file left for it."""

CONTROL_FD: Final = "WHIMBREL_CONTROL_FD"
"""The environment variable that names a child's end of its line to the supervisor."""


def control_socket() -> socket.socket:
    """The line to the supervisor. A child that is started by hand has none."""
    try:
        return socket.socket(fileno=int(os.environ.pop(CONTROL_FD)))
    except (KeyError, ValueError, OSError):
        sys.exit("this is a part of `whimbrel serve`; it cannot be run alone.")


def exit_process(code: int) -> NoReturn:
    """End at once, whatever threads are about; what was logged is written."""
    logs.flush()
    os._exit(code)


def max_segments(num_lines: int) -> int:
    """Return the limit of segments of shared memory for each channel: together a quarter of the files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(4, (_WANTED_FILES if soft == resource.RLIM_INFINITY else soft) // 4 // num_lines)


def raise_file_limit() -> None:
    """Sockets and shared memory take descriptors: as many as the system allows, and we want."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
