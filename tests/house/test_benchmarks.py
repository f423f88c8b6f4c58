"""Benchmarks still run. Their numbers are not looked at: timings belong in BENCHMARKS.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "row"),
    [
        ("outputs.py", "three outputs: one pass, three passes"),
        ("maxsim.py", "POST /v1/score"),
        ("wire.py", "256 texts: Whimbrel, raw"),
        ("client.py", "AsyncOpenAI, a text in a request"),
        ("prefixes.py", "in pieces of 512 tokens, over HTTP"),
    ],
)
@pytest.mark.sample(1)
def test_it_runs(script: str, row: str) -> None:
    command = [sys.executable, str(FOLDER / script), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert row in done.stdout
