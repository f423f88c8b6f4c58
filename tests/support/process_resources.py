"""Memory, sockets and files of a server's processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from whimbrel_bench.processes import family


def peak_memory(pid: int, run: Callable[[], object]) -> int:
    """Return the bytes by which a server's processes grew at most while `run` ran."""
    pids = family(pid)
    before = 0
    for process in pids:
        Path(f"/proc/{process}/clear_refs").write_text("5")  # forgets the peak so far
        before += _memory(process, "VmRSS")
    run()
    return sum(_memory(process, "VmHWM") for process in pids) - before


def _memory(pid: int, field: str) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def open_sockets(pid: int) -> int:
    """Return the number of sockets of a process."""
    count = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            count += os.readlink(file).startswith("socket:")
    return count


def open_files(pid: int) -> int:
    """Return the number of open files of a process and its descendants."""
    return sum(len(os.listdir(f"/proc/{process}/fd")) for process in family(pid))
