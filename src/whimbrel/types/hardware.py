"""Hardware description: processor features, cores and GPUs.

Plain data; `model/cpu.py`, `model/runner.py` and `types/machine_limits.py` detect the values.
"""

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

CpuLevel: TypeAlias = Literal["other", "avx2", "avx512", "avx512_bf16", "amx"]
CPU_LEVEL_NAMES: Final[dict[CpuLevel, str]] = {
    "other": "neither AVX2 nor AVX-512",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "avx512_bf16": "AVX-512 with bfloat16",
    "amx": "AMX",
}
CPU_LEVELS: Final = tuple(CPU_LEVEL_NAMES)
"""From the least to the most capable. "other" is any processor without AVX2, also one of another architecture."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processor features that this process may use."""

    name: str = "unknown"
    level: CpuLevel = "other"
    """Instruction set of linear layers (oneDNN)."""
    bfloat16: Literal["native", "slow", "none"] = "none"
    """Support for bfloat16 in oneDNN's linear layers: "slow" is exact but slower than float32."""
    float16: bool = False
    """True if the processor multiplies float16 at twice the speed of float32 (AVX512-FP16)."""
    vnni: bool = False
    """True if the processor multiplies int8 fast (VNNI)."""
    vectors: str = "DEFAULT"
    """Instruction set of PyTorch's element-wise kernels, as PyTorch names it."""
    switches: tuple[str, ...] = ()
    """Environment variables (NAME=value) that are set and restrict the instruction set of a library."""

    def __str__(self) -> str:
        switches = f"; {', '.join(self.switches)}" if self.switches else ""
        return f"{self.name} ({CPU_LEVEL_NAMES[self.level]}{switches})"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that PyTorch can use."""

    name: str
    """Its name as a device, e.g. "cuda:0"."""
    memory: int = 0
    """Bytes of its memory; 0: unknown."""
    bfloat16: bool = False


@dataclass(frozen=True, slots=True)
class Hardware:
    """Resources of the machine, as `model.runner.probe` detects them."""

    num_cores: int
    """Number of cores that this process may use (affinity and quotas)."""
    cpu: Cpu = field(default_factory=Cpu)
    kernels: str = ""
    """Instruction set of Whimbrel's own kernels, or empty where PyTorch's operators are used."""
    gpus: tuple[Gpu, ...] = ()
    gpu_note: str = ""
    """Reason why there is no GPU, or why one cannot be used; empty: all can."""
    gpu_driver: bool = False
    """True if there is a driver of GPUs, so that one is expected."""
    torch: str = "unknown"
    """Version of PyTorch."""
    torch_note: str = ""
    """Warning about that version, or empty."""
    memory: int = 0
    """Bytes of memory that this process may use; 0: unknown."""

    @property
    def fast_bfloat16(self) -> bool:
        """True if the CPU runs models in bfloat16 faster than in float32: natively, or by our kernels for float16."""
        return self.cpu.bfloat16 == "native" or (self.cpu.bfloat16 == "slow" and self.kernels.endswith("fp16"))
