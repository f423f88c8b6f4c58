"""Folder of a batch file's answers while it runs on the command line: its journal, what it is a run of, and a lock.

The same command goes on where an earlier one ended. The folder of another input, model or version is refused.
"""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Final

import msgspec

from whimbrel.errors import SetupError
from whimbrel.server.batches.journal import Journal, read_progress, read_record, size_of, sync_folder, write_record

ANSWERS: Final = "answers.jsonl"
_IDENTITY: Final = "run.json"
_LOCK: Final = "lock"


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """All that the answers of a run depend on."""

    version: str
    input_sha256: str
    model: str
    revision: str
    options: dict[str, str]


@contextmanager
def partial_run(out: Path, identity: RunIdentity, *, restart: bool) -> Generator[Journal]:
    """Open the journal of the run that gives a file. When the block ends, without an error, the file is there.

    Raises SetupError if another process writes it, or if another run left its answers; with `restart` these are dropped.
    """
    folder = out.with_name(f"{out.name}.partial")
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SetupError(f"another run writes {out} now.", hint="wait for it, or choose another --output-file") from None
        _prepare(folder, identity, restart=restart)
        size = read_progress(folder).sizes.get(ANSWERS, 0)
        if size and not (folder / ANSWERS).exists() and size_of(out) == size:
            out.replace(folder / ANSWERS)  # an earlier run was killed after its last line, before the folder was removed
        journal = Journal(folder, (ANSWERS,))
        try:
            yield journal
        finally:
            journal.close()
        (folder / ANSWERS).replace(out)
        sync_folder(out.parent)
        rmtree(folder)
    finally:
        os.close(lock)


def _prepare(folder: Path, identity: RunIdentity, *, restart: bool) -> None:
    try:
        before = read_record(folder / _IDENTITY, RunIdentity)
    except ValueError:
        before = RunIdentity(version="unknown", input_sha256="", model="", revision="", options={})
    if before is not None and before != identity:
        if not restart:
            names = [name for name in identity.__struct_fields__ if getattr(before, name) != getattr(identity, name)]
            words = ", ".join("input" if name == "input_sha256" else name for name in names)
            raise SetupError(
                f"{folder} has the answers of another run: it differs in {words}.", hint="--restart drops them and starts anew"
            )
        before = None
    if before is None or restart:
        for file in folder.iterdir():
            if file.name != _LOCK:
                file.unlink()
        write_record(folder / _IDENTITY, identity)
