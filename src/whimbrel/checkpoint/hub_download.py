"""Download of a model into the hub's cache, by the hub's own client library.

The client library fetches a file again from its first byte after the process was interrupted, and compares only its size. So
large files are fetched here: by its function for one request, under its lock for the file, to the name that it once gave to
unfinished files. They go on where they stopped, their SHA-256 is compared with the hub's, and of two processes that want a
file one fetches it. The library fetches the rest, and makes snapshots and references.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from whimbrel.checkpoint.locate import file_patterns, folder_in_cache, hub_cache, hub_errors
from whimbrel.errors import SetupError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

Progress: TypeAlias = Callable[[str, int], None]
"""Function that is told the bytes of a file, by its name, that are on disk."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_FOREIGN: Final = frozenset("gguf onnx xml ftz h5 msgpack pt ckpt bin mlpackage tflite".split())
_SPARE: Final = 16 * 2**20
"""Bytes on the disk that stay free beside a download."""
_PIECE: Final = 2**18
"""Bytes that are written at once. The library's 10 MB are lost at each interrupt, and show no progress on a slow network."""
_LOCK_SECONDS: Final = 0.5
"""Time between two looks at a file that another process fetches."""


@dataclass(frozen=True, slots=True)
class HubFile:
    name: str
    size: int
    blob: str
    """The name of its content in the cache: the SHA-256 of a large file, else git's hash."""
    is_large: bool


