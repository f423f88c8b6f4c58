"""Bootstrap of a child process: the steps before it imports anything that takes long.

Command: python -m whimbrel.server.processes.bootstrap KIND SUPERVISOR.

It leaves signals to the supervisor, which a terminal or a service manager sends to all processes, and ends when that ends: its
channel to the supervisor ends then too, but the kernel's signal also reaches a process that is loading or stuck.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Become the process."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    if len(sys.argv) != 3 or sys.argv[1] not in ("engine", "worker"):
        sys.exit("this is a part of `whimbrel serve`; it cannot be run alone.")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(sys.argv[2]):  # it has ended meanwhile
            sys.exit(1)
    if sys.argv[1] == "engine":
        from whimbrel.server.processes.engine_process import main as run
    else:
        from whimbrel.server.processes.worker import main as run
    run()


if __name__ == "__main__":
    main()
