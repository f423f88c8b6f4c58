"""Rows of shards: their texts, the columns that are copied, and the faults of rows that cannot be run.

A row is either among the texts or among the faults.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple, cast

import numpy as np
import orjson

from whimbrel.bulk.arrow import DataType, RecordBatch, Schema, Table, pa
from whimbrel.bulk.files import InputFile, open_lines, reading, skip_to, state_of
from whimbrel.bulk.lines import Record, Start, read_header, records
from whimbrel.bulk.manifest import ColumnNames, Shard, Text
from whimbrel.bulk.survey import columns_of
from whimbrel.bulk.tables import broken_rows, plain, read_batches
from whimbrel.errors import SetupError
from whimbrel.types.arrays import Int64Array

_KINDS: Final[Mapping[object, str]] = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class Fault(NamedTuple):
    """A row that is refused."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class ShardRows:
    """The rows of a shard."""

    shard: Shard
    path: str
    row_N: Int64Array
    """Numbers of the rows that have a text, in their file."""
    texts: list[Text]
    copied: Table
    """The copied columns of these rows."""
    faults: list[Fault]
    """The other rows."""


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads the shards of the files of a run."""

    files: Sequence[InputFile]
    names: ColumnNames
    schema: Schema
    """Copied columns."""
    states: Sequence[tuple[object, ...]]
    """State of each file before the survey."""

    def read(self, shards: Sequence[Shard]) -> Iterator[ShardRows]:
        """Yield the rows of shards, which come in the order of the input. Raises SetupError, also for a file that changed."""
        for number, of_file in groupby(shards, key=lambda shard: shard.file):
            file = self.files[number]
            read = self._read_lines if file.is_lines else self._read_table
            for rows in read(file, list(of_file)):
                if state_of(file) != self.states[number]:
                    raise _changed(file)
                yield rows

    def _read_lines(self, file: InputFile, shards: list[Shard]) -> Iterator[ShardRows]:
        with reading(file), open_lines(file) as stream:
            header, _ = read_header(stream) if file.format == "csv" else ([], 0)
        with reading(file), open_lines(file) as stream:
            skip_to(stream, shards[0].offset)
            found = records(stream, file.format, Start(shards[0].start, shards[0].offset), header)
            for shard in shards:
                collected = _Collected(self.names, self.schema)
                for record in found:
                    if record.row >= shard.start:
                        collected.add(record)
                    if record.row >= shard.stop - 1:
                        break
                yield collected.rows(shard, file.path)

    def _read_table(self, file: InputFile, shards: list[Shard]) -> Iterator[ShardRows]:
        columns = columns_of(file, self.names)
        batches = read_batches(file, columns, shards[0].start)
        first, batch = _next(batches, file)
        for shard in shards:
            parts: list[RecordBatch] = []
            while True:
                begin, end = max(first, shard.start), min(first + batch.num_rows, shard.stop)
                if begin < end:
                    parts.append(batch.slice(begin - first, end - begin))
                if first + batch.num_rows >= shard.stop:
                    break
                first, batch = _next(batches, file)
            yield table_rows(pa.Table.from_batches(parts), shard, file.path, self.names, self.schema)


def table_rows(table: Table, shard: Shard, path: str, names: ColumnNames, schema: Schema) -> ShardRows:
    """Return the rows of a shard of a table, of which `schema` names the columns to copy."""
    table = plain(table)
    broken = broken_rows(table)
    rows = [row for row in range(table.num_rows) if row not in broken]
    whole = table.take(np.array(rows, np.int64)) if broken else table
    values = {name: whole.column(name).to_pylist() for name in names.texts}
    ids = whole.column(names.id).to_pylist() if names.id else None
    faults = [Fault(shard.start + row, f"{name} is not UTF-8") for row, name in broken.items()]
    good, texts = list[int](), list[Text]()
    for index, row in enumerate(rows):
        text, reason = read_text({name: column[index] for name, column in values.items()}, names)
        if ids is not None and not reason:
            reason = _fault_of_id(ids[index], str(names.id))
        if reason:
            faults.append(Fault(shard.start + row, reason))
        else:
            good.append(row)
            texts.append(text)
    good_N = np.array(good, np.int64)
    copied = table.select(schema.names).take(good_N).cast(schema)
    return ShardRows(shard, path, good_N + shard.start, texts, copied, faults)


def _changed(file: InputFile) -> SetupError:
    hint = "what was written before is as it was; run again when the file is whole"
    return SetupError(f"{file.path} changed while it was read.", hint=hint)


def _next(batches: Iterator[tuple[int, RecordBatch]], file: InputFile) -> tuple[int, RecordBatch]:
    """Return the next batch, which a file has that is as it was. Raises SetupError."""
    if (found := next(batches, None)) is None:
        raise _changed(file)
    return found


class _Collected:
    """The records of a shard, column by column."""

    def __init__(self, names: ColumnNames, schema: Schema) -> None:
        self._names = names
        self._schema = schema
        self._values: list[list[Any]] = [[] for _ in schema]
        self._row_N: list[int] = []
        self._texts: list[Text] = []
        self._faults: list[Fault] = []

    def add(self, record: Record) -> None:
        values, reason = record.values, record.fault
        if values is None:
            if reason:
                self._faults.append(Fault(record.row, reason))
            return
        text, reason = read_text(values, self._names)
        if self._names.id and not reason:
            reason = _fault_of_id(values.get(self._names.id), self._names.id)
        copied = list[Any]()
        try:
            copied = [_fit(values.get(field.name), field.type) for field in self._schema] if not reason else []
        except TypeError:
            reason = "a value is nested too deeply to be copied"
        if reason:
            self._faults.append(Fault(record.row, reason))
            return
        self._row_N.append(record.row)
        self._texts.append(text)
        for value, column in zip(copied, self._values, strict=True):
            column.append(value)

    def rows(self, shard: Shard, path: str) -> ShardRows:
        columns = [pa.array(column, field.type) for field, column in zip(self._schema, self._values, strict=True)]
        copied = pa.Table.from_arrays(columns, schema=self._schema)
        return ShardRows(shard, path, np.array(self._row_N, np.int64), self._texts, copied, self._faults)


def _fault_of_id(value: Any, name: str) -> str:
    """Return the reason why a row has no id, if it has none."""
    if value is None or value == "":
        return f"{name} is missing"
    is_id = isinstance(value, str | int) and not isinstance(value, bool)
    return "" if is_id else f"{name} is {_KINDS.get(type(cast(object, value)), 'no id')}; ids are texts or whole numbers"


def read_text(values: dict[str, Any], names: ColumnNames) -> tuple[Text, str]:
    """Return the text of a row, with its query if there is one, and the reason why it has none."""
    text, reason = _join(values, names.text, names.separator)
    if names.query is None or reason:
        return text, reason
    query, reason = _join(values, (names.query,), "")
    return (query, text), reason


def _join(values: dict[str, Any], names: Sequence[str], separator: str) -> tuple[str, str]:
    """Return the texts of columns as one, without those that are empty, and the reason why there is none."""
    parts = list[str]()
    for name in names:
        if name not in values:
            return "", f"has no {name}"
        value = values[name]
        if value is None:
            return "", f"{name} is null"
        if not isinstance(value, str):
            return "", f"{name} is {_KINDS.get(type(cast(object, value)), 'no text')}, no text"
        if value:
            parts.append(value)
    text = separator.join(parts)
    return (text, "") if text.strip() else ("", f"{', '.join(names)}: the text is empty")


def _fit(value: Any, kind: DataType) -> Any:
    """Return a value of JSON as its column takes it: in a column of strings, other values become their JSON."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else orjson.dumps(value).decode()
    return float(value) if pa.types.is_floating(kind) else value
