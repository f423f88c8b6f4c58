"""Input and output of `whimbrel embed`.

Texts are lines of UTF-8. Vectors are written as JSONL or as a .npy array. Knows nothing of engines.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

from whimbrel.errors import SetupError

_CHUNK_LINES: Final = 2048


def read_lines(stream: BinaryIO) -> Iterator[str]:
    """Yield lines of UTF-8 text without line ends and byte order mark. Raises SetupError."""
    for number, line in enumerate(stream, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise SetupError(f"line {number} of stdin is not valid UTF-8 (byte {error.start}).") from None


def chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of up to 2,048 texts: enough work for an engine, while results appear before the input ends."""
    iterator = iter(texts)
    while chunk := list(islice(iterator, _CHUNK_LINES)):
        yield chunk


def write(path: Path | None, pairs: Iterator[tuple[list[str], Any]], *, dimension: int) -> None:
    """Write texts with their vectors, (N, dimension), to a file, or to stdout if `path` is None.

    A path that ends in .npy gets one array, any other JSONL. Raises SetupError.
    """
    if path is not None and path.suffix.lower() == ".npy":
        _write_npy(path, (array for _, array in pairs), dimension)
    else:
        _write_jsonl(path, pairs)


def _write_npy(path: Path, arrays: Iterator[Any], dimension: int) -> None:
    import numpy as np

    chunks = list(arrays)
    with _write_errors(path):
        np.save(path, np.concatenate(chunks) if chunks else np.empty((0, dimension), np.float32))


def _write_jsonl(path: Path | None, pairs: Iterator[tuple[list[str], Any]]) -> None:
    from whimbrel.wire import to_json

    with _write_errors(path), sys.stdout.buffer if path is None else path.open("wb") as stream:
        for chunk, vectors in pairs:
            rows = zip(chunk, vectors, strict=True)
            stream.write(b"".join(to_json({"text": text, "embedding": vector}) + b"\n" for text, vector in rows))
            stream.flush()


@contextmanager
def _write_errors(path: Path | None) -> Generator[None]:
    """Turn an OSError into a SetupError, except for a reader of stdout that left."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SetupError(f"cannot write {path or 'stdout'}: {error.strerror or error}.") from None
