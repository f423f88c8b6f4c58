"""Limits of the machine: the cores and the memory that this process may use.

Affinity limits the cores, and control groups (cgroups) limit the time on them and the memory. A process is in one group of each
hierarchy (/proc/self/cgroup). The limits of this group and of all groups above it hold, as far as they are mounted
(/proc/self/mountinfo): so a limit is found that a container, a pod or a unit of systemd has. Both versions of cgroups are
read, also beside each other. A file that is missing or that cannot be read limits nothing. Every limit is read here.

Waiting requests may take a share of the memory, which is divided among the processes.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

_UNIFIED: Final = ""
"""Name of the hierarchy of version 2. Those of version 1 have the names of their controllers."""
_HIERARCHIES: Final = (_UNIFIED, "cpu", "memory")
_NO_LIMIT: Final = 2**62
"""Bytes from which on version 1 means that there is no limit."""
_ASSUMED: Final = 2**33
"""Bytes of memory of a machine that does not say."""
_PART: Final = 4
"""Waiting requests take at most a quarter of the memory: half of that in the workers, half in the engines."""
_COPIES: Final = 4
"""Bytes that a worker and an engine hold for each byte of a body: the body, its texts, and their tokens twice."""
_BYTES_PER_TOKEN: Final = 8
"""Memory of the id of a token that waits, at most: shared memory comes in powers of two."""
_LEAST: Final = 2**25
"""Bytes of a share on small machines, as of the largest body."""


class Limit(NamedTuple):
    """A number, and the file that it comes from."""

    value: float
    file: str


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Resources of the machine, and their limits."""

    processors: int
    """Processors by affinity, as the system counts them: a core with two hyper-threads is two."""
    cores: int
    """Cores of these processors."""
    memory: int
    """Bytes of memory of the machine; 0 if the system does not say."""
    quota: Limit | None = None
    """Processors whose time this process may use at most, if these are fewer."""
    memory_limit: Limit | None = None
    """Bytes that this process may use at most, if these are fewer."""

    @property
    def usable_processors(self) -> int:
        """Number of processors by affinity and quota: a half counts as one, less as none, and there is one."""
        return self.processors if self.quota is None else max(1, int(self.quota.value + 0.5))

    @property
    def usable_cores(self) -> int:
        """Number of threads that compute at full speed side by side: hyper-threads of a core share its multipliers."""
        return min(self.cores, self.usable_processors)

    @property
    def usable_memory(self) -> int:
        """Bytes of memory; 0 if the system does not say."""
        return self.memory if self.memory_limit is None else int(self.memory_limit.value)


def read_limits(root: Path = Path("/")) -> MachineLimits:
    """Return the limits of this process. `root` is the folder that holds /proc and /sys."""
    folders = list(_group_folders(root))
    ids = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    memory = _machine_memory()

    def siblings(processor: int) -> str:  # the hyper-threads of its core, or itself where the system does not say
        file = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        return next(filter(None, _lines(file)), str(processor))

    return MachineLimits(
        processors=len(ids),
        cores=len({siblings(number) for number in ids}),
        memory=memory,
        quota=_least(folders, _QUOTAS, len(ids)),
        memory_limit=_least(folders, _SIZES, memory or _NO_LIMIT),
    )


def usable_processors() -> int:
    """Return the number of processors that this process may use."""
    return read_limits().usable_processors


def usable_memory() -> int:
    """Return the bytes of memory that this process may use; 0 if the system does not say."""
    return read_limits().usable_memory


def expects_gpu(device: str | None, root: Path = Path("/")) -> bool:
    """Return whether an engine with this option will most likely run on a GPU.

    The driver's files and PyTorch's version tell, since importing PyTorch takes seconds.
    """
    if device not in (None, "auto"):
        return device.startswith("cuda")
    with suppress(PackageNotFoundError):
        if version("torch").endswith("+cpu"):
            return False
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return visible not in ("", "-1") and (root / "proc/driver/nvidia/version").exists() and (root / "dev/nvidiactl").exists()