@dataclass(frozen=True, slots=True)
class Download:
    """A model's files at one commit of its repository."""

    model: str
    revision: str
    """Branch, tag or commit that the user named, or empty."""
    commit: str
    licence: str
    """The licence that the model's page states, or empty."""
    patterns: tuple[str, ...]
    files: tuple[HubFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def snapshot(self) -> Path:
        return folder_in_cache(self.model) / "snapshots" / self.commit

    def partial(self, file: HubFile) -> Path:
        """Return the place of a file until it is whole."""
        return folder_in_cache(self.model) / "blobs" / f"{file.blob}.incomplete"

    def has(self, file: HubFile) -> bool:
        """Return whether a file is in the cache, and not cut short."""
        places = (self.snapshot / file.name, folder_in_cache(self.model) / "blobs" / file.blob)
        return any(place.exists() and (not file.is_large or _size(place) == file.size) for place in places)

    def bytes_here(self, file: HubFile) -> int:
        """Return how much of a file is in the cache."""
        return file.size if self.has(file) else min(_size(self.partial(file)), file.size) if file.is_large else 0

    @property
    def missing(self) -> tuple[HubFile, ...]:
        return tuple(file for file in self.files if not self.has(file))


def plan_download(model: str, revision: str, *, pickles: bool = False) -> Download:
    """Ask the hub for the files of a model that Whimbrel reads. Raises SetupError, also if there are no weights among them."""
    from huggingface_hub import HfApi, constants

    with hub_errors(model, revision or constants.DEFAULT_REVISION):
        about = HfApi().model_info(model, revision=revision or None, files_metadata=True)
    commit, files = about.sha or "", [_read_file(each) for each in about.siblings or ()]
    if not _COMMIT.fullmatch(commit) or any(file.name.startswith("/") or ".." in Path(file.name).parts for file in files):
        hint = "is HF_ENDPOINT the address of a hub?"
        raise SetupError(f"the answer for {model} has no commit, or a file outside the repository.", hint=hint)
    patterns = tuple(file_patterns(pickles=pickles))
    needed = tuple(file for file in files if any(fnmatchcase(file.name, pattern) for pattern in patterns))
    _require_weights(model, needed, [file.name for file in files], pickles=pickles)
    return Download(model, revision, commit, _licence(about), patterns, needed)


def _read_file(stated: "RepoSibling") -> HubFile:
    large = stated.lfs if stated.lfs and _SHA256.fullmatch(stated.lfs.sha256) else None
    return HubFile(stated.rfilename, stated.size or 0, large.sha256 if large else stated.blob_id or "", large is not None)


def _require_weights(model: str, files: tuple[HubFile, ...], names: list[str], *, pickles: bool) -> None:
    """Raise SetupError if a repository has no weights in a form that Whimbrel reads or converts."""
    found = [file.name.rpartition("/")[2] for file in files]
    if any(name.endswith(".safetensors") and not name.startswith("adapter_") for name in found):
        return
    if any(fnmatchcase(name, "pytorch_model*.bin") for name in names):
        if not pickles:
            hint = f"whimbrel pull {model} --pickles, then whimbrel convert {model} --out DIR"
            raise SetupError(f"{model} has its weights only as pickles, which can run code and are not served.", hint=hint)
        return
    if "adapter_config.json" in names:
        hint = f"pull the model that it adapts; `whimbrel serve MODEL --adapter NAME={model}` takes the adapter"
        raise SetupError(f"{model} is an adapter, not a model.", hint=hint)
    ends = sorted({"." + name.rpartition(".")[2] for name in names if name.rpartition(".")[2] in _FOREIGN})
    others = f"; it has {', '.join(ends)}" if ends else ""
    raise SetupError(f"{model} has no weights as safetensors{others}.", hint="name the model from which it was made")


def _licence(about: "ModelInfo") -> str:
    """Return the licence that a model's page states, by its own name if that is `other`."""
    card: Any = about.card_data
    stated = [card.get("license_name") if card and card.get("license") == "other" else None, card and card.get("license")]
    tags = [tag.removeprefix("license:") for tag in about.tags or () if tag.startswith("license:")]
    return next((each for each in (*stated, *tags) if isinstance(each, str) and each), "")


def check_space(download: Download) -> int:
    """Return the free bytes of the cache's disk. Raises SetupError if the download does not fit."""
    place = next(each for each in (hub_cache(), *hub_cache().parents) if each.exists())
    free = shutil.disk_usage(place).free
    needed = sum(file.size - download.bytes_here(file) for file in download.missing)
    if needed and needed + _SPARE > free:
        sizes = f"needs {needed / 1e6:,.1f} MB more, and the disk of {hub_cache()} has {free / 1e6:,.1f} MB free"
        hint = "make room (whimbrel list, whimbrel rm MODEL), or set HF_HOME to a folder on another disk"
        raise SetupError(f"{download.model} {sizes}.", hint=hint)
    return free


def fetch(download: Download, progress: Progress, wait: Callable[[str], None]) -> Path:
    """Fetch the missing files, and return the folder of the snapshot. Raises SetupError.

    `wait` is called with the name of a file that another process is fetching. An interrupt leaves what was fetched.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import logging
    from huggingface_hub.utils import tqdm as bar

    class Silent(bar):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))  # pyright: ignore[reportUnknownMemberType]

    verbosity, piece = logging.get_verbosity(), constants.DOWNLOAD_CHUNK_SIZE
    logging.set_verbosity_error()  # a broken connection is tried again; its traces would tear the bar
    constants.DOWNLOAD_CHUNK_SIZE = _PIECE
    try:
        with hub_errors(download.model, download.revision or constants.DEFAULT_REVISION):
            for file in download.files:
                if file.is_large and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:  # above it, the library has its own way
                    _fetch_large(download, file, progress, wait)
            options: dict[str, Any] = {"allow_patterns": list(download.patterns), "tqdm_class": Silent}
            options |= {"revision": download.revision or None, "cache_dir": hub_cache()}
            library: Any = huggingface_hub  # types of its functions are known in part
            folder = Path(library.snapshot_download(download.model, **options))
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = piece
        logging.set_verbosity(verbosity)
    for file in download.files:
        progress(file.name, file.size)
    return folder


def _fetch_large(download: Download, file: HubFile, progress: Progress, wait: Callable[[str], None]) -> None:
    """Bring a file into the cache, unless it is there. Its snapshot does not have it yet."""
    partial = download.partial(file)
    unfinished = f"{file.blob}*.incomplete"  # also those that the client library leaves when it is killed, and never reads
    if download.has(file) and not any(partial.parent.glob(unfinished)):
        return
    partial.parent.mkdir(parents=True, exist_ok=True)

    def look(*, is_first: bool) -> None:
        if is_first:
            wait(file.name)
        progress(file.name, download.bytes_here(file))

    with _lock(download.model, file.blob, look):
        if not download.has(file):  # else by the process that had the lock
            began = 0 < _size(partial) <= file.size
            try:
                _continue(download, file, partial, progress)
            except _Damaged:
                if not began:
                    raise
                _continue(download, file, partial, progress)  # the part that was here may have been of another download
            (download.snapshot / file.name).unlink(missing_ok=True)  # it was cut short; the library makes it anew
            partial.replace(partial.with_suffix(""))
        for left in partial.parent.glob(unfinished):
            left.unlink(missing_ok=True)


@contextmanager
def _lock(model: str, blob: str, look: Callable[..., None]) -> Generator[None]:
    """Hold the client library's lock for a file. Call `look` from time to time until it is free."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    path = hub_cache() / ".locks" / folder_in_cache(model).name / f"{blob}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    is_first = True
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(WeakFileLock(path, timeout=_LOCK_SECONDS))
                break
            except Timeout:
                look(is_first=is_first)
                is_first = False
        yield


class _Damaged(SetupError):
    """The content of a file is not what the hub says."""


class _Part(FileIO):
    """A file that grows up to its promised size, and tells how far it is. Every write is whole or an error."""

    def __init__(self, path: Path, file: HubFile, progress: Progress) -> None:
        super().__init__(path, "r+" if path.exists() else "w+")
        self.seek(0, os.SEEK_END)
        self._file, self._progress = file, progress

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        if self.tell() + size > self._file.size:
            raise _Damaged(f"{self._file.name}: the hub sends more than the {self._file.size:,} bytes that it states.")
        while left:
            left = left[super().write(left) :]
        self._progress(self._file.name, self.tell())
        return size


class _NoBar:
    """A bar of the client library's that shows nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, _: float | None = 1) -> None: ...


def _continue(download: Download, file: HubFile, partial: Path, progress: Progress) -> None:
    """Fetch what `partial` does not have yet of a file, and check the whole. Raises _Damaged, after which it is gone."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.utils import build_hf_headers  # pyright: ignore[reportUnknownVariableType]

    if _size(partial) > file.size:
        partial.unlink()
    url = hf_hub_url(download.model, file.name, revision=download.commit)
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}  # a part of a compressed file would be another part
    bars: Any = _NoBar
    try:
        with _Part(partial, file, progress) as part:
            progress(file.name, part.tell())
            http_get(url, part, resume_size=part.tell(), headers=headers, expected_size=file.size, tqdm_class=bars)
        with partial.open("rb") as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != file.blob:
            raise _Damaged(
                f"{file.name} of {download.model}: SHA-256 is {found[:12]}..., must be {file.blob[:12]}...; it is not kept.",
                hint="try again; a proxy or a mirror that changes files must be passed by",
            )
    except (_Damaged, OSError) as error:
        if type(error) is OSError and error.errno is None:  # the client library's, over the size
            error = _Damaged(f"{file.name}: the hub sends {_size(partial):,} of the {file.size:,} bytes that it states.")
        if isinstance(error, _Damaged):
            with suppress(OSError):
                partial.unlink()
        raise error from None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
