"""Folders that hold a model in a form that Whimbrel does not read: what they hold, and what to do.

Only asked when a file that is needed is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final

from whimbrel.checkpoint.json_file import JsonFile, is_lfs_pointer, lfs_error
from whimbrel.errors import CheckpointError

_CONFIG: Final = "config.json"
_ADAPTER: Final = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of weights. The first file that matches one of `patterns` is named."""

    patterns: str
    message: str
    hint: str


_ORIGINAL: Final = "name the folder or hub id of the model from which it was made, with model.safetensors"
_FORMS: Final = (
    _Form(
        "pytorch_model.bin pytorch_model.bin.index.json pytorch_model-*.bin",
        "only pickled weights are here; pytorch_model.bin is not read, as it can run code.",
        "write them as safetensors: whimbrel convert {folder} --out DIR",
    ),
    _Form("*.gguf", "is a GGUF file, which llama.cpp and Ollama read, and Whimbrel does not.", _ORIGINAL),
    _Form(
        "*.onnx onnx/*.onnx",
        "is an ONNX file, which is not read: Whimbrel runs a model by its own code, from safetensors.",
        _ORIGINAL,
    ),
    _Form("openvino_model.xml openvino/*.xml", "is a model of OpenVINO, which is not read.", _ORIGINAL),
    _Form("model.bin *.ftz", "is a model of fastText or CTranslate2, which are not read.", _ORIGINAL),
    _Form("tf_model.h5", "are weights of TensorFlow, which are not read.", _ORIGINAL),
    _Form("flax_model*.msgpack", "are weights of Flax, which are not read.", _ORIGINAL),
)


def explain_foreign(folder: Path) -> CheckpointError | None:
    """Return the error that says what `folder` holds instead of a checkpoint's weights. None if nothing is known."""
    if is_adapter(folder):
        return _explain_adapter(folder)
    for form in _FORMS:
        for file in (path for pattern in form.patterns.split() for path in sorted(folder.glob(pattern))):
            name = file.relative_to(folder).as_posix()
            if is_lfs_pointer(file):
                return lfs_error(name)
            return CheckpointError(form.message, file=name, hint=form.hint.format(folder=quote(str(folder))))
    return None


def is_adapter(folder: Path) -> bool:
    """Return whether `folder` holds a PEFT adapter without its model, of which it may have the config.json."""
    if not (folder / _ADAPTER).exists():
        return False
    return not (folder / _CONFIG).exists() or not (has_safetensors(folder) or any(folder.glob("pytorch_model*.bin")))


def has_safetensors(folder: Path) -> bool:
    """Return whether `folder` holds weights of a model, and not only those of an adapter, as safetensors."""
    return any(not path.name.startswith("adapter_") for path in folder.glob("*.safetensors"))


def require_config(folder: Path) -> None:
    """Raise CheckpointError if there is no config.json of the model itself, which says what the folder holds instead."""
    if (folder / _CONFIG).exists():
        return
    error = CheckpointError(f"not found in {folder}; is this a checkpoint's folder?", file=_CONFIG)
    raise explain_foreign(folder) or error


def _explain_adapter(folder: Path) -> CheckpointError:
    base = JsonFile.read(folder, _ADAPTER).data.get("base_model_name_or_path")
    named = base if isinstance(base, str) and base else None
    message = f"this folder holds a PEFT adapter of {named or 'a model that it does not name'}, not a model."
    model = quote(named) if named else "MODEL"  # what a file says must not be a command where it is pasted
    hint = f"serve the model with the adapter: whimbrel serve {model} --adapter NAME={quote(str(folder))}"
    return CheckpointError(message, file=_ADAPTER, hint=hint)
