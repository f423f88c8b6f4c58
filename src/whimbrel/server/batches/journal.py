"""Journal of a run: the answers so far, in the order of the lines, and a record of how far they go.

Theory of operation. Answers are appended to files, synced, and then the record of their sizes and of the next line is
replaced, atomically. Whatever comes after the sizes of the record is cut off when the run goes on, and these lines are run
again. So each line is in the files once, whenever the process, or the machine, ends. If a file has gone, or is shorter than its
record says, the record is worth nothing and all lines run again.

It knows nothing of requests. One process writes a journal; others may read its record.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")
_RECORD: Final = "progress.json"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A record: the lines that are finished, and the sizes of the files that have their answers."""

    number: int = 0
    """The number of the last line that is finished."""
    offset: int = 0
    """The place in the input at which the next begins."""
    completed: int = 0
    failed: int = 0
    sizes: Mapping[str, int] = {}


class Journal:
    """Files of answers in a folder. Raises OSError, as when the disk is full; then it goes on from its last record."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self._folder = folder
        self.progress = read_progress(folder)
        if any(size_of(folder / name) < size for name, size in self.progress.sizes.items()):
            self.progress = Progress()
            write_record(folder / _RECORD, self.progress)
        self._files = {name: open_file(folder / name, self.progress.sizes.get(name, 0)) for name in files}

    def commit(self, progress: Progress, answers: Mapping[str, Sequence[bytes]]) -> None:
        """Append answers to files, and record them. `progress` needs no sizes."""
        sizes = dict(self.progress.sizes)
        for name, pieces in answers.items():
            if pieces:
                sizes[name] = sizes.get(name, 0) + write_all(self._files[name], b"".join(pieces))
                os.fsync(self._files[name])
        progress = msgspec.structs.replace(progress, sizes=sizes)
        write_record(self._folder / _RECORD, progress)
        self.progress = progress

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):
                os.close(file)


def read_progress(folder: Path) -> Progress:
    """Return the record of a folder's journal; one of nothing if it has none."""
    return read_record(folder / _RECORD, Progress) or Progress()


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def open_file(path: Path, size: int) -> int:
    """Return a descriptor to append to a file, which is cut to `size` bytes."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.ftruncate(file, size)
    except OSError:
        os.close(file)
        raise
    return file


def write_all(file: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    return len(data)


def read_record(path: Path, kind: type[T]) -> T | None:
    """Return a record, None if there is none. Raises ValueError if it is not one, and OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None


def write_record(path: Path, value: Any) -> None:
    """Write a struct as JSON, so that a reader finds the old file or the new one, also after a loss of power."""
    temporary = path.with_name(f".{path.name}.new")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_all(file, msgspec.json.encode(value))
        os.fsync(file)
    finally:
        os.close(file)
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write the names of a folder to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
