"""Triton kernels compiled for a GPU, without one: their PTX, and the registers that did not suffice."""

# Triton has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@dataclass(frozen=True)
class Compiled:
    ptx: str
    spilled_bytes: int


def skip_without_interpreter() -> None:
    """Skip a test that runs kernels in Triton's interpreter, where that is missing or fails in every loop over a loaded bound."""
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9) and np.lib.NumpyVersion(np.__version__) >= "2.5.0":
        pytest.skip(f"the interpreter of Triton {triton.__version__} fails with NumPy {np.__version__}")


def compile_for(
    capability: int,
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    **options: int,
) -> Compiled:
    """Compile a kernel as Triton does for arguments that 16 divides.

    `capability` is 80 or 90. `pointers` names the dtype behind each pointer; other arguments are int32. `options` are those of a
    launch.
    """
    pytest.importorskip("triton")
    from triton import compiler
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas

    names = [each.name for each in kernel.params]
    types = {name: f"*{dtype}" for name, dtype in pointers.items()} | dict.fromkeys(constants, "constexpr")
    aligned = [i for i, each in enumerate(kernel.params) if each.name not in constants and not each.do_not_specialize]
    source = compiler.ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is; a later Triton asks for the choice
    ptx: str = compiler.compile(source, GPUTarget("cuda", capability, 32), options).asm["ptx"]
    (folder / "kernel.ptx").write_text(ptx)
    # Features of 9.0 alone, as wgmma is, have a name of their own.
    target = f"--gpu-name=sm_{capability}{'a' if capability == 90 else ''}"
    command = [get_ptxas(capability).path, "-v", target, str(folder / "kernel.ptx"), "-o", str(folder / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Compiled(ptx, sum(map(int, re.findall(r"(\d+) bytes spill", report))))
