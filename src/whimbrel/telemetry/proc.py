"""Memory, CPU time and open files of processes, read from /proc. Other systems than Linux have none."""

import os
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Final

from whimbrel.telemetry.prometheus_text import Family
from whimbrel.telemetry.series import Key

_PROC: Final = Path("/proc")
_LABELS: Final = ("process",)
FAMILIES: Final = (
    Family("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", _LABELS),
    Family("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", _LABELS),
    Family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.", _LABELS),
    Family("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.", _LABELS),
    Family("process_max_fds", "gauge", "Maximum number of open file descriptors.", _LABELS),
    Family("process_open_fds", "gauge", "Number of open file descriptors.", _LABELS),
)


def read_process(process: str, pid: str) -> dict[Key, list[float]]:
    """Return the series of a process; `process` is its label. There are none if it has died, or belongs to another user."""
    numbers: dict[str, float] = {}
    for read in (_read_stat, _read_files):
        with suppress(OSError, StopIteration):
            numbers |= read(_PROC / pid)
    return {(name, process): [number] for name, number in numbers.items()}


def _read_stat(folder: Path) -> dict[str, float]:
    fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()  # from the third one on; see proc_pid_stat(5)
    boot = next(line for line in (_PROC / "stat").read_text().splitlines() if line.startswith("btime "))
    ticks = os.sysconf("SC_CLK_TCK")
    return {
        "process_virtual_memory_bytes": float(fields[20]),
        "process_resident_memory_bytes": float(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        "process_start_time_seconds": float(boot.split()[1]) + float(fields[19]) / ticks,
        "process_cpu_seconds_total": (float(fields[11]) + float(fields[12])) / ticks,
    }


def _read_files(folder: Path) -> dict[str, float]:
    line = next(line for line in (folder / "limits").read_text().splitlines() if line.startswith("Max open files"))
    limit = line.split()[3]
    return {
        "process_max_fds": inf if limit == "unlimited" else float(limit),
        "process_open_fds": float(len(os.listdir(folder / "fd"))),
    }
