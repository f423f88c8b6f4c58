"""Tensors out of a checkpoint's safetensors, under the names that a family expects.

Opens model.safetensors, or the shards that model.safetensors.index.json names. Every tensor is either taken or known not
to matter; `finish` refuses the rest, so that a part of a model is never dropped silently. Pickles are not read, except
the small heads that older models ship as pytorch_model.bin, which go through `weights_only=True`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from whimbrel.errors import CheckpointError
from whimbrel.json_file import JsonFile, find_file

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLE = "pytorch_model.bin"


class Weights:
    """The tensors of one folder of a checkpoint. Use as a context manager; tensors are read when they are taken."""

    def __init__(
        self,
        folder: Path,
        *,
        path: str = "",
        prefixes: Sequence[str] = (),
        sha256: str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        """`path` is a folder in `folder`, or a .pt file of tensors there."""
        self._single_pickle = Path(path).name if path.endswith(".pt") else ""
        self._folder = folder / path if not self._single_pickle else (folder / path).parent
        self._file = path if self._single_pickle else f"{path}/{_SINGLE}" if path else _SINGLE
        self._allow_pickle = allow_pickle
        self._prefixes = prefixes
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._pickled: dict[str, Tensor] = {}
        self._open(sha256)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called `name`, with or without one of the prefixes, in float32. Raises CheckpointError."""
        full = self._full(name) or name
        if full in self._where:
            tensor = cast(Tensor, self._where[full].get_tensor(full))
        elif full in self._pickled:
            tensor = self._pickled[full]
        else:
            raise CheckpointError("this tensor is missing.", file=self._file, key=name)
        self._taken.add(full)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"has shape {list(tensor.shape)}; the config says {list(shape)}.", file=self._file, key=full)
        if not tensor.is_floating_point():
            raise CheckpointError(f"has dtype {tensor.dtype}; quantised weights are not supported.", file=self._file, key=full)
        return tensor.float()

    def has(self, name: str) -> bool:
        """Whether there is a tensor called `name`, with or without one of the prefixes."""
        return self._full(name) is not None

    def finish(self, unused: Sequence[str] = ()) -> None:
        """Refuse tensors that were not taken and match none of the patterns `unused`."""
        for name in (self._where.keys() | self._pickled.keys()) - self._taken:
            bare = [name, *(name.removeprefix(prefix) for prefix in self._prefixes)]
            if not any(re.fullmatch(pattern, each) for pattern in unused for each in bare):
                raise CheckpointError(
                    "this tensor is not known to Whimbrel, and may change the vectors.", file=self._file, key=name
                )

    def _full(self, name: str) -> str | None:
        names = [prefix + name for prefix in ("", *self._prefixes)]
        return next((each for each in names if each in self._where or each in self._pickled), None)

    def _open(self, sha256: str | None) -> None:
        for file in self._files():
            path = find_file(self._folder, file)
            if sha256 is not None:
                _check_sha256(path, sha256, file)
            try:
                handle = self._stack.enter_context(_open(path))
                self._where |= dict.fromkeys(handle.keys(), handle)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"cannot be read ({error}); is the download complete?", file=file) from None

    def _files(self) -> list[str]:
        if self._single_pickle:
            self._pickled = _unpickle(find_file(self._folder, self._single_pickle))
            return []
        if (self._folder / _SINGLE).exists():
            return [_SINGLE]
        if (self._folder / _INDEX).exists():
            return _shards(self._folder)
        pickle = self._folder / _PICKLE
        if not pickle.exists():
            raise CheckpointError(f"not found in {self._folder}.", file=self._file)
        if not self._allow_pickle:
            raise CheckpointError(
                "only pickled weights are here, which can run code when loaded; save the model again as safetensors.",
                file=_PICKLE,
            )
        self._pickled = _unpickle(find_file(self._folder, _PICKLE))
        return []


def _unpickle(path: Path) -> dict[str, Tensor]:
    try:
        loaded: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch raises many kinds, and tells how to read it unsafely
        raise CheckpointError(
            "is not a pickle of tensors and nothing else; save the model again as safetensors.", file=path.name
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in cast(dict[str, object], loaded).values()):
        raise CheckpointError("holds something else than tensors by name.", file=path.name)
    return cast(dict[str, Tensor], loaded)


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt")


def _shards(folder: Path) -> list[str]:
    names = cast(dict[str, object], JsonFile.read(folder, _INDEX).get("weight_map", dict)).values()
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{name!r} is no file of this folder.", file=_INDEX, key="weight_map")
    return sorted(cast(set[str], set(names)))


def _check_sha256(path: Path, wanted: str, name: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise CheckpointError(f"SHA-256 is {found}, must be {wanted}; the file is damaged or changed.", file=name)
