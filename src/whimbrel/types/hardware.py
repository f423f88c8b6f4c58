"""The machine that a model runs on, as plain data: the processor's features, cores and GPUs.

`ops.cpu` and `runner.probe` find these facts; nothing here asks the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

CpuLevel: TypeAlias = Literal["other", "avx2", "avx512", "avx512_bf16", "amx"]
CPU_LEVELS: Final[tuple[CpuLevel, ...]] = ("other", "avx2", "avx512", "avx512_bf16", "amx")
"""From the least to the most capable. "other" is any processor without AVX2, also one of another architecture."""

CPU_LEVEL_NAMES: Final[dict[CpuLevel, str]] = {
    "other": "neither AVX2 nor AVX-512",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "avx512_bf16": "AVX-512 with bfloat16",
    "amx": "AMX",
}


@dataclass(frozen=True, slots=True)
class Cpu:
    """What this process may use of its processor."""

    name: str = "unknown"
    level: CpuLevel = "other"
    """The instructions that linear layers (oneDNN) may use."""
    bfloat16: Literal["native", "emulated", "none"] = "none"
    """Whether linear layers run in bfloat16: "emulated" is exact but slower than float32."""
    vectors: str = "DEFAULT"
    """The instructions that PyTorch's own element-wise kernels use, in PyTorch's words."""
    switches: tuple[str, ...] = ()
    """Environment variables that are set and can hold back a library, as NAME=value."""

    def __str__(self) -> str:
        """A line for people, e.g. "AMD EPYC (AVX-512 with bfloat16)"."""
        held_back = f"; {', '.join(self.switches)}" if self.switches else ""
        return f"{self.name} ({CPU_LEVEL_NAMES[self.level]}{held_back})"


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the machine has, as `runner.probe()` finds it."""

    num_cores: int
    """Cores this process may use (affinity and container quota)."""
    cpu: Cpu = field(default_factory=Cpu)
    gpus: tuple[str, ...] = ()
    gpu_bfloat16: bool = False
