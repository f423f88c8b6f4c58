"""Conversion of a checkpoint with pickled weights to one with safetensors.

The new folder has every other file as it was. It appears whole or not at all: it is written beside its place and then renamed.
The pickles are read in a process of their own (`model/unpickle.py`).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from whimbrel.checkpoint.foreign import explain_foreign, has_safetensors, is_adapter
from whimbrel.checkpoint.json_file import JsonFile, find_file, is_lfs_pointer, lfs_error, read_json
from whimbrel.checkpoint.locate import Checkpoint
from whimbrel.checkpoint.sentence_transformers.modules import MODULES, has_modules
from whimbrel.errors import CheckpointError, SetupError

_WEIGHTS: Final = "pytorch_model.bin"
_INDEX: Final = "pytorch_model.bin.index.json"
_NEW_INDEX: Final = "model.safetensors.index.json"
_PASSED_ON: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "LANG", "LC_ALL", "TMPDIR")
"""Variables of the environment that the reading process gets: no keys and no tokens."""
_SKIPPED: Final = frozenset({".git", ".cache", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Converted:
    """A new checkpoint."""

    folder: Path
    num_tensors: int
    num_bytes: int
    """Size of the weights."""


def convert(
    checkpoint: Checkpoint, out: Path, *, path: str = "", check: Callable[[Path], None], progress: Callable[[str], None]
) -> Converted:
    """Write a checkpoint whose weights are pickles to the folder `out`, with safetensors.

    `path` is the subfolder of the Transformer; the folders of other modules follow from modules.json. `check` is called with
    the new folder before it gets its name, and raises if it cannot be loaded. Raises SetupError and CheckpointError; then, and
    if the process is interrupted, nothing is left.
    """
    source = checkpoint.folder
    pickles = _pickles_of_modules(source, path)
    _check_place(out, source)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent, ignore_cleanup_errors=True) as name:
            staging = Path(name)
            staging.chmod(0o755)
            progress("copying files")
            _copy_others(source, staging, {source / each / file for each in pickles for file in (*pickles[each], _INDEX)})
            progress("reading pickles")
            num_tensors = num_bytes = 0
            for each, files in pickles.items():
                tensors = _unpickle(source, each, staging, files)
                if (source / each / _INDEX).is_file():
                    _write_index(source / each, staging / each, tensors)
                num_tensors += sum(map(len, tensors.values()))
                num_bytes += sum((staging / each / file).stat().st_size for file in tensors)
            progress("checking the new checkpoint")
            check(staging)
            if out.exists():
                out.rmdir()
            staging.rename(out)
    except OSError as error:
        reason = f"{error.strerror or error}. Nothing is left of it."
        raise SetupError(f"writing {out} failed: {reason}", hint="check the disk, or choose another --out") from None
    return Converted(out, num_tensors, num_bytes)


def _pickles_of_modules(source: Path, path: str) -> dict[str, list[str]]:
    """Return the names of the pickles by the folder that holds them. Raises CheckpointError if there are none."""
    if is_adapter(source / path) and (error := explain_foreign(source / path)) is not None:
        raise error
    rows = cast(list[dict[str, Any]], read_json(source, MODULES)) if has_modules(source) else []
    folders = dict.fromkeys([path, *(row["path"] for row in rows)])  # the card's reader has checked them
    without = [each for each in folders if not has_safetensors(source / each)]
    found = {each: _pickles(source / each) for each in without if each == path or (source / each / _WEIGHTS).is_file()}
    if not found:
        raise CheckpointError("the weights are safetensors already.", file=str(source), hint="serve the checkpoint as it is")
    return found


def _pickles(folder: Path) -> list[str]:
    """Return the names of the pickles that hold a folder's weights. Raises CheckpointError."""
    names = sorted(set(_places(folder).values())) if (folder / _INDEX).is_file() else [_WEIGHTS]
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"not found in {folder}; there is nothing to convert.", file=name)
    return names


