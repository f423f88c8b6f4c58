"""Rules of the kernels in C++."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sanitized import WARNINGS
from whimbrel.model.native.compile import FLAGS, INSTRUCTION_SETS

NATIVE = Path(__file__).parents[2] / "src/whimbrel/model/native"
FILES = sorted(each for each in NATIVE.iterdir() if each.suffix in (".h", ".cpp"))
OF_A_PROCESSOR = re.compile(r"_mm|__m\d|_tile_|__AVX|\basm\b|immintrin|^ *# *(el)?if")


def test_only_backends_know_the_processor() -> None:
    """Intrinsics, assembly and conditions on an instruction set: a backend more is one file more."""
    backends = {each for each in FILES if each.name == "amx.h" or each.name.startswith("backend_")}
    assert len(backends) == 4
    found = {each: [line for line in each.read_text().splitlines() if OF_A_PROCESSOR.search(line)] for each in FILES}
    assert all(found[each] for each in backends)
    assert not {each.name: lines for each, lines in found.items() if lines and each not in backends}


def test_lines_are_at_most_120_columns() -> None:
    assert not [f"{each.name}: {line}" for each in FILES for line in each.read_text().splitlines() if len(line) > 120]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_the_compiler_has_no_warnings(name: str) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    flags = (*FLAGS, *WARNINGS, *INSTRUCTION_SETS[name], "-DSOURCES=0u", "-fsyntax-only")
    done = subprocess.run(["c++", *flags, str(NATIVE / "kernels.cpp")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
