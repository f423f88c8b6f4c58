"""Triton kernels compiled for a GPU without one, as the package launches them: the assembly, and the resources of a thread.

A test puts `Launches` in a kernel's place and calls the function that launches it, with tensors of a CPU. So types, constants,
alignment and sizes of blocks are those of the package, and not repeated in a test.
"""

# Triton has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor

POINTERS: Final = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip
MAX_SHARED: Final = {80: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a block may have, by compute capability; of 8.x the least."""


@dataclass(frozen=True, slots=True)
class Compiled:
    ptx: str
    shared: int
    """Bytes of shared memory of a block."""
    registers: int
    spills: int
    """Bytes that a thread stores for want of registers."""

    def count(self, instruction: str) -> int:
        """Return how often the assembly has an instruction; a star stands for its modifiers."""
        return len(re.findall(re.escape(instruction).replace(r"\*", r"[\w.:]*"), self.ptx))

    @property
    def accesses(self) -> set[str]:
        """The kinds of loads from global memory into registers and of stores, as "ld 16" or "st 2", by their bytes."""
        found = re.findall(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bfus](\d+)\s", self.ptx)
        return {f"{kind} {int(count or 1) * int(bits) // 8}" for kind, count, bits in found}

    @property
    def copies(self) -> set[int]:
        """The sizes in bytes of asynchronous copies to shared memory."""
        return {int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (0x\w+|\d+)", self.ptx)}


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    def compile(self, capability: int) -> Compiled:
        """Compile the kernel as Triton does for these arguments; `capability` is 80 or 90."""
        from triton import compiler
        from triton.backends.compiler import GPUTarget

        types, constants, aligned = dict[str, str](), dict[tuple[int], Any](), list[int]()
        for i, each in enumerate(self.kernel.params):
            kind, is_aligned = _type(value := self.arguments[each.name], each)
            types[each.name] = kind
            if kind == "constexpr":
                constants[i,] = value
            elif is_aligned:
                aligned.append(i)
        source = compiler.ASTSource(self.kernel, types, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is; a later Triton asks for the choice
            result = compiler.compile(source, GPUTarget("cuda", capability, 32), self.options)
        ptx = result.asm["ptx"]
        return Compiled(ptx, result.metadata.shared, *_resources(ptx, capability))


class Launches:
    """A kernel's place holder, which notes its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.noted: list[Launch] = []

    def __getitem__(self, _: Any) -> Any:
        return self._note

    def _note(self, *arguments: Any, **options: Any) -> None:
        names = [each.name for each in self.kernel.params]
        given = dict(zip(names, arguments, strict=False)) | {name: options.pop(name) for name in names if name in options}
        assert given.keys() == set(names)
        self.noted.append(Launch(self.kernel, given, options))


def note_launches(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Launches:
    """Put a place holder in the place of a module's kernel."""
    monkeypatch.setattr(module, name, launches := Launches(getattr(module, name)))
    return launches


def _type(value: Any, parameter: Any) -> tuple[str, bool]:
    """Return the type of an argument as Triton sees it, and whether 16 divides it."""
    if parameter.is_constexpr or value is None:
        return "constexpr", False
    if isinstance(value, Tensor):
        return POINTERS[value.dtype], value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    if parameter.do_not_specialize:
        return "i32", False
    return ("constexpr", False) if value == 1 else ("i32", value % 16 == 0)


def _resources(ptx: str, capability: int) -> tuple[int, int]:
    """Return registers of a thread, and bytes of its spills."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        target = re.findall(r"\.target (\w+)", ptx)[0]
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.findall(r"Used (\d+) registers", report)[0]), sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))
