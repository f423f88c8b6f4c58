"""Pickled weights as safetensors: the process that reads them. `checkpoint/convert.py` starts it.

    python -m whimbrel.model.unpickle PARENT FOLDER OUT FILE NEW [FILE NEW]...

It has no network where the system lets it give that up, and ends with the process PARENT that started it. It loads pickles with
`weights_only=True`, which makes tensors and runs nothing. Each FILE of FOLDER is written to OUT as NEW, a file of safetensors
with the same tensors and bits. It prints one line of JSON: the names of the tensors of each file, or the error.
"""

import ctypes
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_PDEATHSIG: Final = 1
_DTYPES: Final = frozenset("float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split())


class Unfit(Exception):
    """A file holds something else than tensors by name."""


def leave_network() -> bool:
    """Give up the network, by a namespace of this process's own. Return whether the system allowed it."""
    try:
        unshare = ctypes.CDLL(None, use_errno=True).unshare
    except (AttributeError, OSError):  # no Linux
        return False
    return unshare(_CLONE_NEWNET) == 0 or unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent ends, where it can. To be called after the last change of rights."""
    with suppress(AttributeError, OSError):  # no Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        sys.exit(1)


def read_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a pickle by name, each with memory of its own. Raises Unfit and MemoryError."""
    import torch

    from whimbrel.model.ops.memory import is_out_of_memory

    try:
        loaded: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises nearly anything
        if is_out_of_memory(error):
            raise MemoryError from None
        raise Unfit(f"cannot be read as tensors alone, and nothing else is loaded: {_reason(error)}") from None
    if not isinstance(loaded, Mapping) or not loaded:
        raise Unfit("holds something else than tensors by name.")
    tensors: dict[str, Any] = {}
    for name, tensor in cast(Mapping[object, object], loaded).items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise Unfit(f"{str(name)[:100]!r} is {type(tensor).__name__}, no tensor by name.")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise Unfit(f"{name!r} is no plain tensor: {tensor.layout}, {tensor.dtype}, {tensor.device}.")
        if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
            raise Unfit(f"{name!r} has dtype {tensor.dtype}; known are {', '.join(sorted(_DTYPES))}.")
        if tensor.is_floating_point() and torch.isnan(tensor).any():
            raise Unfit(f"{name!r} has values that are no numbers (NaN).")
        tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensors


def _reason(error: Exception) -> str:
    """Return the reason why torch cannot read a pickle. Its own words advise to load it in a way that runs code."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    return (
        "it is damaged, or no file of torch.save." if named is None else f"it names {named[1]}, which is no part of a tensor."
    )


def main(parent: str, folder: str, out: str, *files: str) -> int:
    leave_network()  # before any library starts a thread, with which it could not
    end_with_parent(int(parent))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file = ""
    try:
        from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

        found: dict[str, list[str]] = {}
        for file, new in zip(files[::2], files[1::2], strict=True):
            tensors = read_tensors(Path(folder, file))
            save_file(tensors, Path(out, new), metadata={"format": "pt"})
            found[new] = list(tensors)
    except Exception as error:  # to be told to the process that asked
        from whimbrel.model.ops.memory import is_out_of_memory

        kind = "unfit" if isinstance(error, Unfit) else "memory" if is_out_of_memory(error) else "output"
        sys.stdout.write(json.dumps({"file": file, "error": str(error) or type(error).__name__, "kind": kind}))
        return 1
    sys.stdout.write(json.dumps({"tensors": found}))
    return 0


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main(*sys.argv[1:]))
