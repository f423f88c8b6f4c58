"""Compilation of Triton kernels for a GPU, without one: the assembly, and the resources that the assembler reports."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton")

from triton import compiler
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas


@dataclass(frozen=True, slots=True)
class Compiled:
    ptx: str
    shared: int
    """Bytes of shared memory of a block."""
    registers: int
    spills: int
    """Bytes that a thread stores for want of registers."""

    def count(self, instruction: str) -> int:
        return len(re.findall(re.escape(instruction).replace(r"\*", r"[\w.:]*"), self.ptx))


def compiled(
    kernel: Any, arguments: Mapping[str, str], constants: Mapping[str, Any], capability: int, *, num_warps: int, num_stages: int
) -> Compiled:
    """Compile a kernel as it is launched with aligned pointers, and with integers that 16 divides where they are specialised.

    `arguments` gives the types of those that are neither constants nor i32.
    """
    names = [each.name for each in kernel.params]
    others = [each for each in kernel.params if each.name not in constants]
    aligned = [
        names.index(each.name) for each in others if arguments.get(each.name, "i32") != "fp32" and not each.do_not_specialize
    ]
    source = compiler.ASTSource(
        kernel,
        {name: "constexpr" if name in constants else arguments.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is; a later Triton asks for the choice
        result = compiler.compile(source, GPUTarget("cuda", capability, 32), options)
    ptx = result.asm["ptx"]
    return Compiled(ptx, result.metadata.shared, *_resources(ptx, capability))


def _resources(ptx: str, capability: int) -> tuple[int, int]:
    """Return registers of a thread, and bytes of its spills."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        target = re.findall(r"\.target (\w+)", ptx)[0]
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.findall(r"Used (\d+) registers", report)[0]), sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))
