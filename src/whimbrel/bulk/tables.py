"""Rows of Parquet and Arrow files, some at a time. A batch of an Arrow file is in memory as a whole; a row group is not."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, cast

import numpy as np

from whimbrel.bulk.arrow import Array, DataType, RecordBatch, Schema, Table, pa, pc, pq
from whimbrel.bulk.files import InputFile, open_file, reading
from whimbrel.errors import SetupError
from whimbrel.types.arrays import Int64Array

_BATCH_ROWS: Final = 1024
_ARROW_FILE: Final = b"ARROW1"


def read_schema(file: InputFile) -> Schema:
    """Return the columns of a file. Raises SetupError."""
    with _opened(file) as source:
        return source.schema_arrow if isinstance(source, pq.ParquetFile) else source.schema


def read_batches(file: InputFile, columns: Sequence[str], start: int = 0) -> Iterator[tuple[int, RecordBatch]]:
    """Yield the columns of the rows from `start`, with the number of the first row of each batch. Raises SetupError."""
    row = 0
    with _opened(file) as source:
        if isinstance(source, pq.ParquetFile):
            groups = list[int]()
            for number in range(source.num_row_groups):
                size = source.metadata.row_group(number).num_rows
                if row + size <= start and not groups:
                    row += size
                else:
                    groups.append(number)
            options: dict[str, Any] = {"columns": list(columns), "use_threads": False}
            batches = source.iter_batches(_BATCH_ROWS, row_groups=groups, **options) if groups else ()
        else:
            batches = _arrow_batches(source)
        for each in cast("Iterator[RecordBatch]", batches):
            batch = plain(each.select(list(columns)))
            skipped = min(max(0, start - row), batch.num_rows)
            if skipped < batch.num_rows:
                yield row + skipped, batch.slice(skipped)
            row += batch.num_rows


def row_sizes(batch: RecordBatch) -> Int64Array:
    """Return about how many bytes each row takes: of texts their own, of other columns the mean."""
    sizes_N = np.full(batch.num_rows, 8 * batch.num_columns, np.int64)
    for column in batch.columns:
        if is_text(column.type):
            sizes_N += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
        else:
            with suppress(pa.ArrowTypeError):  # views, of which older versions of pyarrow do not know the size
                sizes_N += column.nbytes // max(1, batch.num_rows)
    return sizes_N


def broken_rows(table: Table) -> dict[int, str]:
    """Return the rows with bytes that are not as their column says, such as texts that are not UTF-8, with the column."""
    columns = zip(table.column_names, table.columns, strict=True)
    return {row: name for name, column in columns for row in _broken_of(column)}


def whole_values(column: Array) -> list[Any]:
    """Return the values of a column, None in place of those whose bytes are not as the column says."""
    broken = set(_broken_of(column))
    return [None if row in broken else column[row].as_py() for row in range(len(column))] if broken else column.to_pylist()


def _broken_of(column: Array) -> list[int]:
    return [] if _is_whole(column) else [row for row in range(len(column)) if not _is_whole(column.slice(row, 1))]


def _is_whole(column: Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def plain(table: Any) -> Any:
    """Return a table or batch whose columns have plain types."""
    return table.cast(pa.schema([field.with_type(plain_type(field.type)) for field in table.schema]))


def is_text(kind: DataType) -> bool:
    return pa.types.is_string(plain_type(kind))


def plain_type(kind: DataType) -> DataType:
    """Return the type in which a column is read and written: texts are strings, and dictionaries their values."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) else kind


@contextmanager
def _opened(file: InputFile) -> Generator[Any]:
    with reading(file), open_file(file) as stream:
        if file.size == 0:
            raise SetupError(f"cannot read {file.path}: it is empty, and no {file.format} file.")
        if file.format == "parquet":
            with pq.ParquetFile(stream) as source:
                yield source
            return
        is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE
        stream.seek(0)  # not mapped into memory: a file that is cut meanwhile would end the process
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(stream) as source:
            yield source


def _arrow_batches(source: Any) -> Iterator[RecordBatch]:
    batches = source
    if isinstance(source, pa.RecordBatchFileReader):
        batches = (source.get_batch(number) for number in range(source.num_record_batches))
    for batch in batches:
        batch.validate()
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            yield batch.slice(start, _BATCH_ROWS)
