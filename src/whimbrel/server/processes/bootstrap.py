"""Child process of a server: its start, its channel to the supervisor, its limits and its end.

Command: python -m whimbrel.server.processes.bootstrap KIND SUPERVISOR. Nothing is imported here that takes long.

A terminal or a service manager sends signals to all processes. A child ignores them, as the supervisor tells it to stop. It
ends when the supervisor ends: their channel is closed then, and the kernel kills a child that is loading or stuck.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Final, NoReturn

CHANNEL_BROKEN: Final = 71
"""Exit code of a process that received a message that it cannot read, or had no descriptor left for it."""
CONTROL_FD: Final = "WHIMBREL_CONTROL_FD"
"""Environment variable with the descriptor of a child's channel to the supervisor."""

_PR_SET_PDEATHSIG: Final = 1
_MAX_FILES: Final = 65_536
_NOT_ALONE: Final = "this is a part of `whimbrel serve`; it cannot be run alone."


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    if len(sys.argv) != 3 or sys.argv[1] not in ("engine", "worker"):
        sys.exit(_NOT_ALONE)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(sys.argv[2]):  # the supervisor has ended meanwhile
            sys.exit(1)
    if sys.argv[1] == "engine":
        from whimbrel.server.processes.engine_process import main as run
    else:
        from whimbrel.server.processes.worker import main as run
    raise_file_limit()
    run()


def control_socket() -> socket.socket:
    """Return the child's end of its channel to the supervisor. Exit if there is none."""
    try:
        return socket.socket(fileno=int(os.environ.pop(CONTROL_FD)))
    except (KeyError, ValueError, OSError):
        sys.exit(_NOT_ALONE)


def exit_process(code: int) -> NoReturn:
    """Write the queued log records, then end without waiting for other threads."""
    from whimbrel.telemetry import logs

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


if __name__ == "__main__":
    main()
