"""Description of the machine and the versions, for the results of a run."""

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from whimbrel.types.machine_limits import usable_processors


def processor() -> str:
    """Return the name of the processor."""
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def describe_machine() -> str:
    """Return the number of cores and the processor."""
    cores = usable_processors()
    return f"{cores} core{'s' if cores > 1 else ''}, {processor()}"


def gpu_name() -> str:
    """Return the name of the GPU by the driver's own files, or ""."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.*)$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if found:
            return found[1].strip()
    return ""


def describe_software() -> str:
    """Return the versions of Whimbrel, Python and PyTorch."""
    parts = [f"whimbrel {_version('whimbrel')}", f"Python {platform.python_version()}"]
    if torch := _version("torch"):
        parts.append(f"torch {torch}")
    return ", ".join(parts)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
