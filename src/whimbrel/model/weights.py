"""Tensors of a checkpoint's safetensors files.

Every tensor must be taken or be known as unused; `finish` rejects the rest, so a part of a model is never dropped silently.
Pickles are not read, except the small heads that older models ship, which are loaded with `weights_only=True`.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from whimbrel.checkpoint.foreign import explain_foreign
from whimbrel.checkpoint.json_file import JsonFile, find_file, is_lfs_pointer, lfs_error
from whimbrel.checkpoint.load_progress import count_bytes, expect_bytes
from whimbrel.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLE = "pytorch_model.bin"
_DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Name of a dtype in safetensors -> dtype, for those whose tensors are weights."""


class Weights(ExitStack[None]):
    """Tensors of one folder of a checkpoint, read when they are taken. A context manager, which closes the files."""

    def __init__(
        self,
        folder: Path,
        *,
        path: str = "",
        prefixes: Sequence[str] = (),
        sha256: str | None = None,
        allow_pickle: bool = False,
        single: str = _SINGLE,
        on_meta: bool = False,
    ) -> None:
        """`path` is a folder in `folder`, or a .pt file of tensors in it. `single` is the file name if there are no shards.

        `on_meta`: give tensors of the device "meta", which have a shape and no values. Only headers are read.
        """
        super().__init__()
        self._folder = folder
        self._path = path
        self._allow_pickle = allow_pickle
        self._prefixes = prefixes
        self._on_meta = on_meta
        self._handle_of: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._pickled: dict[str, Tensor] = {}
        self._file_of: dict[str, str] = {}
        self._unread_bytes = 0
        """Size of the opened files, until the first tensor is read."""
        self.file: str = path if path.endswith(".pt") else self._path_of(single)
        try:
            self._open(sha256)
        except BaseException:
            self.close()
            raise

    def take(self, name: str, *shape: int, device: torch.device | None = None) -> Tensor:
        """Return the tensor called `name`, with or without a prefix, in float32. Raises CheckpointError.

        With `device` it is there, where it goes as it is stored, so that a GPU converts and checks it.
        """
        tensor = self.stored(name) if device is None else self.stored(name).to(device)
        return self._check(self._require(name), tensor, tensor.shape, shape)

    def take_rows(self, name: str, rows: Sequence[int], *shape: int) -> Tensor:
        """Return rows of a matrix that is in no pickle, in float32, without reading the others. Raises CheckpointError."""
        full = self._require(name)
        part: Any = self._handle_of[full].get_slice(full)
        found = torch.cat([cast(Tensor, part[row : row + 1]) for row in rows])
        return self._check(full, found.to("meta") if self._on_meta else found, part.get_shape(), shape)

    def _require(self, name: str) -> str:
        full = self._find_name(name)
        if full is None:
            raise CheckpointError("this tensor is missing.", file=self.file, key=name)
        return full

    def _check(self, full: str, tensor: Tensor, stored_shape: Sequence[int], shape: Sequence[int]) -> Tensor:
        file = self._file_of[full]
        self._taken.add(full)
        if tuple(stored_shape) != tuple(shape):
            raise CheckpointError(f"has shape {list(stored_shape)}; the config says {list(shape)}.", file=file, key=full)
        if not tensor.is_floating_point():
            raise CheckpointError(f"has dtype {tensor.dtype}; quantised weights are not supported.", file=file, key=full)
        tensor = tensor.float()
        if tensor.is_meta:
            return tensor
        if not tensor.sum().isfinite() and not tensor.isfinite().all():  # the sum is cheap and rarely overflows
            raise CheckpointError("holds NaN or infinity.", file=file, key=full)
        return tensor

    def stored(self, name: str) -> Tensor:
        """Return the tensor called `name` as it is stored, with any shape and dtype. Raises CheckpointError."""
        full = self._require(name)
        self._taken.add(full)
        return self._read(full)

    def error(self, message: str, name: str) -> CheckpointError:
        """Return the error of the tensor called `name`, which exists."""
        full = self._require(name)
        return CheckpointError(message, file=self._file_of[full], key=full)

    def has(self, name: str) -> bool:
        return self._find_name(name) is not None

    def beside(self, path: str, file: str, prefixes: Sequence[str]) -> Weights:
        """Open a file in a subfolder, which is closed together with this one."""
        return self.enter_context(
            Weights(self._folder, path=self._path_of(path), prefixes=prefixes, single=file, on_meta=self._on_meta)
        )

    def was_taken(self, name: str) -> bool:
        return self._find_name(name) in self._taken

    def finish(self, unused: Sequence[str] = ()) -> list[str]:
        """Raise CheckpointError for tensors that were not taken and match no pattern of `unused`.

        Returns the names of those that match, with and without prefixes.
        """
        left: list[str] = []
        for name in self._file_of.keys() - self._taken:
            bare = [name, *(name.removeprefix(prefix) for prefix in self._prefixes)]
            if not any(re.fullmatch(pattern, each) for pattern in unused for each in bare):
                raise CheckpointError(
                    "this tensor is not known to Whimbrel, and may change the vectors.", file=self._file_of[name], key=name
                )
            left += bare
        return left

    def _read(self, full: str) -> Tensor:
        if full in self._pickled:
            return self._pickled[full]
        file = self._file_of[full]
        if self._on_meta:
            part = self._handle_of[full].get_slice(full)
            dtype = _DTYPES.get(part.get_dtype(), torch.int8)
            return torch.empty(part.get_shape(), dtype=dtype, device="meta")
        try:
            tensor = cast(Tensor, self._handle_of[full].get_tensor(full))
        except (SafetensorError, OSError, MemoryError, RuntimeError) as error:  # it is mapped only now, or was changed
            raise _unreadable(error, self._folder / file, file) from None
        expect_bytes(self._unread_bytes)
        self._unread_bytes = 0
        count_bytes(tensor.nbytes)
        return tensor

    def _find_name(self, name: str) -> str | None:
        parametrized = re.sub(r"\.weight$", ".parametrizations.weight.original", name)
        # Norms in the oldest BERT checkpoints, which came from TensorFlow.
        gamma = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        names = [prefix + each for each in (name, parametrized, gamma) for prefix in ("", *self._prefixes)]
        return next((each for each in names if each in self._file_of), None)

    def _path_of(self, file: str) -> str:
        return f"{self._path}/{file}" if self._path else file

    def _open(self, sha256: str | None) -> None:
        for file in self._files():
            path = find_file(self._folder, file)
            try:
                if sha256 is not None:
                    _check_sha256(path, sha256, file)
                handle: Any = self.enter_context(cast(Any, safe_open)(path, framework="pt"))
                names = cast(list[str], handle.keys())
                self._unread_bytes += path.stat().st_size
            except (SafetensorError, OSError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError
                raise _unreadable(error, path, file) from None
            for name in names:
                if name in self._file_of:
                    raise CheckpointError(f"this tensor is in {self._file_of[name]} too.", file=file, key=name)
                self._handle_of[name], self._file_of[name] = handle, file

    def _files(self) -> list[str]:
        if self.file == self._path:
            return self._unpickle(self._path)
        if (self._folder / self.file).exists():
            return [self.file]
        index, pickle = self._path_of(_INDEX), self._path_of(_PICKLE)
        if (self._folder / index).exists():
            self.file = index
            return [self._path_of(shard) for shard in _shards(JsonFile.read(self._folder, index))]
        if not self._allow_pickle:
            raise explain_foreign(self._folder / self._path) or CheckpointError(
                f"not found in {self._folder}; a {_PICKLE} is not read, as it can run code.",
                file=self.file,
                hint="is the download complete? If the model has only pickled weights: whimbrel convert MODEL --out DIR",
            )
        return self._unpickle(pickle)

    def _unpickle(self, file: str) -> list[str]:
        if not (self._folder / file).exists():
            raise CheckpointError(f"not found in {self._folder}.", file=self.file)
        self.file, self._pickled = file, _unpickle(find_file(self._folder, file), file)
        self._file_of = dict.fromkeys(self._pickled, file)
        return []


_REMEDIES: Final[Mapping[int, str]] = {
    errno.EACCES: "allow this user to read it",
    errno.EPERM: "allow this user to read it",
    errno.ENODEV: "its file system cannot map files into memory; copy the checkpoint to a local disk",
    errno.ENOMEM: "there is no memory to map it; free some, or raise the limit of this process (ulimit -v)",
}
"""Errors of the system, by number, and what to do about them. All others mean that the file is not whole."""


def _unreadable(error: Exception, path: Path, file: str) -> CheckpointError:
    if path.is_dir():
        return CheckpointError("cannot be read: it is a folder; put the file itself there.", file=file)
    if is_lfs_pointer(path):
        return lfs_error(file)
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM if isinstance(error, MemoryError) else None
    if number is None and (stated := re.search(r"\((?:os error )?(\d+)\)", str(error))):
        number = int(stated[1])
    remedy = _REMEDIES.get(number or 0, "is the download complete?")
    reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
    return CheckpointError(f"cannot be read ({reason}); {remedy}{'' if remedy.endswith('?') else '.'}", file=file)


def _unpickle(path: Path, file: str) -> dict[str, Tensor]:
    try:
        loaded: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch raises many kinds, and tells how to read it unsafely
        raise CheckpointError(
            "is not a pickle of tensors and nothing else; save the model again as safetensors.", file=file
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in cast(dict[str, object], loaded).values()):
        raise CheckpointError("holds something else than tensors by name.", file=file)
    return cast(dict[str, Tensor], loaded)


def _shards(index: JsonFile) -> list[str]:
    names = cast(dict[str, object], index.get("weight_map", dict)).values()
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise index.error(f"{name!r} is no file of this folder.", "weight_map")
    return sorted(cast(set[str], set(names)))


def _check_sha256(path: Path, expected: str, name: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise CheckpointError(f"SHA-256 is {actual}, must be {expected}; the file is damaged or changed.", file=name)
