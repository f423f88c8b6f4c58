"""What `whimbrel embed` reads and writes: lines of texts, and vectors as JSONL or .npy. Knows nothing of engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from whimbrel.errors import SetupError

_LINES_AT_ONCE: Final = 2048


def read_lines(stream: BinaryIO) -> Iterator[str]:
    """Lines of UTF-8, without their ends and a byte order mark. Raises SetupError."""
    for number, line in enumerate(stream, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise SetupError(f"line {number} of stdin is not valid UTF-8 (byte {error.start}).") from None


def chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """So many at once that an engine has enough to do, and none waits for the last."""
    chunk: list[str] = []
    for text in texts:
        chunk.append(text)
        if len(chunk) == _LINES_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def write(path: Path | None, pairs: Iterator[tuple[list[str], Any]], *, dimension: int) -> None:
    """Texts with their vectors, (N, dimension), to a file or stdout: an array if its name ends in .npy, else JSONL."""
    if path is not None and path.suffix.lower() == ".npy":
        _write_npy(path, (array for _, array in pairs), dimension)
    else:
        _write_jsonl(path, pairs)


def _write_npy(path: Path, arrays: Iterator[Any], dimension: int) -> None:
    import numpy as np

    parts = list(arrays)
    _writing(path, lambda: np.save(path, np.concatenate(parts) if parts else np.empty((0, dimension), np.float32)))


def _write_jsonl(path: Path | None, pairs: Iterator[tuple[list[str], Any]]) -> None:
    from whimbrel.wire import to_json

    def write() -> None:
        stream = sys.stdout.buffer if path is None else path.open("wb")
        with stream:
            for chunk, vectors in pairs:
                rows = zip(chunk, vectors, strict=True)
                stream.write(b"".join(to_json({"text": text, "embedding": vector}) + b"\n" for text, vector in rows))
                stream.flush()

    _writing(path, write)


def _writing(path: Path | None, write: Callable[[], None]) -> None:
    try:
        write()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SetupError(f"cannot write {path or 'stdout'}: {error.strerror or error}.") from None
