"""Triton kernels in the interpreter, in a process of its own, because Triton selects the interpreter when it is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

_TESTS: Final = Path(__file__).parents[1] / "model"


def interpreted(module: str, call: str) -> Any:
    """Return what a call of a function in a module of tests/model gives, as JSON."""
    triton = pytest.importorskip("triton")
    if _version(triton.__version__) < (3, 7) and _version(np.__version__) >= (2, 4):
        pytest.skip(f"the interpreter of Triton {triton.__version__} has no loops with NumPy {np.__version__}")
    imports = f"import json, sys, warnings; warnings.simplefilter('ignore'); import {module}"
    code = f"{imports}; json.dump({module}.{call}, sys.stdout)"
    env = {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": ":".join((str(_TESTS), *sys.path)),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))
