"""Runs the tests that depend on the processor as lesser processors would: `make test-cpus`, or python tests/cpus.py [LEVEL ...].

Each level is a child process with the switches that hold oneDNN, ATen, MKL and OpenBLAS back, as far down from this machine's
level as there are; "invented" is this machine with products whose bits depend on the number of rows (invented.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Final

from whimbrel.hardware import CPU_LEVELS
from whimbrel.ops.cpu import cpu


def _switches(onednn: str, aten: str, mkl: str, openblas: str) -> dict[str, str]:
    return {
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": aten,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "OPENBLAS_CORETYPE": openblas,
    }


LEVELS: Final = {
    "avx2": _switches("AVX2", "avx2", "AVX2", "Haswell"),
    "avx512": _switches("AVX512_CORE_VNNI", "avx512", "AVX512", "SkylakeX"),
    "avx512_bf16": _switches("AVX512_CORE_BF16", "avx512", "AVX512", "SkylakeX"),
    "amx": _switches("AVX512_CORE_AMX", "avx512", "AVX512", "SkylakeX"),
}
"""The environment that makes a greater processor one of this level."""

FILES: Final = """
    test_cpu test_row_blocks test_trials test_ops test_minilm test_maxsim test_plan test_engine test_bge_m3 test_adapters
    test_sparse test_chains test_comparison test_lanes test_finite
""".split()
CHOICE: Final = {
    "test_models": "nomic or qwen3 or modernbert or bert",
    "test_fallback": "same or half or bits",
    "test_hidden": "bits",
}
"""Of large files a part: what pytest's -k takes."""


def reachable() -> list[str]:
    """The levels that this process can imitate: this machine's own and those below."""
    top = CPU_LEVELS.index(cpu().level)
    return [level for level in LEVELS if CPU_LEVELS.index(level) <= top]


def run(level: str) -> bool:
    """Run the tests at a level. Return whether they passed."""
    tests = Path(__file__).parent
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "--no-header"]
    if level == "invented":
        pytest.append("--invented-products")
    started = perf_counter()
    code = subprocess.call([*pytest, *(str(tests / f"{name}.py") for name in FILES)], env=os.environ | LEVELS.get(level, {}))
    print(f"{level}: {'passed' if code == 0 else 'failed'} in {perf_counter() - started:.0f} s", flush=True)
    return code == 0


def main() -> None:
    """All levels that this machine can imitate, or those that are named."""
    print(f"this machine: {cpu()}", flush=True)
    levels = sys.argv[1:] or [*reachable(), "invented"]
    for level in LEVELS:
        if level not in reachable():
            print(f"{level}: skipped, this machine cannot imitate it", flush=True)
    passed = [run(level) for level in levels]
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
