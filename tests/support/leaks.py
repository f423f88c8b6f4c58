"""Leak detection from outside: resources of a process and its descendants at rest, against the number of answered requests.

Theory of operation. A caller gives the processes work, lets them finish, and takes a sample, again and again. A sample has the
memory, threads, sockets, shared memory and other descriptors of each process. A process that dies and is started again keeps
its name ("engine-0") and begins a new life. The first part of the samples is ignored, and so is the start of each later life,
because caches, pools and allocators fill up first. The slope is that of Theil and Sen: the median of the slopes between all
pairs of samples of one life, which a few outliers do not move. A quantity leaks if its slope exceeds one limit and its growth
within one life another. A longer run finds smaller leaks.

Reads /proc of Linux; knows nothing of servers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, groupby
from math import nan
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel_bench.processes import family

Series: TypeAlias = Mapping[str, float]
"""Quantities of a process by name."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit on the growth of a quantity, and the ignored start."""

    per_thousand: float
    """Growth per 1,000 requests that is allowed."""
    altogether: float
    """Growth in one life that is allowed, however fast."""
    since: float = 0.25
    """Fraction of all samples that is ignored at the start."""
    youth: int = 0
    """Requests that are ignored at the start of a later life."""


LIMITS: Final[Mapping[str, Limit]] = {
    "memory, MiB": Limit(1.0, 8.0, since=0.5, youth=1500),
    "shared memory, MiB": Limit(1.0, 16.0, since=0.5),
    "shared segments": Limit(2.0, 8.0),
    "threads": Limit(0.0, 1.5),
    "sockets": Limit(0.0, 0.5),
    "other files": Limit(0.0, 0.5),
}
"""Limits by quantity. Memory is resident memory: private, file-backed and shared pages. Segments of shared memory count if they
are mapped or open. They may grow a little, because a pool keeps some."""

_YOUTH: Final = 3
"""Number of ignored samples at the start of a later life."""
_MIN_SAMPLES: Final = 12
_MIN_LIFE_SAMPLES: Final = 4
"""Minimum samples of one life for a slope."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one process."""

    pid: int
    amounts: Series


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of all processes after a number of requests."""

    requests: int
    held: Mapping[str, Resources]
    """Resources by name of the process."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Trend of one quantity of one process."""

    process: str
    quantity: str
    first: float
    last: float
    slope: float
    """Growth per 1,000 requests; NaN if all lives are too short."""
    growth: float
    """Largest growth within one life."""
    noise: float
    """Median distance of the samples from the slope."""
    limit: Limit

    @property
    def leaks(self) -> bool:
        return self.slope >= self.limit.per_thousand and self.growth > max(self.limit.altogether, 4 * self.noise)


class Family:
    """A process and its descendants, over all their lives."""

    def __init__(self, pid: int, name: str) -> None:
        """Name the first process `name`. The others are named by their modules, and numbered."""
        self.pid = pid
        self._first = name
        self._names: dict[int, tuple[str, list[str]]] = {}
        self.shared_files: set[Path] = set()
        """All files in /dev/shm that the processes have had."""

    def sample(self, requests: int) -> Sample:
        """Return the current resources."""
        self._name(family(self.pid))
        held: dict[str, Resources] = {}
        names = {self.pid: self._first} | {pid: name for pid, (name, _) in self._names.items()}
        for pid, name in names.items():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                held[name] = Resources(pid, self._amounts(pid))
        return Sample(requests, held)

    def left(self) -> list[str]:
        """Return the remains of a first process that led a session and has ended."""
        processes = [f"process {pid}: {_command(pid)}" for pid in _living() if _session(pid) == self.pid]
        return [*processes, *(f"file {path}" for path in sorted(self.shared_files) if path.exists())]

    def _name(self, pids: list[int]) -> None:
        """Name new processes. A process gets another name after its exec, because before it looks like its parent."""
        commands = {pid: _command(pid) for pid in pids[1:]}
        kept = {pid: (name, command) for pid, (name, command) in self._names.items() if commands.get(pid) == command}
        for pid in pids[1:]:
            if pid not in kept and (kind := _kind(commands[pid])):
                taken = {name for name, _ in kept.values()}
                kept[pid] = next(name for i in count() if (name := f"{kind}-{i}") not in taken), commands[pid]
        self._names = kept

    def _amounts(self, pid: int) -> Series:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        links = {fd: link for fd in os.listdir(f"/proc/{pid}/fd") if (link := _link(f"/proc/{pid}/fd/{fd}"))}
        shared = _mapped_segments(pid) | {
            (os.stat(f"/proc/{pid}/fd/{fd}").st_ino, link) for fd, link in links.items() if link.startswith(_SHARED)
        }
        self.shared_files.update(Path(name) for _, name in shared if name.startswith(_SHARED[0]))
        sockets = sum(link.startswith("socket:") for link in links.values())
        return {
            "memory, MiB": _mebibytes(status, "RssAnon", "RssFile"),
            "shared memory, MiB": _mebibytes(status, "RssShmem"),
            "shared segments": len({inode for inode, _ in shared}),
            "threads": int(status["Threads"]),
            "sockets": sockets,
            "other files": len(links) - sockets - sum(link.startswith(_SHARED) for link in links.values()),
        }


