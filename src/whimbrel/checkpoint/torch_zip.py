"""Tensor shapes in .pt files, without torch and without running code of the pickle.

torch.save writes a zip: data.pkl pickles a state dict, and each tensor's bytes are a file. Source: torch/serialization.py.
"""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from whimbrel.errors import CheckpointError

_MAX_PICKLE: Final = 2**20


class _Shape(tuple[int, ...]):
    """Shape of a tensor, in place of the tensor."""


def _tensor(_storage: object, _offset: object, shape: tuple[int, ...], *_: object) -> _Shape:
    return _Shape(shape)


def _parameter(tensor: object, *_: object) -> object:
    return tensor


_KNOWN: Final[Mapping[tuple[str, str], Callable[..., object]]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}


class _Unpickler(pickle.Unpickler):
    """Unpickles tensors and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return name
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: object) -> object:
        return None


def tensor_shapes(path: Path, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by name. Errors call the file `name`. Raises CheckpointError."""
    try:
        with zipfile.ZipFile(path) as file:
            inner = next(each for each in file.infolist() if each.filename.endswith("/data.pkl"))
            if inner.file_size > _MAX_PICKLE:
                raise pickle.UnpicklingError("too large")
            with file.open(inner) as data:
                loaded: object = _Unpickler(data).load()
    except Exception:  # a broken pickle raises nearly anything
        raise CheckpointError("is no pickle of tensors by name, as torch.save writes it since 1.6.", file=name) from None
    if not isinstance(loaded, dict):
        raise CheckpointError("holds something else than tensors by name.", file=name)
    items = cast(dict[object, object], loaded).items()
    return {str(key): value for key, value in items if isinstance(value, _Shape)}
