"""CPU features that this process may use.

A feature counts only if the compute libraries use it, which `torch.cpu.get_capabilities()` ignores. An environment variable can
restrict each library:

- oneDNN (linear layers) reads ONEDNN_MAX_CPU_ISA, or its old name DNNL_MAX_CPU_ISA, when it makes its first primitive. AMX
  also needs a permission of the kernel, which a sandbox may deny.
- ATen (element-wise kernels) reads ATEN_CPU_CAPABILITY.
- OpenBLAS (numpy's products) reads OPENBLAS_CORETYPE, and MKL (torch.mm in float32) MKL_ENABLE_INSTRUCTIONS.
"""

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, Literal

import numpy as np
import torch

from whimbrel.model.fallback.prepacked import onednn_bfloat16
from whimbrel.types.hardware import CPU_LEVELS, Cpu, CpuLevel

_ISA_VARIABLES: Final = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that restrict oneDNN; the first that is set applies."""
_VARIABLES: Final = (*_ISA_VARIABLES, "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE")

_ISAS_OF_LEVELS: Final[Mapping[CpuLevel, str]] = {
    "other": "sse41 avx",
    "avx2": "avx2 avx2_vnni avx2_vnni_2",
    "avx512": "avx512_core avx512_core_vnni",
    "avx512_bf16": "avx512_core_bf16 avx512_core_fp16 avx10_1 avx10_1_512 avx10_2 avx10_2_512",
}
"""Values of the variable by the highest level of oneDNN. Those with "amx" and unknown ones do not lower `Cpu.level`.

Source: oneDNN, src/cpu/x64/cpu_isa_traits.cpp (init_max_cpu_isa)."""
_ISA_LEVELS: Final[Mapping[str, CpuLevel]] = {isa: level for level, isas in _ISAS_OF_LEVELS.items() for isa in isas.split()}

_ISA_WITHOUT_VNNI: Final = frozenset({"sse41", "avx", "avx2", "avx512_core"})
"""Values of the variable that hold VNNI back."""

_SMALL_KERNEL_CORES: Final = frozenset({"skylakex", "cooperlake", "sapphirerapids"})
"""Processors, by OpenBLAS's names, with kernels for small products."""


@cache
def cpu() -> Cpu:
    return find_cpu(torch.cpu.get_capabilities(), os.environ, onednn_bfloat16=onednn_bfloat16, permit_amx=_permit_amx)


def find_cpu(
    capabilities: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    onednn_bfloat16: Callable[[], bool],
    permit_amx: Callable[[], bool],
) -> Cpu:
    """Return the features in `capabilities` (torch.cpu.get_capabilities()) that `environ` and the kernel allow."""
    limit = next((environ[name].lower() for name in _ISA_VARIABLES if environ.get(name)), "")
    levels = _level_of(capabilities, permit_amx), _ISA_LEVELS.get(limit) or "amx"
    level = CPU_LEVELS[min(map(CPU_LEVELS.index, levels))]
    has_float16 = bool(capabilities.get("avx512_fp16"))
    bfloat16: Literal["native", "slow", "none"] = "none"
    if onednn_bfloat16():
        # In AVX-512, Intel's cores multiply bfloat16 at half the speed of float32 since Sapphire Rapids.
        is_halved = "intel" in str(capabilities.get("cpu_name")).lower() and has_float16
        bfloat16 = "native" if level == "amx" or (level == "avx512_bf16" and not is_halved) else "slow"
    return Cpu(
        name=str(capabilities.get("cpu_name") or capabilities.get("architecture") or "unknown").strip(),
        level=level,
        bfloat16=bfloat16,
        float16=has_float16 and level in ("avx512_bf16", "amx") and limit != "avx512_core_bf16",
        vnni=level != "other"
        and limit not in _ISA_WITHOUT_VNNI
        and bool(capabilities.get("avx_vnni" if level == "avx2" else "avx512_vnni")),
        vectors=torch.backends.cpu.get_cpu_capability(),
        switches=tuple(f"{name}={environ[name]}" for name in _VARIABLES if environ.get(name)),
    )


@cache
def has_small_kernels() -> bool:
    """Return whether numpy has kernels for small products, which are a fifth faster than torch.mm if one side is narrow.

    Source: OpenBLAS, kernel/x86_64/sgemm_small_kernel_permit_skylakex.c, for AVX-512.
    """
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    core = os.environ.get("OPENBLAS_CORETYPE", "").lower()
    has_avx512 = CPU_LEVELS.index(_level_of(torch.cpu.get_capabilities(), lambda: False)) >= CPU_LEVELS.index("avx512")
    return blas == "scipy-openblas" and has_avx512 and (not core or core in _SMALL_KERNEL_CORES)


def _level_of(capabilities: Mapping[str, Any], permit_amx: Callable[[], bool]) -> CpuLevel:
    def has(*names: str) -> bool:
        return all(capabilities.get(name) for name in names)

    if not has("avx2", "fma3"):
        return "other"
    if not has("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"):
        return "avx2"
    if not has("avx512_bf16"):
        return "avx512"
    return "amx" if has("amx_tile", "amx_bf16", "amx_int8") and permit_amx() else "avx512_bf16"


def _permit_amx() -> bool:
    """Return whether the kernel lets this process use tiles of AMX. Without, their first instruction ends the process."""
    init = getattr(torch.cpu, "_init_amx", None)
    return init is not None and bool(init())