@dataclass(frozen=True, slots=True)
class WaitingMemory:
    total: int
    """Bytes of all processes together."""
    bodies: int
    """Bytes of bodies in each worker. Clients whose bodies do not fit wait before they are read."""
    results: int
    """Bytes of token ids and results in each engine. Requests that do not fit are refused."""

    @property
    def tokens(self) -> int:
        """Tokens that may wait in each engine."""
        return self.results // _BYTES_PER_TOKEN


def share_waiting_memory(memory: int, *, num_workers: int = 1, num_engines: int = 1) -> WaitingMemory:
    """Return the shares on a machine, or in a container, of `memory` bytes; 0: unknown."""
    total = (memory or _ASSUMED) // _PART
    bodies, results = total // 2 // _COPIES // num_workers, total // 2 // num_engines
    return WaitingMemory(total, max(bodies, _LEAST), max(results, _LEAST))


def _machine_memory() -> int:
    try:
        return max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return 0


def _least(folders: list[Path], readers: Mapping[str, Callable[[Path], float]], most: float) -> Limit | None:
    """Return the least limit of all groups; None if none is below `most`."""
    limits: list[Limit] = []
    for file, read in ((folder / name, read) for folder in folders for name, read in readers.items()):
        with suppress(OSError, ValueError, ArithmeticError):  # no such file, "max", or no number
            limits.append(Limit(read(file), str(file)))
    return min((limit for limit in limits if 0 < limit.value < most), default=None)


def _quota(file: Path) -> float:
    quota, period = file.read_text().split()
    return int(quota) / int(period)


_QUOTAS: Final[Mapping[str, Callable[[Path], float]]] = {
    "cpu.max": _quota,
    # -1: no limit
    "cpu.cfs_quota_us": lambda file: int(file.read_text()) / int(file.with_name("cpu.cfs_period_us").read_text()),
}
_SIZES: Final[Mapping[str, Callable[[Path], float]]] = dict.fromkeys(
    ("memory.max", "memory.high", "memory.limit_in_bytes"), lambda file: int(file.read_text())
)
"""Files of sizes. Above memory.high (MemoryHigh of systemd) the kernel slows a process down until it stands still."""


def _group_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of the groups of this process and of the groups above them, as far as they are mounted."""
    groups = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup") if line.count(":") >= 2]
    own = {name: group for _, controllers, group in groups for name in controllers.split(",")}
    mounts = _mounts(_lines(root / "proc/self/mountinfo"))
    for hierarchy in _HIERARCHIES:
        found = [
            (root / folder.lstrip("/"), _path_below(own.get(hierarchy, "/"), top))
            for name, top, folder in mounts
            if name == hierarchy
        ]
        for folder, path in [each for each in found if each[1] is not None] or found:
            group = folder / (path or "")  # a namespace of which only the root is known
            yield from (each for each in (group, *group.parents) if each.is_relative_to(folder))


def _path_below(group: str, root: str) -> PurePosixPath | None:
    """Return the path from the root of a mount to a group, or None if the group is elsewhere."""
    if not PurePosixPath(group).is_relative_to(root):
        return None
    path = PurePosixPath(group).relative_to(root)
    return None if ".." in path.parts else path


def _mounts(lines: list[str]) -> list[tuple[str, str, str]]:
    """Return (hierarchy, group that is its root, folder), from lines `id parent device root folder options - type ...`."""
    found = [(_UNIFIED, "/", "/sys/fs/cgroup")] if not lines else []
    for line in lines:
        place, _, system = line.partition(" - ")
        fields, (kind, _, options) = place.split(), (*system.split(), "", "", "")[:3]
        if len(fields) >= 5 and kind in ("cgroup", "cgroup2"):
            names = [_UNIFIED] if kind == "cgroup2" else options.split(",")
            found += [(name, _unescape(fields[3]), _unescape(fields[4])) for name in names if name in _HIERARCHIES]
    return found


def _unescape(path: str) -> str:
    """Return a path without the octal numbers that stand for spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []
