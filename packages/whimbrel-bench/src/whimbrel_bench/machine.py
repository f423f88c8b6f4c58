"""Description of the machine and the versions, for the results of a run."""

import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from whimbrel.types.machine_limits import usable_processors
from whimbrel_bench import __version__


def processor() -> str:
    """Return the name of the processor."""
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def describe_machine() -> str:
    """Return the number of cores, the processor, and the first GPU, if any, by its driver's own files."""
    cores = usable_processors()
    parts = [f"{cores} core{'s' if cores > 1 else ''}", processor()]
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))[:1]:
        text = file.read_text(encoding="utf-8", errors="replace")
        parts += re.findall(r"^Model:\s*(.*\S)", text, re.MULTILINE)
    return ", ".join(parts)


def describe_software() -> str:
    """Return the versions of Whimbrel, Python and PyTorch."""
    parts = [f"whimbrel {__version__}", f"Python {platform.python_version()}"]
    with suppress(PackageNotFoundError):
        parts.append(f"torch {version('torch')}")
    return ", ".join(parts)
