"""Run a command as if this machine's processor were a lesser one: python benchmarks/lesser_cpu.py LEVEL COMMAND ...

Libraries of the command then take the code that they have for a lesser processor: PyTorch, oneDNN, MKL, OpenBLAS, MLAS and
Whimbrel; not the C library, which looks before. The instruction that tells a processor's features, CPUID, is made to fault,
and the answer lacks what the level lacks (lesser_cpu.c). Caches, clock and memory stay those of this machine, and so does
/proc/cpuinfo. Children are held back too.

It needs a C compiler, and Linux on a processor whose CPUID can fault ("cpuid_fault" in /proc/cpuinfo).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_BITS: Final[Mapping[str, Mapping[str, int]]] = {
    "MASK_EBX": {
        "avx512f": 16, "avx512dq": 17, "avx512ifma": 21, "avx512cd": 28, "avx512bw": 30, "avx512vl": 31,
    },
    "MASK_ECX": {
        "avx512vbmi": 1, "avx512_vbmi2": 6, "avx512_vnni": 11, "avx512_bitalg": 12, "avx512_vpopcntdq": 14,
    },
    "MASK_EDX": {
        "avx512_vp2intersect": 8, "amx_bf16": 22, "avx512_fp16": 23, "amx_tile": 24, "amx_int8": 25,
    },
    "MASK_1_EAX": {
        "avx_vnni": 4, "avx512_bf16": 5, "amx_fp16": 21, "avx_ifma": 23,
    },
}  # fmt: skip
"""Bits by which CPUID tells of features, by the variable that hides them. Source: Intel's manual, volume 2, CPUID, leaf 7."""

_AMX: Final = {"amx_bf16", "amx_tile", "amx_int8", "amx_fp16"}
_AVX512: Final = {name for bits in _BITS.values() for name in bits if name.startswith("avx512")}

LEVELS: Final[Mapping[str, tuple[str, set[str]]]] = {
    "avx2": ("avx2", _AMX | _AVX512 | {"avx_vnni", "avx_ifma"}),
    "avx2_vnni": ("avx_vnni", _AMX | _AVX512 | {"avx_ifma"}),
    "avx512": ("avx512f", _AMX | {"avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "avx_ifma"}),
    "avx512_vnni": ("avx512_vnni", _AMX | {"avx512_bf16", "avx512_fp16", "avx_vnni", "avx_ifma"}),
    "avx512_bf16": ("avx512_bf16", _AMX | {"avx512_fp16", "avx_vnni", "avx_ifma"}),
}
"""The feature without which a processor is below the level, by its name in /proc/cpuinfo, and those that the level hides."""


def masks(hidden: set[str]) -> dict[str, str]:
    """Return the variables for lesser_cpu.c."""
    return {variable: f"{sum(1 << bits[name] for name in hidden & bits.keys()):x}" for variable, bits in _BITS.items()}


def run(level: str, command: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises CalledProcessError if the C file cannot be compiled."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "lesser_cpu.so"
        source = Path(__file__).with_suffix(".c")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-Wall", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        preloads = ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), str(library)])
        environment = os.environ | masks(LEVELS[level][1]) | {"LD_PRELOAD": preloads}
        code = subprocess.run(command, env=environment, check=False).returncode
        return code if code >= 0 else 128 - code  # as shells tell of a signal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", choices=list(LEVELS))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("say which command to run")
    if missing := {"cpuid_fault", LEVELS[args.level][0]} - set(Path("/proc/cpuinfo").read_text().split()):
        parser.error(f"this processor lacks {', '.join(sorted(missing))}")
    sys.exit(run(args.level, args.command))


if __name__ == "__main__":
    main()
