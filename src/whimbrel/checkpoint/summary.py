"""Number of parameters and languages of a checkpoint, for people.

Read from the headers of the weights and the front matter of README.md. Neither affects an output, so what is missing or
cannot be read is None or empty, never an error.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Final

import msgspec

_MAX_HEADER: Final = 100_000_000
_NAME: Final = re.compile(r"[A-Za-z]{2,3}(?:-[A-Za-z0-9]+)*|multilingual|code")


class _Tensor(msgspec.Struct):
    shape: list[int] = []


def count_parameters(folder: Path) -> int | None:
    """Return the number of entries of all tensors in the safetensors files of `folder`. None if there is no such file."""
    try:
        counts = [_count(path) for path in (*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors"))]
    except (OSError, msgspec.DecodeError):
        return None
    return sum(counts) if counts else None


def _count(path: Path) -> int:
    """Return the number of entries of all tensors in one file. Source: safetensors' format, 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        header = file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER))
    tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    return sum(prod(tensor.shape) for name, tensor in tensors.items() if name != "__metadata__")


def languages(folder: Path) -> list[str]:
    """Return the languages that the front matter of README.md names."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    matter = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|\Z)", text, re.DOTALL)
    entry = re.search(r"^language:[ \t]*(.*(?:\n[ \t]*-[ \t].*)*)", matter[1], re.MULTILINE) if matter else None
    if entry is None:
        return []
    words = re.split(r"[\[\],\n]|(?<![^\s])-(?=\s)", entry[1])
    return [word for word in (each.strip(" \t\r'\"") for each in words) if _NAME.fullmatch(word)]
