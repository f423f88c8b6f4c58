"""Facts of the machine: versions, card, driver, compiler; the bandwidth of copies, and the peak of matrix products."""

import re
import shutil
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from common import commit
from setting import Row, Setting
from timing import bandwidth, microseconds

from whimbrel.model.ops.peak import measure_peak
from whimbrel_bench.machine import describe_machine, describe_software

_PACKAGES = ("triton", "transformers", "sentence-transformers", "numpy", "typer", "uvloop")


def run(_: str, setting: Setting) -> Iterator[Row]:
    device = setting.device
    facts = {
        "commit": commit(),
        "machine": describe_machine(),
        "software": describe_software(),
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "compiler": f"{shutil.which('cc') or 'none'}; {'has' if _has_headers() else 'no'} Python.h",
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        free, total = (amount / 2**30 for amount in torch.cuda.mem_get_info(device))
        driver = Path("/proc/driver/nvidia/version")
        facts["card"] = (
            f"{properties.name}, {properties.multi_processor_count} processors, sm_{properties.major}{properties.minor}"
        )
        facts["memory"] = f"{free:.1f} of {total:.1f} GiB free"
        facts["driver"] = " ".join(re.findall(r"\d+\.[\d.]+", driver.read_text())[:1]) if driver.exists() else "unknown"
        facts["CUDA"] = str(torch.version.cuda)
    yield from ({"fact": name, "value": value} for name, value in facts.items())
    yield {"fact": "copies on the device, GB/s read and written", "value": bandwidth(device, small=setting.small) / 1e9}
    if device != "cpu":
        block = torch.empty(2**28, dtype=torch.uint8).pin_memory()
        there = block.to(device)
        for name, target, source in (("to", there, block), ("from", block, there)):
            took = microseconds(lambda target=target, source=source: target.copy_(source, non_blocking=True), device, times=5)
            yield {"fact": f"copies {name} the device, GB/s", "value": block.numel() / took / 1e3}
    for library in ("default",) if device == "cpu" else ("cublas", "cublaslt"):
        if device != "cpu":
            torch.backends.cuda.preferred_blas_library(library)
        peak = measure_peak(setting.dtype, device, 1, seconds=0.05 if setting.small else 0.3)
        yield {"fact": f"products in {setting.dtype}, {library}, TFLOP/s", "value": peak / 1e12}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _has_headers() -> bool:
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
