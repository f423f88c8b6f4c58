"""Limits of the machine: trees of files as the kernel writes them, and real control groups where the test may make them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from whimbrel.cli import serve_options
from whimbrel.types import machine_limits
from whimbrel.types.machine_limits import Limit, MachineLimits, expects_gpu, read_limits

PROCESSORS = len(os.sched_getaffinity(0))
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
HALF, QUARTER = MEMORY // 2, MEMORY // 4
UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
VERSION_1 = """31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro
32 31 0:29 {cpu} /sys/fs/cgroup/cpu,cpuacct rw shared:9 master:2 - cgroup cgroup rw,cpu,cpuacct
33 31 0:32 {memory} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"""
UNLIMITED = str(2**63 - 4096)

Tree = Callable[..., MachineLimits]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Read the limits of a tree: the groups of the process, the mounts, and files below /sys/fs/cgroup."""

    def read(own: str | None, mounts: str | None, **files: str) -> MachineLimits:
        for path, text in {"proc/self/cgroup": own, "proc/self/mountinfo": mounts}.items():
            if text is not None:
                write(tmp_path / path, text)
        for path, text in files.items():
            write(tmp_path / "sys/fs/cgroup" / path, text)
        return read_limits(tmp_path)

    return read


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode("utf-8", "surrogateescape"))


def quota(cores: float, period: int = 100_000) -> str:
    return f"{int(cores * period)} {period}\n"


def values(limits: MachineLimits) -> tuple[float | None, float | None]:
    return limits.quota and limits.quota.value, limits.memory_limit and limits.memory_limit.value


def test_the_least_limit_of_all_groups_of_version_2_holds(tree: Tree) -> None:
    """A unit of systemd (CPUQuota, MemoryMax) in a slice with limits of its own."""
    unit = "0::/system.slice/whimbrel.service\n"
    assert values(tree(unit, UNIFIED)) == (None, None)
    own = {"system.slice/whimbrel.service/cpu.max": quota(0.5), "system.slice/whimbrel.service/memory.max": "max\n"}
    limits = tree(unit, UNIFIED, **own, **{"system.slice/cpu.max": "max 100000\n", "system.slice/memory.max": f"{HALF}\n"})
    assert values(limits) == (0.5, HALF)
    assert limits.quota is not None
    assert limits.quota.file.endswith("/sys/fs/cgroup/system.slice/whimbrel.service/cpu.max")
    assert limits.usable_cores == limits.usable_processors == 1
    assert limits.usable_memory == HALF
    assert values(tree(unit, UNIFIED, **{"system.slice/cpu.max": quota(0.25)})) == (0.25, HALF)
    assert values(tree(unit, UNIFIED, **{"system.slice/whimbrel.service/memory.high": f"{QUARTER}\n"})) == (0.25, QUARTER)


