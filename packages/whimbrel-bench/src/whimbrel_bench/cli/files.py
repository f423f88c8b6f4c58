"""Files of results: whether they can be written, before anything is measured, and their writing."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from whimbrel.errors import SetupError


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON. Raises SetupError."""
    with write_errors(path):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def check_writable(path: Path) -> None:
    """Raise SetupError for a file that cannot be written. A file that exists is left as it is."""
    with write_errors(path):
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()


@contextmanager
def write_errors(path: Path) -> Generator[None]:
    """Turn an OSError into a SetupError."""
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"cannot write {path}: {error.strerror or error}.", hint="choose a file in a folder that exists and takes files"
        ) from None
