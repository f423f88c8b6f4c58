"""Runs the tests of our own kernels with the compiler's sanitizers: `make test-native`, or python tests/support/sanitized.py [OPTION ...].

GCC compiles all libraries into build/native with AddressSanitizer and UndefinedBehaviorSanitizer, and with all warnings as errors.
An access outside of memory, and behaviour that C++ leaves undefined, end the process. Options are those of pytest.

AddressSanitizer sees memory accesses of C++, not those of masked vectors and of instructions that are written out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from whimbrel.model.native import compile as native

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "build/native"
TESTS: Final = ("tests/model/test_kernels.py", "tests/model/test_disentangled.py")
LEFT_OUT: Final = "tests/model/test_kernels.py::test_models_on_imitated_tiles"
"""Whole models on imitated tiles take many minutes here, and call nothing that the tests of single kernels do not."""

WARNINGS: Final = ("-Wall", "-Wextra", "-Werror", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
"""GCC 12 finds uninitialized variables in its own headers for AVX-512 (its bug 105593)."""

SANITIZERS: Final = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

OPTIONS: Final = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",  # Python frees nothing at its end; tests ask for too much
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def main(arguments: list[str]) -> int:
    """Run the tests in a process that has the sanitizers from its start."""
    find = ["c++", "-print-file-name=libasan.so"]
    libasan = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, __file__, "--run", *arguments]
    return subprocess.call(command, env=os.environ | OPTIONS | {"LD_PRELOAD": libasan}, cwd=ROOT)


def run(arguments: list[str]) -> int:
    """Compile the libraries, of which none may be missing, and run the tests with them."""
    del os.environ["LD_PRELOAD"]  # the compiler does without
    FOLDER.mkdir(parents=True, exist_ok=True)
    native.LIBRARIES = FOLDER
    native.FLAGS = (*native.FLAGS, *WARNINGS, *SANITIZERS)
    problem = native.compile_kernels()
    if problem is not None:
        print(problem)
        return 1
    return pytest.main(["-n", "0", "-q", "--deselect", LEFT_OUT, *TESTS, *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[2:]) if sys.argv[1:2] == ["--run"] else main(sys.argv[1:]))