def test_version_1_and_both_versions_side_by_side(tree: Tree) -> None:
    own = "11:cpu,cpuacct:/a/b\n5:name=systemd:/x\n4:memory:/a/b\n"
    mounts = VERSION_1.format(cpu="/", memory="/")
    files = {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"}
    files |= {"memory/memory.limit_in_bytes": UNLIMITED, "memory/a/b/memory.limit_in_bytes": f"{QUARTER}\n"}
    assert values(tree(own, mounts, **files)) == (None, QUARTER)
    files = {"cpu,cpuacct/a/cpu.cfs_quota_us": "25000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "50000\n"}
    assert values(tree(own, mounts, **files)) == (0.5, QUARTER)
    both = f"{mounts}\n40 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    assert values(tree(f"{own}0::/c\n", both, **{"unified/c/memory.max": f"{QUARTER - 4096}"})) == (0.5, QUARTER - 4096)


@pytest.mark.parametrize(
    ("own", "root", "folder"),
    [
        ("/", "/", ""),  # a namespace of its own
        ("/docker/5ab", "/docker/5ab", ""),  # the host's namespace, the container's folder is mounted
        ("/docker/5ab", "/", "docker/5ab/"),  # the host's namespace and folders
        ("/docker/5ab/jobs/1", "/docker/5ab", "jobs/"),  # a group within the container
        ("/../5ab", "/..", "5ab/"),  # moved to a group beside that of the namespace
        ("/", "/../..", ""),  # mounted before the namespace was made
        ("/../5ab", "/", ""),
        ("/docker/other", "/docker/5ab", ""),
        ("/gone (deleted)", "/", ""),
    ],
)
def test_containers(own: str, root: str, folder: str, tree: Tree) -> None:
    unified = UNIFIED.replace(" / ", f" {root} ", 1)
    assert values(tree(f"0::{own}\n", unified, **{f"{folder}cpu.max": quota(0.5)})) == (0.5, None)
    version_1 = VERSION_1.format(cpu="/", memory=root)
    limits = tree(f"7:memory:{own}", version_1, **{f"memory/{folder}memory.limit_in_bytes": f"{HALF}"})
    assert values(limits) == (None, HALF)


def test_the_folder_of_another_group_does_not_count(tree: Tree) -> None:
    mounts = f"{UNIFIED}\n50 23 0:26 /docker/other /sys/fs/cgroup/elsewhere rw - cgroup2 cgroup2 rw"
    assert values(tree("0::/docker/5ab\n", mounts, **{"elsewhere/cpu.max": quota(0.1)})) == (None, None)


def test_names_with_spaces(tree: Tree) -> None:
    mounts = r"30 23 0:26 / /sys/fs/cgroup/of\040mine rw - cgroup2 cgroup2 rw"
    assert values(tree("0::/a b:c\n", mounts, **{"of mine/a b:c/memory.max": f"{HALF}"})) == (None, HALF)


def test_without_proc_the_usual_folder_is_read(tree: Tree) -> None:
    assert values(tree(None, None, **{"cpu.max": quota(0.5), "memory.max": f"{HALF}"})) == (0.5, HALF)


BAD = ("", "max", "max max", "-1", "0", "0 0", "5 0", "0 100000", "-5 100000", "nan 1", "1e3 1", "x y", "1 2 3", "9" * 5000,
       f"{'9' * 400} 1", "\0", "\udcff\udcfe", "１２ ３ ４", UNLIMITED)  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_files_that_hold_no_number_limit_nothing(text: str, tree: Tree) -> None:
    names = ("cpu.max", "memory.max", "memory.high", "cpu,cpuacct/cpu.cfs_quota_us")
    period = text if text == "0" else "100000"
    mounts = f"{UNIFIED}\n{VERSION_1.format(cpu='/', memory='/')}"
    limits = tree(
        "0::/\n",
        mounts,
        **dict.fromkeys((*names, "memory/memory.limit_in_bytes"), text),
        **{"cpu,cpuacct/cpu.cfs_period_us": period},
    )
    assert values(limits) == (None, None)
    assert (limits.usable_processors, limits.usable_memory) == (PROCESSORS, MEMORY)


@pytest.mark.parametrize("own", ["", "\n\n", "0", "0:", "0::", "x:y:z:w", ":::", "0::a\n0::/b", "\udcff", "0::/" + "a/" * 5000])
@pytest.mark.parametrize(
    "mounts", ["", "- -", " - cgroup2", f"{UNIFIED[:20]} - cgroup2 a b", "1 2 3 / \\000 - cgroup2 a b", "\udcff"]
)
def test_lists_of_groups_and_mounts_that_make_no_sense(own: str, mounts: str, tree: Tree) -> None:
    assert values(tree(own, mounts)) == (None, None)


def test_a_folder_in_place_of_a_file(tmp_path: Path, tree: Tree) -> None:
    for name in ("cpu.max", "memory.max"):
        (tmp_path / "sys/fs/cgroup" / name).mkdir(parents=True)
    assert values(tree("0::/\n", UNIFIED)) == (None, None)


def test_limits_above_the_machine_are_none(tree: Tree) -> None:
    assert values(tree("0::/\n", UNIFIED, **{"cpu.max": quota(PROCESSORS), "memory.max": str(MEMORY)})) == (None, None)


@pytest.mark.parametrize(
    ("processors", "cores", "quota", "usable_processors", "usable_cores"),
    [(8, 4, None, 8, 4), (8, 8, 2.5, 3, 3), (8, 8, 1.4, 1, 1), (8, 8, 0.05, 1, 1), (8, 4, 6.0, 6, 4), (64, 32, 7.5, 8, 8), (1, 1, None, 1, 1)],
)  # fmt: skip
def test_fractions_of_a_core(
    processors: int, cores: int, quota: float | None, usable_processors: int, usable_cores: int
) -> None:
    limits = MachineLimits(processors, cores, 0, None if quota is None else Limit(quota, "cpu.max"))
    assert (limits.usable_processors, limits.usable_cores) == (usable_processors, usable_cores)


@pytest.mark.parametrize(("processors", "workers"), [(1, 1), (15, 1), (16, 2), (31, 3), (64, 4)])
def test_default_number_of_workers(processors: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_options, "usable_processors", lambda: processors)
    assert serve_options.choose_workers("cpu") == workers


@pytest.mark.parametrize(("processors", "workers"), [(1, 1), (4, 2), (16, 8), (64, 16)])
def test_default_number_of_workers_beside_a_gpu(processors: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine leaves the processors to those who tokenize and encode."""
    monkeypatch.setattr(serve_options, "usable_processors", lambda: processors)
    assert serve_options.choose_workers("cuda:1") == workers


DRIVER = ["proc/driver/nvidia/version", "dev/nvidiactl"]


@pytest.mark.parametrize(
    ("files", "device", "visible", "build", "expected"),
    [
        (DRIVER, "auto", None, "2.11.0", True),
        (DRIVER, "auto", None, "2.11.0+cu130", True),
        (DRIVER, "auto", None, "2.13.0+cpu", False),
        (DRIVER, "auto", "", "2.11.0", False),
        (DRIVER, "cpu", None, "2.11.0", False),
        (DRIVER[:1], "auto", None, "2.11.0", False),  # a container that was given none
        ([], "auto", "0", "2.11.0", False),
        ([], "cuda", None, "2.11.0", True),
    ],
)
def test_a_gpu_is_expected(
    files: list[str],
    device: str,
    visible: str | None,
    build: str,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files of its driver tell, and PyTorch's version, as the supervisor does not import PyTorch."""
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()

    def version(name: str) -> str:
        return build

    monkeypatch.setattr(machine_limits, "version", version)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert expects_gpu(device, tmp_path) == expected


def test_hyper_threads_of_one_core_count_once(tree: Tree) -> None:
    files = {
        f"../../devices/system/cpu/cpu{number}/topology/thread_siblings_list": "0-1\n" for number in os.sched_getaffinity(0)
    }
    assert tree("0::/\n", UNIFIED, **files).usable_cores == 1
    assert tree("0::/\n", UNIFIED, **files).usable_processors == PROCESSORS


def test_affinity() -> None:
    first = min(os.sched_getaffinity(0))
    script = f"import os; os.sched_setaffinity(0, [{first}]); from whimbrel.types.machine_limits import *; print(usable_processors())"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout == "1\n"


SAYS = """
import sys
for path in sys.argv[1:]:
    open(path + "/cgroup.procs", "w").write("0")
from whimbrel.cli.doctor import collect
from whimbrel.model.runner import probe
from whimbrel.types.machine_limits import read_limits, usable_memory, usable_processors
limits, facts, hardware = read_limits(), collect(), probe()
print(limits.quota and limits.quota.value, usable_processors(), hardware.num_cores, facts.core_quota)
print(usable_memory(), hardware.memory, facts.memory_limit)
"""


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """Real groups, a group within a group: one of version 2, or one for cores and one for memory."""
    for folders in (["/sys/fs/cgroup"], ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/memory"]):
        made = [Path(folder) / f"whimbrel-{uuid4().hex}" for folder in folders]
        try:
            for each in made:
                (each / "inner").mkdir(parents=True)
            if _limit_groups(made):
                yield [each / "inner" for each in made]
                return
        except OSError:  # no such hierarchy, or not allowed
            continue
        finally:
            for each in made:
                for folder in (each / "inner", each):
                    with suppress(OSError):
                        folder.rmdir()
    pytest.skip("this process may not make control groups")


def _limit_groups(made: list[Path]) -> bool:
    """Give the outer groups half of a core and a half of the memory. Return whether they take it."""
    cpu, memory = made[0], made[-1]
    if (cpu / "cpu.max").exists() and (memory / "memory.max").exists():
        (cpu / "cpu.max").write_text("50000 100000")
        (memory / "memory.max").write_text(str(HALF // 4096 * 4096))
    elif (cpu / "cpu.cfs_quota_us").exists() and (memory / "memory.limit_in_bytes").exists():
        (cpu / "cpu.cfs_quota_us").write_text("50000")
        (memory / "memory.limit_in_bytes").write_text(str(HALF // 4096 * 4096))
    else:
        return False
    return True


def test_real_groups_limit_engines_workers_and_doctor_alike(groups: list[Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAYS, *map(str, groups)], capture_output=True, check=False, text=True, timeout=100
    )
    half = HALF // 4096 * 4096
    assert done.stdout.splitlines() == ["0.5 1 1 0.5", f"{half} {half} {half}"], done.stderr
