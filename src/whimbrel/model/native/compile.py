"""Compiles the kernels, one library for each instruction set. The build calls it; it imports nothing of Whimbrel.

Only x86-64 on Linux has kernels. Without a C++ compiler nothing is compiled, and the engine uses PyTorch's operators.
"""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent

INSTRUCTION_SETS: Final = {
    "avx2": ("-march=haswell", '-DWHIMBREL_BACKEND="backend_avx2.h"'),
    "avx2_vnni": ("-march=haswell", "-mavxvnni", '-DWHIMBREL_BACKEND="backend_avx2.h"'),
    "avx512": ("-march=skylake-avx512", '-DWHIMBREL_BACKEND="backend_avx512.h"'),
    "avx512_vnni": ("-march=cascadelake", '-DWHIMBREL_BACKEND="backend_avx512.h"'),
    "avx512_bf16": ("-march=cooperlake", '-DWHIMBREL_BACKEND="backend_avx512.h"'),
    "avx512_fp16": ("-march=cooperlake", '-DWHIMBREL_BACKEND="backend_avx512_fp16.h"'),
    "amx": ("-march=cooperlake", '-DWHIMBREL_BACKEND="amx.h"'),
}
"""Name of each library, and the compiler's flags for it: the file of its backend among them. They are written for GCC 11
and Clang 14 or later."""

LIBRARIES: Final = HERE
"""Folder of the libraries."""

FLAGS: Final = (
    "-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden",
    "-static-libgcc", "-static-libstdc++", "-Wl,--exclude-libs,ALL",
)  # fmt: skip


def fingerprint() -> int:
    """Return a number that changes with the sources and flags. A library tells the one it was compiled from."""
    paths = sorted(path for path in HERE.iterdir() if path.suffix in (".cpp", ".h"))
    return zlib.crc32(b"".join(path.read_bytes() for path in paths) + repr((FLAGS, INSTRUCTION_SETS)).encode())


def library(name: str) -> Path:
    """Return the path of the library for an instruction set."""
    return LIBRARIES / f"kernels.{name}.so"


def compiled() -> list[str]:
    """Return the names of the libraries that were compiled from these sources."""
    return [name for name in INSTRUCTION_SETS if sources_of(library(name)) == fingerprint()]


def sources_of(path: Path) -> int | None:
    """Return the fingerprint that a library was compiled with, or None if it tells none."""
    try:
        sources = ctypes.CDLL(str(path)).whimbrel_sources
    except (OSError, AttributeError):
        return None
    sources.restype = ctypes.c_uint
    return sources()


def compile_kernels() -> str | None:
    """Compile the libraries that are not of these sources. Return why some or all are missing, or None."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"there are none for {sys.platform} on {platform.machine()}"
    command = os.environ.get("CXX") or next((each for each in ("c++", "g++", "clang++") if shutil.which(each)), None)
    if command is None:
        return "no C++ compiler was found"
    stamp = LIBRARIES / "kernels.stamp"
    current = f"{fingerprint()} {command}"
    if stamp.exists() and stamp.read_text() == current and all(library(name).exists() for name in INSTRUCTION_SETS):
        return None
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        made = threads.map(partial(compile_library, command), INSTRUCTION_SETS.values(), map(library, INSTRUCTION_SETS))
        problems = [f"{problem} (for {name})" for name, problem in zip(INSTRUCTION_SETS, made, strict=True) if problem]
    if not problems:
        stamp.write_text(current)
    return problems[0] if problems else None


def compile_library(command: str, flags: Sequence[str], to: Path) -> str | None:
    """Compile the kernels for an instruction set. Return why that failed, or None."""
    part = to.with_suffix(f".{os.getpid()}")
    sources = f"-DSOURCES={fingerprint()}u"
    arguments = [*shlex.split(command), *FLAGS, sources, *flags, str(HERE / "kernels.cpp"), "-o", str(part)]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode == 0:
            part.replace(to)
            return None
        part.unlink(missing_ok=True)
        to.unlink(missing_ok=True)
    except OSError as error:
        return f"{command}: {error.strerror}"
    first = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
    return f"{command} failed: {first}"
