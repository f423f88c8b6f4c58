"""Folder of files and batches: their records, their content, and the room that they take.

    files/ID.json, files/ID.jsonl        a file: its record, written last, and its content
    batches/ID/batch.json, input.jsonl   what a client asked for, and a link to its input
    batches/ID/state.json, progress.json, output.jsonl, error.jsonl
                                         of the process that runs batches
    batches/ID/cancel                    a client asked for its end

Several processes use it. A lock guards what adds files and batches. Nothing is found before it is whole, and after the end of a
process at any time only files remain that `sweep` removes. All functions block.
"""

import fcntl
import logging
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from shutil import rmtree
from typing import Final, TypeVar

from whimbrel.errors import InvalidRequest, NotFound, SetupError, TooLarge
from whimbrel.server.batches.journal import read_progress, read_record, sync_folder, write_all, write_record
from whimbrel.server.batches.records import (
    BATCH_ID,
    FILE_ID,
    KEPT_SECONDS,
    BatchObject,
    BatchRecord,
    BatchState,
    FileRecord,
    new_id,
    now,
    view_batch,
)

T = TypeVar("T")
INPUT: Final = "input.jsonl"
OUTPUT: Final = "output.jsonl"
ERRORS: Final = "error.jsonl"
_RECORD: Final = "batch.json"
_STATE: Final = "state.json"
_CANCEL: Final = "cancel"
_NEW: Final = ".new-"
_log = logging.getLogger("whimbrel")


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of a folder."""

    max_file_bytes: int = 200 * 2**20
    max_files: int = 1000
    """Files of clients, and batches."""
    max_bytes: int = 16 * 2**30
    """Bytes of all files, and of the answers of batches that run."""


class Store:
    """Records of one folder. An owner is the hash of an API key; an owner sees no record of another."""

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self.folder = folder
        self.limits = limits
        self._files = folder / "files"
        self._batches = folder / "batches"

    def prepare(self) -> None:
        """Make the folder. Raises SetupError if it cannot be written to."""
        try:
            for folder in (self.folder, self._files, self._batches):
                folder.mkdir(mode=0o700, exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            raise SetupError(f"batch_dir: cannot write to {self.folder}: {error.strerror or error}.") from None

    # Files

    def begin_upload(self, announced: int | None = None) -> "Upload":
        """Return a file to write to, of which `announced` bytes, or the most that a file may have, count from now on.

        Raises TooLarge if there is no room, and OSError.
        """
        most = self.limits.max_file_bytes
        with self._locked():
            reserved = most if announced is None else min(announced, most)
            self._check_room(reserved)
            return Upload(self._files, most, reserved)

    def add_file(self, upload: "Upload", owner: str, filename: str, kept_seconds: int) -> FileRecord:
        """Keep what was uploaded. Raises TooLarge if there is no room, and OSError."""
        created = now()
        record = FileRecord(
            id=new_id("file-"), owner=owner, filename=filename, purpose="batch", bytes=upload.size, created_at=created,
            expires_at=created + kept_seconds,
        )  # fmt: skip
        upload.finish()
        with self._locked():
            self._check_room(0)  # the upload is counted
            content = upload.path.rename(self._content(record.id))
            try:
                write_record(self._files / f"{record.id}.json", record)
            except BaseException:
                content.unlink()
                raise
        return record

    def file(self, file_id: str, owner: str) -> FileRecord:
        """Return a file of an owner. Raises NotFound."""
        record = None
        if FILE_ID.fullmatch(file_id):
            record = self._file_record(file_id)
        if record is None or record.owner != owner or record.expires_at <= now():
            raise NotFound(f"no file {file_id[:100]!r} here.", param="file_id")
        return record

    def files(self, owner: str) -> list[FileRecord]:
        """Return the files of an owner, the oldest first."""
        names = sorted(entry.name.removesuffix(".json") for entry in os.scandir(self._files) if entry.name.endswith(".json"))
        found: list[FileRecord] = []
        for name in names:
            with suppress(NotFound):
                found.append(self.file(name, owner))
        return found

    def open_file(self, file_id: str, owner: str) -> int:
        """Return a descriptor of a file's content. Raises NotFound."""
        self.file(file_id, owner)
        try:
            return os.open(self._content(file_id), os.O_RDONLY)
        except FileNotFoundError:
            raise NotFound(f"no file {file_id!r} here.", param="file_id") from None

    def delete_file(self, file_id: str, owner: str) -> None:
        """Remove a file. A batch that has it as its input keeps its own link. Raises NotFound."""
        self.file(file_id, owner)
        self._remove_file(file_id)

    # Batches

    def add_batch(
        self,
        owner: str,
        endpoint: str,
        input_file_id: str,
        metadata: dict[str, str] | None,
        output_seconds: int,
        *,
        seconds: int,
    ) -> BatchRecord:
        """Keep a batch that shall run. Raises NotFound for its input, InvalidRequest, TooLarge and OSError."""
        source = self.file(input_file_id, owner)
        if source.purpose != "batch":
            raise InvalidRequest(
                f"is of a file with the purpose {source.purpose}; upload one for `batch`.", param="input_file_id"
            )
        created = now()
        record = BatchRecord(
            id=new_id("batch_"),
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=f"{seconds // 3600}h",
            created_at=created,
            expires_at=created + seconds,
            metadata=metadata,
            output_seconds=output_seconds,
        )
        with self._locked():
            if len(list(self._ids())) >= self.limits.max_files:
                raise TooLarge(f"there are {self.limits.max_files:,} batches, the limit; they go 30 days after their end.")
            folder = self._batches / f"{_NEW}{record.id}"
            folder.mkdir(mode=0o700)
            try:
                os.link(self._content(input_file_id), folder / INPUT)
                write_record(folder / _RECORD, record)
                folder.rename(self.batch_folder(record.id))
            except BaseException:
                rmtree(folder, ignore_errors=True)
                raise
            sync_folder(self._batches)
        return record

    def batch(self, batch_id: str, owner: str) -> BatchRecord:
        """Return a batch of an owner. Raises NotFound."""
        record = None
        if BATCH_ID.fullmatch(batch_id):
            record = self._batch_record(batch_id)
        if record is None or record.owner != owner:
            raise NotFound(f"no batch {batch_id[:100]!r} here.", param="batch_id")
        return record

    def batches(self, owner: str) -> list[BatchRecord]:
        """Return the batches of an owner, the oldest first."""
        found: list[BatchRecord] = []
        for batch_id in self._ids():
            with suppress(NotFound):
                found.append(self.batch(batch_id, owner))
        return found

    def view(self, record: BatchRecord) -> BatchObject:
        """Return a batch as its client sees it."""
        folder = self.batch_folder(record.id)
        state = self.state(record.id)  # before the counts: those of an ended batch are the last
        return view_batch(record, state, read_progress(folder), self.cancelled_at(record.id))

    def cancel(self, record: BatchRecord) -> None:
        """Ask for the end of a batch. Raises InvalidRequest if it ends already."""
        state = self.state(record.id)
        if state.has_ended or state.outcome not in (None, "cancelled"):
            raise InvalidRequest(f"the batch is {state.status} and cannot be cancelled.", param="batch_id")
        folder = self.batch_folder(record.id)
        with suppress(FileExistsError):
            os.close(os.open(folder / _CANCEL, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        sync_folder(folder)

    def cancelled_at(self, batch_id: str) -> int | None:
        try:
            return int((self.batch_folder(batch_id) / _CANCEL).stat().st_mtime)
        except FileNotFoundError:
            return None

    def batch_folder(self, batch_id: str) -> Path:
        return self._batches / batch_id

    # For the process that runs batches

    @contextmanager
    def running(self) -> Generator[bool]:
        """Hold the right to run batches while the block lasts. Yields whether it could be had; another process may have it."""
        lock = os.open(self.folder / "runner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)

    def unfinished(self, ended: set[str]) -> list[BatchRecord]:
        """Return the batches that have not ended, the oldest first. Add the others to `ended`, and read these no more."""
        found: list[BatchRecord] = []
        for batch_id in self._ids():
            if batch_id in ended or (record := self._batch_record(batch_id)) is None:
                continue
            state = _readable(self.batch_folder(batch_id) / _STATE, BatchState)
            if state is not None and state.has_ended:
                ended.add(batch_id)
            else:
                found.append(record)
        return found

    def state(self, batch_id: str) -> BatchState:
        return read_record(self.batch_folder(batch_id) / _STATE, BatchState) or BatchState()

    def write_state(self, batch_id: str, state: BatchState) -> None:
        write_record(self.batch_folder(batch_id) / _STATE, state)

    def publish(self, record: BatchRecord, name: str, file_id: str) -> None:
        """Make a file of a batch's answers, for its owner. It may be called again. The file of the batch goes."""
        path = self.batch_folder(record.id) / name
        if not path.exists():
            return
        with self._locked():
            with suppress(FileExistsError):
                os.link(path, self._content(file_id))
            created = now()
            kind = name.removesuffix(".jsonl")
            about = FileRecord(
                id=file_id, owner=record.owner, filename=f"{record.id}_{kind}.jsonl", purpose="batch_output",
                bytes=path.stat().st_size, created_at=created, expires_at=created + record.output_seconds,
            )  # fmt: skip
            write_record(self._files / f"{file_id}.json", about)
        path.unlink()

    def drop_work(self, batch_id: str) -> None:
        """Remove the input and the answers of a batch that has ended."""
        for name in (INPUT, OUTPUT, ERRORS):
            (self.batch_folder(batch_id) / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove files whose time is over, batches that ended long ago, and what processes left that were killed."""
        with self._locked():
            names = {entry.name for entry in os.scandir(self._files)}
            for name in names:
                path = self._files / name
                if name.startswith(_NEW):
                    _remove_if_left(path)
                elif name.endswith(".jsonl") and f"{name.removesuffix('l')}" not in names:
                    path.unlink(missing_ok=True)
                elif name.endswith(".json") and (record := self._file_record(path.stem)) and record.expires_at <= now():
                    self._remove_file(record.id)
            for entry in list(os.scandir(self._batches)):
                if entry.name.startswith(_NEW):
                    rmtree(entry.path, ignore_errors=True)
                elif BATCH_ID.fullmatch(entry.name):
                    state = self.state(entry.name)
                    if state.ended_at is not None and state.ended_at + KEPT_SECONDS <= now():
                        rmtree(entry.path, ignore_errors=True)
                    elif state.has_ended:
                        self.drop_work(entry.name)

    def used(self) -> int:
        """Return the bytes of all files, and of the answers of batches that run."""
        sizes: dict[int, int] = {}  # by inode: inputs and answers of batches may be links to files
        for folder in (self._files, *map(self.batch_folder, self._ids())):
            for entry in _entries(folder):
                if entry.name.endswith((".jsonl", ".part")):
                    with suppress(FileNotFoundError):  # it went meanwhile
                        sizes[entry.inode()] = entry.stat().st_size
        return sum(sizes.values())

    def _check_room(self, more: int) -> None:
        """Raise TooLarge if there are as many files, or bytes, as there may be."""
        num_files = sum(entry.name.endswith(".json") for entry in _entries(self._files))
        if num_files >= self.limits.max_files:
            raise TooLarge(f"there are {num_files:,} files, the limit of this server; delete some.", param="file")
        if (used := self.used() + more) > self.limits.max_bytes:
            limit = f"the limit of this server is {self.limits.max_bytes:,}; delete some."
            raise TooLarge(f"with this file, all files have {used:,} bytes; {limit}", param="file")

    def _ids(self) -> Iterator[str]:
        return iter(sorted(entry.name for entry in os.scandir(self._batches) if BATCH_ID.fullmatch(entry.name)))

    def _file_record(self, file_id: str) -> FileRecord | None:
        return _readable(self._files / f"{file_id}.json", FileRecord)

    def _batch_record(self, batch_id: str) -> BatchRecord | None:
        return _readable(self.batch_folder(batch_id) / _RECORD, BatchRecord)

    def _content(self, file_id: str) -> Path:
        return self._files / f"{file_id}.jsonl"

    def _remove_file(self, file_id: str) -> None:
        for suffix in ("json", "jsonl"):  # its record first: without it the content is left to `sweep`
            (self._files / f"{file_id}.{suffix}").unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Generator[None]:
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


class Upload:
    """A file that is being written. It is locked until it is closed, so that `sweep` knows whether its process lives."""

    def __init__(self, folder: Path, max_bytes: int, reserved: int) -> None:
        """`reserved` is the size that it has until it is finished, so that uploads at a time do not share the same room."""
        self.path = folder / f"{_NEW}{os.urandom(16).hex()}.part"
        self.size = 0
        self._max_bytes = max_bytes
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.ftruncate(self._file, reserved)

    def write(self, data: bytes) -> None:
        """Append bytes. Raises TooLarge and OSError."""
        self.size += len(data)
        if self.size > self._max_bytes:
            raise TooLarge(f"the file has more than {self._max_bytes:,} bytes, the limit. Split it.", param="file")
        write_all(self._file, data)

    def finish(self) -> None:
        os.ftruncate(self._file, self.size)
        os.fsync(self._file)

    def close(self) -> None:
        """Remove the file unless it was kept."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def _readable(path: Path, kind: type[T]) -> T | None:
    """Return a record, None if there is none that can be read: another's fault must not hide the others."""
    try:
        return read_record(path, kind)
    except ValueError as error:
        _tell_once(str(error))
        return None


@lru_cache(maxsize=1000)
def _tell_once(text: str) -> None:
    _log.error("%s", text)


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        return list(os.scandir(folder))
    except FileNotFoundError:  # it went meanwhile
        return []


def _remove_if_left(path: Path) -> None:
    """Remove a file of which no process holds the lock."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(file)
