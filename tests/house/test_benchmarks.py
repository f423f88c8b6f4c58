"""Benchmarks still run. Their numbers are not looked at: timings belong in BENCHMARKS.md."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = Path("/proc/cpuinfo")


def test_it_runs() -> None:
    command = [sys.executable, str(FOLDER / "engine.py"), "--models", "minilm", "--tokens", "32", "--rounds", "1", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "one text of 32 tokens at a time, 8 threads; 256 at a time" in done.stdout


@pytest.mark.skipif(
    not CPU.exists() or "cpuid_fault" not in CPU.read_text() or shutil.which("cc") is None,
    reason="needs a processor whose CPUID can fault, and a C compiler",
)
def test_libraries_see_a_lesser_processor() -> None:
    """A child sees it too, and a fault that is not CPUID's still ends a program."""
    program = """if True:
        import ctypes, subprocess, sys, torch
        has = torch.cpu.get_capabilities()
        print(has["avx2"], has["avx512_f"], has["avx512_bf16"], torch.backends.cpu.get_cpu_capability())
        child = subprocess.run([sys.executable, "-c", "import torch; print(torch.cpu._is_avx512_supported())"], text=True, stdout=-1)
        print(child.stdout.strip(), flush=True)
        ctypes.string_at(0)"""
    command = [sys.executable, str(FOLDER / "lesser_cpu.py"), "avx2", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split() == ["True", "False", "False", "AVX2", "False"], done.stderr
    assert done.returncode == 128 + 11
