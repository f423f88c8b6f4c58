"""Benchmarks still run. Their numbers are not looked at: timings belong in BENCHMARKS.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks/outputs.py"


def test_several_outputs() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "three outputs: one pass, three passes" in done.stdout
