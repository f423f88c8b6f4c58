"""Output files: each is written beside its place, synced, and renamed to it, so a file that has its name is whole.

A vector column has lists of a fixed size. Files have the same bytes for the same table: row groups, encodings and compression
are fixed here.
"""

import errno
import hashlib
import io
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from whimbrel.bulk.arrow import DataType, Field, Schema, Table, pa, pq
from whimbrel.bulk.manifest import OutputFile
from whimbrel.errors import SetupError
from whimbrel.wire.json_base64 import to_json

OutputFormat: TypeAlias = Literal["parquet", "arrow", "npy"]
TEMPORARY: Final = ".tmp"
_ROW_GROUP: Final = 8192
_ZSTD_LEVEL: Final = 3
_INT8: Final = "Int(bitWidth=8, isSigned=true)"


class _HashingFile:
    """A file that is written from its beginning to its end, with its size and SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.digest.update(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def write_file(folder: Path, path: str, write: Callable[[Any], None]) -> OutputFile:
    """Write a file of a folder whole, or leave it as it was. Raises SetupError."""
    target = folder / path
    temporary = target.with_name(f".{target.name}{TEMPORARY}")
    with writing(target):
        try:
            with temporary.open("wb") as file:
                hashing = _HashingFile(file)
                write(hashing)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(target.parent)
    return OutputFile(path, hashing.size, hashing.digest.hexdigest())


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turn an OSError into a SetupError that names the file."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "what is finished stays; make room, and the same command goes on" if is_full else None
        raise SetupError(f"cannot write {path}: {error.strerror or error}.", hint=hint) from None


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Content(NamedTuple):
    """A file that is not written yet."""

    path: str
    """Path in the folder of the run."""
    write: Callable[[Any], None]
    """Writes the bytes into an open file."""

    def in_memory(self) -> tuple[OutputFile, bytes]:
        """Return what the file will be on disk, and its bytes."""
        memory = io.BytesIO()
        hashing = _HashingFile(memory)
        self.write(hashing)
        return OutputFile(self.path, hashing.size, hashing.digest.hexdigest()), memory.getvalue()


def table_contents(name: str, kind: OutputFormat, table: Table, vectors: tuple[str, ...]) -> list[Content]:
    """Return the files of a shard's table, of which `vectors` names the columns with vectors."""
    if kind == "npy":
        return _npy_contents(name, table, vectors)
    write = _write_parquet if kind == "parquet" else _write_arrow
    return [Content(f"{name}.{kind}", partial(write, table=table, vectors=vectors))]


def _write_parquet(file: Any, table: Table, vectors: tuple[str, ...]) -> None:
    leaves = _leaves(table.schema)
    own = [path for path in leaves if path.partition(".")[0] not in vectors]
    small = [path for path, is_small in leaves.items() if is_small]  # a byte each, by a dictionary: Parquet has no int8 itself
    compression = dict.fromkeys(own, "zstd")
    options: dict[str, Any] = {
        "compression": compression or "none",
        "use_dictionary": sorted({*own, *small}) or False,
        "write_statistics": own or False,
    }
    if own:
        options["compression_level"] = dict.fromkeys(own, _ZSTD_LEVEL)
    with pq.ParquetWriter(file, table.schema, **options) as writer:
        writer.write_table(table, row_group_size=_ROW_GROUP)


def _leaves(schema: Schema) -> dict[str, bool]:
    """Return the paths of the columns that Parquet stores, and whether they hold int8."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    stored = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    columns = [stored.column(index) for index in range(len(stored))]
    return {column.path: str(column.logical_type) == _INT8 for column in columns}


def _write_arrow(file: Any, table: Table, vectors: tuple[str, ...]) -> None:
    del vectors
    with pa.ipc.new_file(file, table.schema) as writer:
        for batch in table.combine_chunks().to_batches(_ROW_GROUP):
            writer.write_batch(batch)


def _npy_contents(name: str, table: Table, vectors: tuple[str, ...]) -> list[Content]:
    arrays = [Content(f"{name}.{column}.npy", partial(_write_array, table=table, column=column)) for column in vectors]
    return [*arrays, lines_content(f"{name}.ids.jsonl", _rows_of(table.drop_columns(list(vectors))))]


def _write_array(file: Any, table: Table, column: str) -> None:
    size = table.schema.field(column).type.list_size
    np.save(file, table.column(column).combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, size))


def holds(kind: OutputFormat, field: Field) -> bool:
    """Return whether files of a format hold a column that is copied."""
    try:
        table = pa.table([pa.nulls(1, field.type)], [field.name]).take([0])
        for content in table_contents("", kind, table, ()):
            content.in_memory()
    except pa.ArrowException:
        return False
    return kind != "npy" or _is_json(_json_type(field.type))


def _is_json(kind: DataType) -> bool:
    types = pa.types
    if types.is_nested(kind) and not types.is_union(kind):
        return all(_is_json(kind.field(index).type) for index in range(kind.num_fields))
    is_value = types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    is_time = types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind)
    return is_value or types.is_string(kind) or kind == pa.uuid() or (is_time and _json_type(kind) == kind)


def _json_type(kind: DataType) -> DataType:
    """Return the type in which a column becomes JSON: a string of numbers and times that have more digits than JSON's."""
    is_time = pa.types.is_timestamp(kind) or pa.types.is_time64(kind)
    return pa.string() if pa.types.is_decimal(kind) or (is_time and kind.unit == "ns") else kind


def _rows_of(table: Table) -> Iterator[Mapping[str, Any]]:
    table = table.cast(pa.schema([field.with_type(_json_type(field.type)) for field in table.schema]))
    for batch in table.to_batches(_ROW_GROUP):
        yield from batch.to_pylist()


def lines_content(path: str, rows: Iterable[Mapping[str, Any]]) -> Content:
    """Return a file of JSON lines."""
    return Content(path, partial(_write_lines, rows=rows))


def _write_lines(file: Any, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = iter(rows)
    while block := b"".join(to_json(row) + b"\n" for row in islice(lines, _ROW_GROUP)):
        file.write(block)