def _places(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the index. Raises CheckpointError."""
    places = cast(dict[str, object], JsonFile.read(folder, _INDEX).get("weight_map", dict))
    if not places or any(not isinstance(file, str) or file != Path(file).name for file in places.values()):
        raise CheckpointError("names no files of weights beside it.", file=_INDEX)
    return cast(dict[str, str], places)


def _check_place(out: Path, source: Path) -> None:
    if out.resolve().is_relative_to(source.resolve()):
        raise SetupError(f"--out {out} is in the model's folder.", hint="name a folder elsewhere")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise SetupError(f"--out {out} is no folder.", hint="name a folder that does not exist yet")
    if out.exists() and any(out.iterdir()):
        raise SetupError(f"--out {out} is not empty.", hint="name a folder that does not exist yet")
    if not out.absolute().parent.is_dir():
        raise SetupError(f"--out {out}: there is no folder {out.absolute().parent}.", hint="make it first")


def _copy_others(source: Path, out: Path, left_out: set[Path]) -> None:
    """Copy all files but some. Links of the hub's cache become files; others may lead to files of this machine: refused."""
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED]
        place = out / Path(folder).relative_to(source)
        place.mkdir(exist_ok=True)
        for name in subfolders:
            if Path(folder, name).is_symlink():
                file = Path(folder, name).relative_to(source).as_posix()
                raise CheckpointError("is a link to a folder; put the folder itself there.", file=file)
        for name in names:
            if Path(folder, name) not in left_out:
                shutil.copyfile(find_file(source, Path(folder, name).relative_to(source).as_posix()), place / name)


def _unpickle(source: Path, path: str, staging: Path, files: Sequence[str]) -> dict[str, list[str]]:
    """Write the pickles in the subfolder `path` as safetensors, in another process. Return names of tensors by new file."""
    for file in files:
        if is_lfs_pointer(find_file(source, Path(path, file).as_posix())):  # and no link out of the checkpoint
            raise lfs_error(Path(path, file).as_posix())
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    command = [sys.executable, "-P", "-m", "whimbrel.model.unpickle", str(os.getpid())]
    command += [str(source.absolute() / path), str(staging / path)]
    command += [name for file in files for name in (file, _new_name(file))]
    done = subprocess.run(  # noqa: S603 - our own module, with names of files
        command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, start_new_session=True, check=False
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        reason = done.stderr.decode(errors="replace").strip().split("\n")[-1][-300:]
        message = f"the process that read it ended with {done.returncode}{f': {reason}' if reason else ''}."
        file = Path(path, files[0]).as_posix()
        raise CheckpointError(message, file=file, hint="was there enough memory?") from None
    if "error" in answer:
        file = Path(path, answer["file"]).as_posix()
        if answer["kind"] == "memory":
            hint = "free some, or convert it on a larger machine"
            raise CheckpointError("there is no memory to read it.", file=file, hint=hint)
        if answer["kind"] == "unfit":
            raise CheckpointError(answer["error"], file=file, hint="ask who made it for safetensors")
        raise OSError(0, f"{file}: {answer['error']}")
    os.umask(mask := os.umask(0o077))  # it cannot be read otherwise
    for name in answer["tensors"]:
        (staging / path / name).chmod(0o666 & ~mask)  # as the files that are copied; safetensors writes for its user alone
    return answer["tensors"]


def _new_name(file: str) -> str:
    """Return the name of a converted file: "pytorch_model-00001-of-00002.bin" is "model-00001-of-00002.safetensors"."""
    return file.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors"


def _write_index(source: Path, out: Path, tensors: Mapping[str, Sequence[str]]) -> None:
    """Write the index of files. Raises CheckpointError if that of the pickles does not fit them."""
    stated = {name: _new_name(file) for name, file in _places(source).items()}
    found = {name: file for file, names in tensors.items() for name in names}
    if wrong := stated.items() ^ found.items():
        raise CheckpointError(f"does not say where {min(wrong)[0]!r} is, or says it wrongly.", file=_INDEX)
    new = {"metadata": JsonFile.read(source, _INDEX).data.get("metadata", {}), "weight_map": stated}
    (out / _NEW_INDEX).write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")
