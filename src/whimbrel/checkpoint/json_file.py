"""Strict reading of JSON files.

Each fault is a CheckpointError with file and key. Links must not lead out of the checkpoint. An unknown key is refused,
unless the user accepts it by its name: see `accepting`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from textwrap import shorten
from typing import Any, Final, TypeAlias, TypeVar, cast

from whimbrel.errors import CheckpointError, SetupError

T = TypeVar("T")
JSON: TypeAlias = dict[str, Any]
Fixed: TypeAlias = Mapping[str, tuple[object, ...]]
"""Keys, with the values that are supported; None among them: the key may be missing."""
REQUIRED: Final[Any] = object()
_LFS: Final = b"version https://git-lfs.github.com/spec/"
_WRITERS: Final = {
    "transformers, by save_pretrained": """
        _attn_implementation _attn_implementation_autoset _attn_implementation_internal _auto_class _commit_hash
        _experts_implementation _flash_attn_2_enabled _from_auto _from_model_config _from_pipeline _name_or_path _torch_dtype
        attn_implementation name_or_path torch_dtype transformers_version
    """,
    "transformers, arguments of from_pretrained": """
        cache_dir device_map force_download local_files_only low_cpu_mem_usage max_memory offload_folder offload_state_dict
        output_loading_info proxies resume_download token use_auth_token use_flash_attn use_safetensors user_agent weights_only
    """,
    "Unsloth": "unsloth_fixed unsloth_version",
    "trainers and trackers": """
        axolotl_config axolotl_version comet_url dataset dataset_name dataset_revision datasets epoch epochs eval_results
        fine_tuned_from finetuned_from git_commit git_hash git_sha global_step hub_model_id learning_rate mlflow_run_id
        num_train_epochs parent_model random_seed run_id run_name seed train_args train_batch_size train_dataset
        trained_with trainer training_args training_config training_data training_date training_dataset wandb wandb_entity
        wandb_project wandb_run_id wandb_url
    """,
    "versions of software": """
        __version__ cuda_version datasets_version diffusers_version framework framework_version onnxruntime_version
        optimum_version peft_version python_version pytorch_version sentence_transformers_version tokenizers_version
        torch_version trl_version
    """,
    "model cards and hubs": """
        author authors base_model base_model_relation citation co2 co2_eq_emissions comment comments contributors created
        created_at created_by creator date description developer developers doi download_url hf_repo homepage inference
        languages last_modified library library_name license license_link license_name license_url maintainer metrics
        model-index model_card model_creator model_description model_id model_index model_link model_name model_url
        model_version modelId new_version note notes organization original_model paper paper_url pipeline_tag publisher
        release_date repo_id repo_url repository source source_model tags thumbnail timestamp title updated_at url version
        widget
    """,
    "exporters": """
        _class_name _diffusers_version converted_by converted_from export_model_type neuron quantized_by transformers.js_config
    """,
}
METADATA: Final = frozenset(key for keys in _WRITERS.values() for key in keys.split())
"""Keys that no code reads to make a vector, whichever file has them. Those of one file or architecture are its reader's."""


@dataclass(frozen=True, slots=True)
class _Accepted:
    """Keys that the user accepts, and the keys of all objects that are read."""

    keys: Collection[str] = ()
    present: set[str] = field(default_factory=set[str])
    used: set[str] = field(default_factory=set[str])
    """Those of `keys` that would have been refused."""
    read: set[str] = field(default_factory=set[str])
    """Keys whose values matter."""


_accepted: ContextVar[_Accepted] = ContextVar("accepted")


@contextmanager
def accepting(keys: Collection[str]) -> Generator[None]:
    """Accept unknown keys of these names in files that are read within."""
    token = _accepted.set(_Accepted(keys))
    try:
        yield
    finally:
        _accepted.reset(token)


def check_accepted() -> None:
    """Raise SetupError if a key that the user accepts is in no file that was read, or is one whose value matters."""
    accepted = _accepted.get()
    for key in accepted.keys:
        if key not in accepted.present:
            near = get_close_matches(key, accepted.present, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "leave it out, or check its spelling"
            raise SetupError(f"--accept-config {key}: no JSON file of the checkpoint has this key.", hint=hint)
        if key in accepted.read - accepted.used:
            hint = "leave it out; only unknown keys can be accepted"
            raise SetupError(f"--accept-config {key}: Whimbrel knows this key and goes by its value.", hint=hint)


def find_file(folder: Path, file: str) -> Path:
    """Return the path of a checkpoint's file. Links may lead within the folder or to the blobs of the hub's cache.

    Raises CheckpointError if they lead elsewhere: an untrusted folder must not expose other files of this machine.
    """
    try:
        home, path = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / file))
    except ValueError:  # NUL in the name
        raise CheckpointError("is not a valid file name.", file=repr(file)) from None
    repositories = [parent.parent for parent in home.parents if parent.name == "snapshots"]
    blobs = [parent / "blobs" for repository in repositories for parent in (repository, repository.parent)]
    if not any(path.is_relative_to(allowed) for allowed in (home, *blobs)):
        raise CheckpointError("is a link that leads out of the checkpoint's folder; put the file itself there.", file=file)
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would block
        raise CheckpointError("is not a regular file.", file=file)
    return path


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is what Git has in place of a large file."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS)) == _LFS
    except OSError:
        return False


