"""Bootstrap of a child process: the steps before it imports anything that takes long.

Command: python -m whimbrel.server.processes.bootstrap KIND SUPERVISOR.

A terminal or a service manager sends signals to all processes. A child ignores them, as the supervisor tells it to stop. It
ends when the supervisor ends: their channel is closed then, and the kernel kills a child that is loading or stuck.
"""

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    if len(sys.argv) != 3 or sys.argv[1] not in ("engine", "worker", "download"):
        sys.exit("this is a part of `whimbrel serve`; it cannot be run alone.")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(sys.argv[2]):  # the supervisor has ended meanwhile
            sys.exit(1)
    if sys.argv[1] == "engine":
        from whimbrel.server.processes.engine_process import main as run
    elif sys.argv[1] == "worker":
        from whimbrel.server.processes.worker import main as run
    else:
        from whimbrel.server.processes.download_process import main as run
    run()


if __name__ == "__main__":
    main()
