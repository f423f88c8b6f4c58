"""GPUs of this machine: those that PyTorch can use, and why it cannot use the others."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from whimbrel.types.hardware import Gpu

_DRIVER = Path("/proc/driver/nvidia/version")
_BFLOAT16 = (8, 0)
"""Compute capability from which on tensor cores take bfloat16."""


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that PyTorch can use, and a reason why it cannot use others or any; empty if it uses all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            is_available, problem = torch.cuda.is_available(), ""
        except RuntimeError as error:
            is_available, problem = False, str(error)
    if not is_available:
        return (), _why_none([*(str(each.message) for each in caught), problem])
    found = [_describe(number) for number in range(torch.cuda.device_count())]
    too_old = [reason for _, reason in found if reason]
    return tuple(gpu for gpu, reason in found if not reason), "; ".join(too_old)


def _describe(number: int) -> tuple[Gpu, str]:
    """Return a GPU, and the reason why PyTorch cannot use it, or nothing."""
    name, properties = f"cuda:{number}", cast(Any, torch.cuda).get_device_properties(number)
    capability = (int(properties.major), int(properties.minor))
    gpu = Gpu(name, int(properties.total_memory), bfloat16=capability >= _BFLOAT16)
    built_for = torch.cuda.get_arch_list()
    if is_built_for(capability, built_for):
        return gpu, ""
    kind = f"{properties.name} of compute capability {'.'.join(map(str, capability))}"
    return gpu, f"{name}, {kind}, is none of those that PyTorch was built for: {' '.join(built_for)}"


def is_built_for(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Return whether code for these architectures runs on a GPU: sm_86 on 8.6 to 8.9, compute_90 on 9.0 and all later ones."""
    if not any(each.startswith("sm_") for each in built_for):
        return True  # another maker's, or not known
    number = 10 * capability[0] + capability[1]
    kinds = [(kind, int(digits)) for kind, digits in re.findall(r"(sm|compute)_(\d+)", " ".join(built_for))]
    return any(each <= number and (kind == "compute" or each // 10 == capability[0]) for kind, each in kinds)


def has_driver() -> bool:
    """Return whether there is NVIDIA's driver, and so most likely a GPU."""
    return _DRIVER.exists()


def _why_none(said: Sequence[str]) -> str:
    version = str(torch.__version__)
    if torch.version.cuda is None and torch.version.hip is None:
        return f"PyTorch {version} was built without CUDA"
    text = " ".join(said)
    if "driver" in text and "too old" in text:
        found = re.search(r"found version (\d+)", text)
        takes = f"takes CUDA up to {int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else "is older"
        return f"the driver {takes}, PyTorch {version} wants {torch.version.cuda}"
    if not has_driver():
        return "there is no NVIDIA driver"
    first = text.strip().partition(". ")[0].splitlines()[:1]
    return f"CUDA finds no GPU ({first[0]})" if first else "CUDA finds no GPU; CUDA_VISIBLE_DEVICES may hide it"