def lfs_error(file: str) -> CheckpointError:
    hint = "fetch the file itself: git lfs pull in the folder, or hf download ID --local-dir FOLDER"
    return CheckpointError("is a pointer of Git LFS, not the file itself.", file=file, hint=hint)


def read_json(folder: Path, file: str) -> object:
    """Return the value in a JSON file. Raises CheckpointError if it is missing or not valid JSON."""
    try:
        return json.loads(find_file(folder, file).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"not found in {folder}; is this a checkpoint's folder?", file=file) from None
    except (ValueError, RecursionError) as error:
        if is_lfs_pointer(folder / file):
            raise lfs_error(file) from None
        raise CheckpointError(f"is not valid JSON ({error}).", file=file) from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}.", file=file) from None


class JsonFile:
    """One JSON object and the name of its file."""

    def __init__(self, name: str, data: object) -> None:
        if not isinstance(data, dict):
            raise CheckpointError(f"must be a JSON object, is {type(data).__name__}.", file=name)
        self.name = name
        self.data = cast(dict[str, Any], data)
        self._read: set[str] = set()
        self._accepted = _accepted.get(_Accepted())
        self._accepted.present.update(self.data)

    @classmethod
    def read(cls, folder: Path, name: str) -> JsonFile:
        return cls(name, read_json(folder, name))

    @classmethod
    def read_optional(cls, folder: Path, name: str) -> JsonFile:
        """Read a file, or return an empty object if it does not exist."""
        return cls.read(folder, name) if (folder / name).exists() else cls(name, {})

    def error(self, message: str, key: str, hint: str | None = None) -> CheckpointError:
        return CheckpointError(message, file=self.name, key=key, hint=hint)

    def section(self, key: str) -> JsonFile:
        """Return the object within this one, empty if it is missing."""
        return JsonFile(f"{self.name}: {key}", self.get(key, dict, {}))

    def get(self, key: str, kind: type[T], default: T = REQUIRED) -> T:
        """Return the value of `key`, which must be a `kind`. A missing key or null gives `default`, if there is one."""
        value: Any = self.data.get(key)
        self._note_read(key)
        if value is None:
            if default is REQUIRED:
                raise self.error("is missing.", key)
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"must be {kind.__name__}, is {_short(value)}.", key)
        return cast(T, value)

    def _note_read(self, key: str) -> None:
        self._read.add(key)
        if key in self.data:
            self._accepted.read.add(key)

    def ignore(self, *keys: str) -> None:
        """Mark `keys` as read, because they do not matter."""
        self._read.update(keys)

    def accepts(self, key: str) -> bool:
        """Return whether the user accepts this key, whose value would be refused."""
        if key not in self._accepted.keys:
            return False
        self._accepted.used.add(key)
        return True

    def was_read(self, key: str) -> bool:
        return key in self._read

    def positive(self, key: str, default: int = REQUIRED) -> int:
        """Return a number above 0. A missing key or null gives `default`, which may be 0."""
        value = self.get(key, int, default)
        if value <= 0 and self.data.get(key) is not None:
            raise self.error(f"must be positive, is {value}.", key)
        return value

    def choice(self, key: str, table: Mapping[str, T], default: str | None = None) -> T:
        self._note_read(key)
        return self.lookup(key, self.data.get(key, default), table)

    def lookup(self, key: str, value: object, table: Mapping[str, T]) -> T:
        if isinstance(value, str) and value in table:
            return table[value]
        supported = shorten(", ".join(table), 800, placeholder=", ...")
        raise self.error(f"{_short(value)} is not supported; supported: {supported}.", key)

    def reject_unknown_keys(self, *known: Collection[str]) -> None:
        """Raise CheckpointError if a key is in none of `known`."""
        for key, value in self.data.items():
            if any(key in keys for keys in (*known, METADATA)) or self.accepts(key):
                continue
            accept = f"--accept-config {quote(key)}, in Python accept_config=({key!r},)"
            near = [f"; {each}, which is accepted, is another key" for each in get_close_matches(key, self._accepted.keys, n=1)]
            message = f"this key (value {_short(value)}) is not known to Whimbrel, and may change the vectors."
            raise self.error(message, key, f"if you know that it does not, accept it: {accept}{''.join(near)}")

    def reject_unread_keys(self, *known: Collection[str]) -> None:
        """Raise CheckpointError if a key is unread and in none of `known`."""
        self.reject_unknown_keys(self._read, *known)

    def require_values(self, fixed: Fixed) -> None:
        """Raise CheckpointError if a key of `fixed` has another value than those listed there."""
        for key, allowed in fixed.items():
            self._note_read(key)
            value = self.data.get(key)
            same = [each for each in allowed if each == value and isinstance(each, bool) == isinstance(value, bool)]
            if key in self.data and not same:
                supported = " or ".join(repr(each) for each in allowed if each is not None) or "absent"
                raise self.error(f"{_short(value)} is not supported; must be {supported}.", key)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