def _mebibytes(status: Mapping[str, str], *names: str) -> float:
    return sum(int(status[name].split()[0]) for name in names) / 1024


_SHARED: Final = ("/dev/shm/", "/memfd:")


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # it was closed just now
        return ""


def _mapped_segments(pid: int) -> set[tuple[int, str]]:
    """Return inode and name of the shared memory that a process has mapped."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {(int(line[4]), line[5]) for line in lines if len(line) == 6 and line[5].startswith(_SHARED)}


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return []


def _kind(command: Sequence[str]) -> str:
    """Return the last part of the name of the module or program that runs, or "" if there is none yet."""
    with suppress(ValueError, IndexError):
        at = command.index("-m") + 1
        name = command[at].rpartition(".")[2]
        return command[at + 1] if name == "bootstrap" else name  # a child of the server is named by its kind
    return Path(command[0]).name if command else ""


def _session(pid: int) -> int:
    """Return the process that leads a process's session, or 0 if it has ended."""
    try:
        state, _, _, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state == "Z" else int(session)


def _living() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def trends(samples: Sequence[Sample], limits: Mapping[str, Limit] = LIMITS) -> list[Trend]:
    """Return the trend of each quantity of each process. Raises ValueError if there are too few samples."""
    if len(samples) < _MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples; it takes {_MIN_SAMPLES}")
    names = sorted({name for sample in samples for name in sample.held})
    return [_trend(name, quantity, limit, samples) for name in names for quantity, limit in limits.items()]


@dataclass(frozen=True, slots=True)
class Life:
    """One quantity over the watched part of one life of a process."""

    requests: Sequence[float]
    """Thousands of requests."""
    amounts: Sequence[float]

    @property
    def growth(self) -> float:
        """Return the growth from the first third to the last."""
        third = -(-len(self.amounts) // 3)
        return median(self.amounts[-third:]) - median(self.amounts[:third])


def _trend(name: str, quantity: str, limit: Limit, samples: Sequence[Sample]) -> Trend:
    lives = list(_lives(name, quantity, limit, samples))
    slope, noise = fit(lives)
    growth = max((life.growth for life in lives), default=nan)
    first, last = (lives[0].amounts[0], lives[-1].amounts[-1]) if lives else (nan, nan)
    return Trend(name, quantity, first, last, slope, growth, noise, limit)


def _lives(name: str, quantity: str, limit: Limit, samples: Sequence[Sample]) -> Iterator[Life]:
    """Return the watched part of each life."""
    present = [(index, sample) for index, sample in enumerate(samples) if name in sample.held]
    for _, life in groupby(present, key=lambda item: item[1].held[name].pid):
        (born, first), *more = life
        samples_of_youth, requests_of_youth = (_YOUTH, limit.youth) if born else (0, 0)
        grown = [
            sample
            for age, (index, sample) in enumerate([(born, first), *more])
            if index >= limit.since * len(samples)
            and age >= samples_of_youth
            and sample.requests - first.requests >= requests_of_youth
        ]
        if len(grown) >= _MIN_LIFE_SAMPLES:
            yield Life([sample.requests / 1000 for sample in grown], [sample.held[name].amounts[quantity] for sample in grown])


def fit(lives: Sequence[Life]) -> tuple[float, float]:
    """Return the slope of Theil and Sen and the median distance from it. Both are NaN without data."""
    slopes: list[NDArray[np.float64]] = []
    for life in lives:
        x, y = np.array(life.requests), np.array(life.amounts)
        i, j = np.triu_indices(len(x), 1)
        i, j = i[x[j] > x[i]], j[x[j] > x[i]]
        slopes.append((y[j] - y[i]) / (x[j] - x[i]))
    if not sum(map(len, slopes)):
        return nan, nan
    slope = float(np.median(np.concatenate(slopes)))
    levels = [np.array(life.amounts) - slope * np.array(life.requests) for life in lives]
    return slope, float(np.median(np.concatenate([np.abs(level - np.median(level)) for level in levels])))
