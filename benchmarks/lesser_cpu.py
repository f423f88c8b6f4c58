"""Run a command as if this machine's processor were a lesser one: python benchmarks/lesser_cpu.py LEVEL COMMAND ...

Libraries of the command then take the code that they have for a lesser processor: PyTorch, oneDNN, MKL, OpenBLAS, MLAS and
Whimbrel; not the C library, which looks before. The instruction that tells a processor's features, CPUID, is made to fault,
and the answer lacks what the level lacks (lesser_cpu.c). Caches, clock and memory stay those of this machine, and so does
/proc/cpuinfo. Children are held back too.

It needs a C compiler, and Linux on a processor whose CPUID can fault ("cpuid_fault" in /proc/cpuinfo).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_TABLE: Final[Mapping[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def run(level: str, command: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises CalledProcessError if the C file cannot be compiled."""
    hidden = set(_TABLE["levels"][level]["hides"])
    masks = {name: f"{sum(1 << bits[each] for each in hidden & bits.keys()):x}" for name, bits in _TABLE["bits"].items()}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "lesser_cpu.so"
        source = Path(__file__).with_suffix(".c")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-Wall", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        preloads = ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), str(library)])
        environment = os.environ | masks | {"LD_PRELOAD": preloads}
        code = subprocess.run(command, env=environment, check=False).returncode
        return code if code >= 0 else 128 - code  # as shells tell of a signal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", choices=list(_TABLE["levels"]))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("say which command to run")
    if missing := {"cpuid_fault", _TABLE["levels"][args.level]["needs"]} - set(Path("/proc/cpuinfo").read_text().split()):
        parser.error(f"this processor lacks {', '.join(sorted(missing))}")
    sys.exit(run(args.level, args.command))


if __name__ == "__main__":
    main()
