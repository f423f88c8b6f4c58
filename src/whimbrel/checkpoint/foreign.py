"""Folders that hold a model in a form that Whimbrel does not read: what they hold, and what to do.

Only asked when a file that is needed is not there.
"""

from pathlib import Path
from shlex import quote
from typing import Final

from whimbrel.checkpoint.json_file import JsonFile, is_lfs_pointer, lfs_error
from whimbrel.errors import CheckpointError

_CONFIG: Final = "config.json"
_ADAPTER: Final = "adapter_config.json"
_ORIGINAL: Final = "name the folder or hub id of the model from which it was made, with model.safetensors"
_PICKLED: Final = "only pickled weights are here; pytorch_model.bin is not read, as it can run code."
_ONNX: Final = "is an ONNX file, which is not read: Whimbrel runs a model by its own code, from safetensors."
_FORMS: Final = {
    "pytorch_model.bin pytorch_model.bin.index.json pytorch_model-*.bin": _PICKLED,
    "*.gguf": "is a GGUF file, which llama.cpp and Ollama read, and Whimbrel does not.",
    "*.onnx onnx/*.onnx": _ONNX,
    "openvino_model.xml openvino/*.xml": "is a model of OpenVINO, which is not read.",
    "model.bin *.ftz": "is a model of fastText or CTranslate2, which are not read.",
    "tf_model.h5": "are weights of TensorFlow, which are not read.",
    "flax_model*.msgpack": "are weights of Flax, which are not read.",
}
"""Patterns of files -> message over the first file that matches."""


def explain_foreign(folder: Path) -> CheckpointError | None:
    """Return the error that says what `folder` holds instead of a checkpoint's weights. None if nothing is known."""
    if is_adapter(folder):
        base = JsonFile.read(folder, _ADAPTER).data.get("base_model_name_or_path")
        named = base if isinstance(base, str) and base else None
        message = f"this folder holds a PEFT adapter of {named or 'a model that it does not name'}, not a model."
        model = quote(named) if named else "MODEL"  # what a file says must not be a command where it is pasted
        hint = f"serve the model with the adapter: whimbrel serve {model} --adapter NAME={quote(str(folder))}"
        return CheckpointError(message, file=_ADAPTER, hint=hint)
    for patterns, message in _FORMS.items():
        for file in (path for pattern in patterns.split() for path in sorted(folder.glob(pattern))):
            name = file.relative_to(folder).as_posix()
            if is_lfs_pointer(file):
                return lfs_error(name)
            convert = f"write them as safetensors: whimbrel convert {quote(str(folder))} --out DIR"
            return CheckpointError(message, file=name, hint=convert if message is _PICKLED else _ORIGINAL)
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
