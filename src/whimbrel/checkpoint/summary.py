"""Number of parameters and languages of a checkpoint, for people.

Read from the headers of the weights and the front matter of README.md. Neither affects an output, so a value that is missing
or cannot be read is None or empty, never an error.
"""

import re
from collections.abc import Sequence
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
    shapes = weight_shapes([*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")])
    return sum(prod(shape) for _, shape in shapes) if shapes else None


def weight_shapes(files: Sequence[Path]) -> list[tuple[str, list[int]]] | None:
    """Return the names and shapes of all tensors in safetensors files. None if there is no file, or one cannot be read."""
    try:
        return [row for file in files for row in read_shapes(file)] if files else None
    except (OSError, msgspec.DecodeError):
        return None


def read_shapes(path: Path) -> list[tuple[str, list[int]]]:
    """Return names and shapes of a file's tensors: 8 bytes of length, then JSON. Raises OSError and msgspec.DecodeError."""
    with path.open("rb") as file:
        header = file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER))
    tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    return [(name, tensor.shape) for name, tensor in tensors.items() if name != "__metadata__"]


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
