"""Rules of the kernels in C++."""

from __future__ import annotations

import re
from pathlib import Path

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
