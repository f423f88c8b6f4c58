"""Rows of Parquet and Arrow files, some at a time. A batch of an Arrow file is in memory as a whole; a row group is not."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import numpy as np

from whimbrel.bulk.arrow import DataType, RecordBatch, Schema, pa, pc, pq
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
            batches = source.iter_batches(_BATCH_ROWS, row_groups=groups, columns=list(columns), use_threads=False)
        else:
            batches = _arrow_batches(source, columns)
        for batch in cast("Iterator[RecordBatch]", batches):
            skipped = min(max(0, start - row), batch.num_rows)
            if skipped < batch.num_rows:
                yield row + skipped, batch.slice(skipped)
            row += batch.num_rows


def row_sizes(batch: RecordBatch) -> Int64Array:
    """Return about how many bytes each row takes: of texts their own, of other columns the mean."""
    sizes_N = np.full(batch.num_rows, 8 * batch.num_columns, np.int64)
    for column in batch.columns:
        if is_text(column.type) and not pa.types.is_dictionary(column.type):
            sizes_N += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
        else:
            sizes_N += column.nbytes // max(1, batch.num_rows)
    return sizes_N


def is_text(kind: DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def plain_type(kind: DataType) -> DataType:
    """Return the type that a column is written with: texts are strings, and dictionaries their values."""
    if is_text(kind):
        return pa.string()
    return plain_type(kind.value_type) if pa.types.is_dictionary(kind) else kind


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


def _arrow_batches(source: Any, columns: Sequence[str]) -> Iterator[RecordBatch]:
    batches = source
    if isinstance(source, pa.RecordBatchFileReader):
        batches = (source.get_batch(number) for number in range(source.num_record_batches))
    for batch in batches:
        chosen = batch.select(list(columns))
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            yield chosen.slice(start, _BATCH_ROWS)
