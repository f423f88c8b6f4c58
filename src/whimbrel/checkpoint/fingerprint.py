"""Fingerprint of a checkpoint's files: the revision of a folder that has no commit.

Small files count whole, files of weights by their header and two samples of each tensor. Training changes a tensor nearly
everywhere, so a model that was trained further has another fingerprint, and reading costs milliseconds. Times and paths do not
count: copies of a folder have one fingerprint on all machines. A single number that is changed by hand may go unseen.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Final, TypedDict

import msgspec


class _Tensor(TypedDict):
    shape: list[int]
    data_offsets: tuple[int, int]


_SUFFIXES: Final = frozenset({".json", ".txt", ".model", ".jinja", ".metadata", ".safetensors", ".bin", ".pt"})
_WHOLE: Final = 2**25
"""Bytes up to which a file without tensors of its own counts whole."""
_SAMPLE: Final = 1024
_NUM_SAMPLES: Final = 64
"""Samples of a larger file whose parts are not known."""


def fingerprint(folder: Path, adapters: Iterable[Path] = ()) -> str:
    """Return the fingerprint of the files in a folder and in those of adapters, for example "files-5f0c2e..."."""
    digest = blake2b(digest_size=8)
    for root in (folder, *sorted(adapters)):
        for path in _files(root):
            with suppress(OSError):  # the loader names the file
                digest.update(f"\0{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
                with path.open("rb") as file:
                    for part in _parts(file, path):
                        digest.update(part)
    return f"files-{digest.hexdigest()}"


def revision_of(folder: Path, commit: str, adapters: Mapping[str, str]) -> str:
    """Return the name of a checkpoint's state: its commit, or its fingerprint; with adapters also theirs."""
    folders = [Path(each) for each in adapters.values()]
    if not commit:
        return fingerprint(folder, folders)
    return f"{commit}+{fingerprint(folders[0], folders[1:])}" if folders else commit


def weight_bytes(folder: Path, bytes_per_weight: int) -> int:
    """Return the size of all weights in a folder in a type of `bytes_per_weight`. Raises OSError."""
    total = 0
    for path in _files(folder):
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                header = _header(file, path.stat().st_size) or b""
            total += sum(prod(tensor["shape"]) for tensor in _tensors(header))
    return total * bytes_per_weight


def _files(folder: Path) -> list[Path]:
    paths = chain(folder.glob("*"), folder.glob("*/*"))
    return sorted(path for path in paths if path.suffix in _SUFFIXES and not _is_hidden(path, folder) and path.is_file())


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _parts(file: Any, path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    if path.suffix == ".safetensors" and (header := _header(file, size)) is not None:
        yield header
        yield from _samples(file, size, _places(header))
    elif size <= _WHOLE:
        yield file.read()
    else:
        yield from _samples(file, size, [size * number // _NUM_SAMPLES for number in range(_NUM_SAMPLES)])


def _header(file: Any, size: int) -> bytes | None:
    """Return the header of a file of tensors with its length, or None if it has none."""
    length = int.from_bytes(file.read(8), "little")
    file.seek(0)
    return file.read(8 + length) if 0 < length <= min(size - 8, 2**27) else None


def _places(header: bytes) -> list[int]:
    """Return the offsets of the samples: the middle and the end of each tensor. Empty for a header that cannot be read."""
    spans: list[tuple[int, int]] = [tensor["data_offsets"] for tensor in _tensors(header)]
    return [len(header) + place for start, end in spans for place in ((start + end) // 2, max(start, end - _SAMPLE))]


def _tensors(header: bytes) -> list[_Tensor]:
    """Return the descriptions of all tensors. Empty for a header that cannot be read, which the loader refuses."""
    try:
        found = msgspec.json.decode(header[8:], type=dict[str, msgspec.Raw])
        return [msgspec.json.decode(raw, type=_Tensor) for name, raw in found.items() if name != "__metadata__"]
    except ValueError:
        return []


def _samples(file: Any, size: int, places: Iterable[int]) -> Iterator[bytes]:
    for place in sorted(set(places)):
        if 0 <= place < size:
            yield os.pread(file.fileno(), _SAMPLE, place)
