"""Folder of a run: its lock, its finished shards, and the leftovers of a run that was killed."""

import fcntl
import os
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from whimbrel.bulk.compute import ShardTable
from whimbrel.bulk.manifest import MANIFEST, Manifest, OutputFile, Record, Shard, encode, read_record
from whimbrel.bulk.output_files import (
    TEMPORARY,
    Content,
    OutputFormat,
    lines_content,
    sha256_of_file,
    sync_folder,
    table_contents,
    write_file,
    writing,
)
from whimbrel.bulk.survey import Doubled
from whimbrel.errors import SetupError

_LOCK: Final = ".lock"
ERRORS: Final = "errors"
SHARDS: Final = "shards"
DOUBLED: Final = f"{ERRORS}/doubled-ids.jsonl"
_PART: Final = re.compile(r"part-\d{5,}\..+|doubled-ids\.jsonl")


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Make a folder, and keep other runs out of it. Raises SetupError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(f"another run writes into {folder}.", hint="wait for it, or choose another folder") from None
        except OSError as error:
            raise SetupError(f"cannot lock {folder}: {error.strerror}.") from None
        yield
    finally:
        os.close(descriptor)


def check_ours(folder: Path) -> None:
    """Raise SetupError for a folder that is not of a run and has files: they might be lost or mixed up."""
    if (folder / MANIFEST).exists() and (folder / SHARDS).is_dir():
        return
    before = [folder / each for each in (_LOCK, f".{MANIFEST}{TEMPORARY}", DOUBLED, f"{ERRORS}/.doubled-ids.jsonl{TEMPORARY}")]
    for path in sorted(folder.iterdir()):
        is_begun = path.name in (ERRORS, SHARDS) and path.is_dir() and set(path.iterdir()) <= set(before)
        if path not in before and not is_begun:
            hint = "choose an empty folder, or that of an earlier run"
            raise SetupError(f"{folder} is no folder of a run, but has {path.name}.", hint=hint)


def clear(folder: Path) -> None:
    """Remove everything that a run wrote, the manifest last. Raises SetupError."""
    with writing(folder):
        for path in _written(folder):
            path.unlink()
        (folder / MANIFEST).unlink(missing_ok=True)


def write_manifest(folder: Path, manifest: Manifest, doubled: Sequence[Doubled]) -> None:
    """Write the manifest of a new run, with the folders of its records, and rows with ids of others. Raises SetupError."""
    with writing(folder):
        for name in (ERRORS, SHARDS):
            (folder / name).mkdir(exist_ok=True)
        sync_folder(folder)
    if doubled:
        lines = ({"file": each[0], "row": each[1], "as": {"file": each[2], "row": each[3]}} for each in doubled)
        write_file(folder, *lines_content(DOUBLED, lines))
    write_file(folder, MANIFEST, lambda file: file.write(encode(manifest)))


def finished(
    folder: Path, manifest: Manifest, shards: Iterable[Shard], *, verify: bool, tell: Callable[[str], None]
) -> dict[int, Record]:
    """Return the records of the finished shards by number. Everything else of a run is removed. Raises SetupError.

    A shard counts as finished if its files have their sizes, with `verify` also their hashes.
    """
    records: dict[int, Record] = {}
    with writing(folder):
        for shard in shards:
            record, fault = read_finished(folder, manifest, shard, verify=verify)
            if fault:
                tell(f"{shard.name} runs again: {fault}")
            elif record is not None:
                records[shard.number] = record
        known = {folder / SHARDS / f"part-{number:05d}.json" for number in records}
        known.add(folder / DOUBLED)
        known |= {folder / file.path for record in records.values() for file in record.files}
        for path in _written(folder):
            if path not in known:
                path.unlink()
        for name in (ERRORS, SHARDS):
            (folder / name).mkdir(exist_ok=True)
    return records


def read_finished(folder: Path, manifest: Manifest, shard: Shard, *, verify: bool) -> tuple[Record | None, str]:
    """Return the record of a shard, None if it is not finished, and the fault of its record or files, if there is one."""
    record = read_record(folder / SHARDS / f"{shard.name}.json")
    if record is None:
        return None, ""
    if (record.input, record.start, record.stop) != (manifest.inputs[shard.file].path, shard.start, shard.stop):
        return record, "its record is of other rows"
    return record, next(filter(None, (_fault(folder, file, verify=verify) for file in record.files)), "")


def _fault(folder: Path, file: OutputFile, *, verify: bool) -> str:
    path = folder / file.path
    try:
        size = path.stat().st_size
    except OSError:
        return f"{file.path} is missing"
    if size != file.size:
        return f"{file.path} has {size:,} bytes in place of {file.size:,}"
    return f"{file.path} has other bytes" if verify and sha256_of_file(path) != file.sha256 else ""


def _written(folder: Path) -> list[Path]:
    """Return the files of a run in a folder, whole ones and pieces, without the manifest."""
    places = [folder, folder / ERRORS, folder / SHARDS]
    files = [path for place in places if place.is_dir() for path in place.iterdir()]
    is_ours = re.compile(rf"{_PART.pattern}|\.(?:{_PART.pattern}|{re.escape(MANIFEST)}){re.escape(TEMPORARY)}")
    return [path for path in files if is_ours.fullmatch(path.name)]


def write_shard(
    folder: Path, shard: Shard, path: str, result: ShardTable, *, kind: OutputFormat, vectors: tuple[str, ...]
) -> Record:
    """Write the files of a shard, and its record when they are on disk. Raises SetupError."""
    files = [write_file(folder, *content) for content in shard_contents(shard, path, result, kind=kind, vectors=vectors)]
    record = record_of(shard, path, result, files)
    write_record(folder, shard, record)
    return record


def shard_contents(
    shard: Shard, path: str, result: ShardTable, *, kind: OutputFormat, vectors: tuple[str, ...]
) -> list[Content]:
    """Return the files of a shard, of which `path` is the input."""
    contents = table_contents(shard.name, kind, result.table, vectors)
    if result.faults:
        lines = ({"file": path, "row": fault.row, "reason": fault.reason} for fault in result.faults)
        contents.append(lines_content(f"{ERRORS}/{shard.name}.jsonl", lines))
    return contents


def record_of(shard: Shard, path: str, result: ShardTable, files: Iterable[OutputFile]) -> Record:
    """Return the record of a shard, of which `path` is the input."""
    counts = result.num_done, result.num_cut, len(result.faults)
    return Record(path, shard.start, shard.stop, *counts, tuple(files))


def write_record(folder: Path, shard: Shard, record: Record) -> None:
    """Write the record of a shard whose files are on disk. Raises SetupError."""
    write_file(folder, f"{SHARDS}/{shard.name}.json", lambda file: file.write(encode(record)))
