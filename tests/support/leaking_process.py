"""A process that leaks as it is told: `python leaking_process.py LEAK`. Each line of stdin is a number of requests to do; "done" follows.

The argument is nothing, memory, a little memory, threads, sockets, memfds, files, or a thing that outlives it: a shm file, a child.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
from typing import Any, Final

kept: Final[list[Any]] = []


def request(what: str, number: int) -> None:
    """Work, and leak."""
    work = [bytearray(10_000) for _ in range(number % 50)]
    work.clear()
    if what == "memory":
        kept.append(bytearray(b"x" * 12288))
    elif what == "a little memory":
        kept.append(bytearray(b"x" * 256))
    elif number % 100:
        return
    elif what == "threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif what == "sockets":
        kept.append(socket.socketpair())
    elif what == "memfds":
        for _ in range(2):
            fd = os.memfd_create("leaky")
            os.ftruncate(fd, 4096)
            kept.append(mmap.mmap(fd, 4096))
            os.close(fd)
    elif what == "files":
        kept.append(os.open(__file__, os.O_RDONLY))


def leave(what: str) -> None:
    """Leave a thing behind that outlives this process."""
    if what == "a shm file":
        kept.append(open(f"/dev/shm/leaky-{os.getpid()}", "wb"))  # noqa: SIM115
    elif what == "a child":
        kept.append(subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))


def main(what: str) -> None:
    leave(what)
    done = 0
    for line in sys.stdin:
        for number in range(done, done + int(line)):
            request(what, number)
        done += int(line)
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
