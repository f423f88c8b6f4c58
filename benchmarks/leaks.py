"""Leaks, seen from outside: what a process and its descendants hold whenever they are at rest, against the requests answered.

Theory of operation. Somebody gives the processes work, lets them finish, and takes a sample; again and again. A sample has,
per process, its memory, threads, sockets, shared memory and other descriptors. A process that dies and is started again
keeps its name ("engine-0"), so that its lives can be told apart. The first part of the samples is not looked at, nor is the
youth of a life that began meanwhile: caches, pools and allocators fill up first. The slope is Theil and Sen's, the median of
the slopes between all pairs of samples of one life, which a few odd samples do not move. What grows faster than its limit, and
within one life further than it may, leaks: so the longer it is watched, the less escapes.

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
from common import family
from numpy.typing import NDArray

Series: TypeAlias = Mapping[str, float]
"""What a process holds, by quantity."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What may grow, and from when on that is watched."""

    per_thousand: float
    """By so much per 1,000 requests,"""
    altogether: float
    """or, however fast, by so much in all that is watched of one life."""
    since: float = 0.25
    """Samples before this part of all are not looked at,"""
    youth: int = 0
    """nor are those of a life that began meanwhile and has not seen so many requests yet."""


LIMITS: Final[Mapping[str, Limit]] = {
    "memory, MiB": Limit(1.0, 8.0, since=0.5, youth=1500),
    "shared memory, MiB": Limit(1.0, 16.0, since=0.5),
    "shared segments": Limit(2.0, 8.0),
    "threads": Limit(0.0, 1.5),
    "sockets": Limit(0.0, 0.5),
    "other files": Limit(0.0, 0.5),
}
"""Memory is what is resident: pages that are a process's own or of files, and those that it shares. Segments of shared
memory are counted whether they are mapped, open or both; a pool may keep some, which is why they may grow a little."""

_YOUTH: Final = 3
"""Samples at the beginning of a life that began after the first."""
_LEAST_SAMPLES: Final = 12
_LEAST: Final = 4
"""Samples of one life, to say anything."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds."""

    pid: int
    amounts: Series


@dataclass(frozen=True, slots=True)
class Sample:
    """What all processes hold after so many requests."""

    requests: int
    held: Mapping[str, Held]
    """By the process's name."""


@dataclass(frozen=True, slots=True)
class Trend:
    """How one quantity of one process goes."""

    process: str
    quantity: str
    first: float
    last: float
    slope: float
    """Per 1,000 requests; NaN if no life lasted long enough."""
    growth: float
    """Of the life in which it is most."""
    noise: float
    """How far samples are from the slope, in the middle."""
    limit: Limit

    @property
    def leaks(self) -> bool:
        return self.slope >= self.limit.per_thousand and self.growth > max(self.limit.altogether, 4 * self.noise)


class Family:
    """A process and its descendants, over all their lives."""

    def __init__(self, pid: int, name: str) -> None:
        """`name` is what the first process is called; the others are called by their modules, and numbered."""
        self.pid = pid
        self._first = name
        self._names: dict[int, tuple[str, list[str]]] = {}
        self.shared_files: set[Path] = set()
        """All files in /dev/shm that they have had."""

    def sample(self, requests: int) -> Sample:
        """What they hold now."""
        self._name(family(self.pid))
        held: dict[str, Held] = {}
        names = {self.pid: self._first} | {pid: name for pid, (name, _) in self._names.items()}
        for pid, name in names.items():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                held[name] = Held(pid, self._amounts(pid))
        return Sample(requests, held)

    def left(self) -> list[str]:
        """After the end of a first process that led a session: what has stayed behind."""
        processes = [f"process {pid}: {_command(pid)}" for pid in _living() if _session(pid) == self.pid]
        return [*processes, *(f"file {path}" for path in sorted(self.shared_files) if path.exists())]

    def _name(self, pids: list[int]) -> None:
        """Names for who has none. What has just been forked is not yet what it will be, so it is named again after its exec."""
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
        shared = _mapped(pid) | {
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


def _mapped(pid: int) -> set[tuple[int, str]]:
    """Inode and name of the shared memory that a process has mapped."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {(int(line[4]), line[5]) for line in lines if len(line) == 6 and line[5].startswith(_SHARED)}


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return []


def _kind(command: Sequence[str]) -> str:
    """The module or the program that is run, without what it is part of; empty if there is none (yet)."""
    with suppress(ValueError, IndexError):
        at = command.index("-m") + 1
        name = command[at].rpartition(".")[2]
        return command[at + 1] if name == "start" else name  # a module that becomes one of several
    return Path(command[0]).name if command else ""


def _session(pid: int) -> int:
    """The process that leads its session; 0 if it has ended."""
    try:
        state, _, _, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state == "Z" else int(session)


def _living() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def trends(samples: Sequence[Sample], limits: Mapping[str, Limit] = LIMITS) -> list[Trend]:
    """How everything goes. Raises ValueError if there are too few samples to say."""
    if len(samples) < _LEAST_SAMPLES:
        raise ValueError(f"{len(samples)} samples; it takes {_LEAST_SAMPLES}")
    names = sorted({name for sample in samples for name in sample.held})
    return [_trend(name, quantity, limit, samples) for name in names for quantity, limit in limits.items()]


@dataclass(frozen=True, slots=True)
class Life:
    """One quantity over what is watched of one life of a process."""

    requests: Sequence[float]
    """Thousands of them."""
    amounts: Sequence[float]

    @property
    def growth(self) -> float:
        """From the first third to the last."""
        third = -(-len(self.amounts) // 3)
        return median(self.amounts[-third:]) - median(self.amounts[:third])


def _trend(name: str, quantity: str, limit: Limit, samples: Sequence[Sample]) -> Trend:
    lives = list(_lives(name, quantity, limit, samples))
    slope, noise = fit(lives)
    growth = max((life.growth for life in lives), default=nan)
    first, last = (lives[0].amounts[0], lives[-1].amounts[-1]) if lives else (nan, nan)
    return Trend(name, quantity, first, last, slope, growth, noise, limit)


def _lives(name: str, quantity: str, limit: Limit, samples: Sequence[Sample]) -> Iterator[Life]:
    """What is watched of each life."""
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
        if len(grown) >= _LEAST:
            yield Life([sample.requests / 1000 for sample in grown], [sample.held[name].amounts[quantity] for sample in grown])


def fit(lives: Sequence[Life]) -> tuple[float, float]:
    """Theil and Sen's slope, and the median distance from it; NaNs if there is nothing."""
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
