"""Survey of the input: one pass before the run, which counts rows, finds types, cuts shards and hashes the bytes.

A file that is wrong as a whole is found here, before anything is computed. A row that is wrong alone is not.
"""

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np

from whimbrel.bulk.arrow import DataType, Schema, pa
from whimbrel.bulk.files import InputFile, open_lines, reading, sha256_of
from whimbrel.bulk.lines import TEXT_COLUMN, Start, read_header, records
from whimbrel.bulk.manifest import ColumnNames, Input
from whimbrel.bulk.tables import is_text, plain_type, read_batches, read_schema, row_sizes, whole_values
from whimbrel.errors import SetupError

_HASHING_THREADS: Final = 4
_MAX_COLUMNS: Final = 1000
_MAX_IDS: Final = 2**24
_INT64: Final = 2**63
_EXACT: Final = 2**53


class ShardLimits(NamedTuple):
    """Bounds of a shard."""

    rows: int
    bytes: int


class Doubled(NamedTuple):
    """A row whose id an earlier row has."""

    path: str
    row: int
    first_path: str
    first_row: int


class Surveyed(NamedTuple):
    """The result of a survey."""

    inputs: list[Input]
    schema: Schema
    """Columns that are copied."""
    doubled: list[Doubled]


class _Ids:
    """Hashes of ids, of which two equal ones are taken for one id. Those beyond the first 16 million are not compared."""

    def __init__(self) -> None:
        self._hashes = array("q")
        self._places = array("q")

    def add(self, value: Any, place: int) -> None:
        """Add the id of a row, which is the `place`-th of all files."""
        if value not in (None, "") and len(self._hashes) < _MAX_IDS:
            self._hashes.append(hash(str(value)))
            self._places.append(place)

    def doubled(self, inputs: Sequence[Input]) -> list[Doubled]:
        hashes_N, places_N = np.array(self._hashes, np.int64), np.array(self._places, np.int64)
        order_N = np.argsort(hashes_N, kind="stable")
        sorted_N = hashes_N[order_N]
        first_N = np.searchsorted(sorted_N, sorted_N)  # the first row with this id, as the sort is stable
        again = np.flatnonzero(first_N != np.arange(first_N.size))
        pairs = zip(places_N[order_N[again]].tolist(), places_N[order_N[first_N[again]]].tolist(), strict=True)
        begins = np.cumsum([0, *(file.rows for file in inputs)])

        def locate(place: int) -> tuple[str, int]:
            number = int(np.searchsorted(begins, place, side="right")) - 1
            return inputs[number].path, place - int(begins[number])

        return [Doubled(*locate(place), *locate(first)) for place, first in sorted(pairs)]


class _Cutter:
    """Cuts of a file, as its rows come."""

    def __init__(self, limits: ShardLimits, before: int) -> None:
        """`before` is the number of rows of the files before."""
        self.cuts: list[tuple[int, int]] = []
        self.rows = 0
        self._limits = limits
        self._bytes = 0
        self._before = before

    @property
    def place(self) -> int:
        """Place of the next row among those of all files."""
        return self._before + self.rows

    def add(self, size: int, offset: int = 0) -> None:
        is_full = self.cuts and self.rows - self.cuts[-1][0] >= self._limits.rows
        if is_full or not self.cuts or self._bytes + size > self._limits.bytes:
            self.cuts.append((self.rows, offset))
            self._bytes = 0
        self._bytes += size
        self.rows += 1


def hash_files(files: Sequence[InputFile]) -> list[str]:
    """Return the SHA-256 of each file. Raises SetupError."""
    with _hashing(files) as hashes:
        return list(hashes)


@contextmanager
def _hashing(files: Sequence[InputFile]) -> Generator[Iterator[str]]:
    """Hash files beside the block. After an error it waits for no file."""
    threads = ThreadPoolExecutor(_HASHING_THREADS)
    try:
        yield threads.map(sha256_of, files)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def survey(files: Sequence[InputFile], names: ColumnNames, limits: ShardLimits) -> Surveyed:
    """Return the files with their shards, the types of the columns that are copied, and ids that occur twice.

    Raises SetupError.
    """
    lines, ids, tables, cutters = _LineColumns(names), _Ids(), list[tuple[str, Schema]](), list[_Cutter]()
    with _hashing(files) as hashes:
        for file in files:
            cutters.append(cutter := _Cutter(limits, cutters[-1].place if cutters else 0))
            if file.is_lines:
                _survey_lines(file, lines, cutter, ids)
            else:
                tables.append((file.path, _survey_table(file, names, cutter, ids)))
        found = [
            Input(file.path, file.size, sha256, cutter.rows, tuple(cutter.cuts))
            for file, cutter, sha256 in zip(files, cutters, hashes, strict=True)
        ]
    schemas = [*tables, *lines.schemas([file.path for file in files if file.is_lines])]
    return Surveyed(found, _common(schemas), ids.doubled(found))


def columns_of(file: InputFile, names: ColumnNames) -> list[str]:
    """Return the columns of a table that a run reads. Raises SetupError."""
    schema = read_schema(file)
    wanted = names.wanted
    for name in wanted:
        if schema.get_all_field_indices(name) == []:
            raise SetupError(f"{file.path} has no column {name!r}; it has {_list(schema.names)}.")
    all_names = wanted if names.keep is not None else [*wanted, *schema.names]
    for name in dict.fromkeys(all_names):
        if len(schema.get_all_field_indices(name)) > 1:
            raise SetupError(f"{file.path} has several columns {name!r}.", hint="name the others with --keep")
    return list(dict.fromkeys(all_names))


def _survey_table(file: InputFile, names: ColumnNames, cutter: _Cutter, ids: _Ids) -> Schema:
    schema, columns = read_schema(file), columns_of(file, names)
    for name in names.texts:
        if not is_text(kind := schema.field(name).type) and not pa.types.is_null(kind):
            raise SetupError(f"{file.path}: the column {name!r} is {kind}, no text.")
    if names.id and not (is_text(kind := plain_type(schema.field(names.id).type)) or pa.types.is_integer(kind)):
        raise SetupError(f"{file.path}: the column {names.id!r} is {kind}; ids are texts or whole numbers.")
    for _, batch in read_batches(file, columns):
        values = whole_values(batch.column(columns.index(names.id))) if names.id else ()
        for index, value in enumerate(values):
            ids.add(value, cutter.place + index)
        for size in row_sizes(batch).tolist():
            cutter.add(size)
    kept = [name for name in columns if name in _kept(names, columns)]
    return pa.schema([pa.field(name, plain_type(schema.field(name).type)) for name in kept])


def _kept(names: ColumnNames, columns: Iterable[str]) -> list[str]:
    """Return the columns that are copied, the id first."""
    own = [names.id] if names.id else []
    if names.keep is not None:
        return list(dict.fromkeys([*own, *names.keep]))
    return list(dict.fromkeys([*own, *(name for name in columns if name not in names.texts)]))


def _survey_lines(file: InputFile, columns: "_LineColumns", cutter: _Cutter, ids: _Ids) -> None:
    with reading(file), open_lines(file) as stream:
        header, offset = read_header(stream) if file.format == "csv" else ([], 0)
        if any("\ufffd" in name for name in header):
            raise SetupError(f"{file.path}: its header is not UTF-8.")
        if len(set(header)) < len(header):
            raise SetupError(f"{file.path} has several columns of one name: {_list(header)}.")
        if file.format == "csv" and file.size:
            columns.add_header(file.path, header)
        if file.format == "text":
            columns.add_header(file.path, [TEXT_COLUMN])
        adds, id_name = file.format == "jsonl", columns.id_name
        for record in records(stream, file.format, Start(0, offset), header):
            if adds and record.values is not None:
                columns.add(record.values)
            if id_name and record.values is not None:
                ids.add(record.values.get(id_name), cutter.place)
            cutter.add(record.size, record.offset)


class _LineColumns:
    """Columns of all files of lines together, with the narrowest type of each."""

    def __init__(self, names: ColumnNames) -> None:
        self._names = names
        self.id_name = names.id
        self._wanted = None if names.keep is None else set(_kept(names, ()))
        self._types: dict[str, DataType] = {}
        self._found: dict[str, None] = {}
        self._large = set[str]()
        """Columns with whole numbers that float64 does not hold."""

    def add_header(self, path: str, header: list[str]) -> None:
        for name in self._names.wanted:
            if name not in header:
                raise SetupError(f"{path} has no column {name!r}; it has {_list(header)}.")
        for name in header:
            self._widen(name, pa.string())

    def add(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if type(value) is int and abs(value) > _EXACT:
                self._large.add(name)
            self._widen(name, _type_of(value))

    def _widen(self, name: str, kind: DataType | None) -> None:
        self._found[name] = None
        if len(self._found) > _MAX_COLUMNS:
            raise SetupError(f"the lines have more than {_MAX_COLUMNS:,} columns.", hint="name those to keep with --keep")
        if kind is None or (self._wanted is not None and name not in self._wanted):
            return
        before = self._types.get(name)
        if before is None or before == kind:
            self._types[name] = kind
        elif {before, kind} == {pa.int64(), pa.float64()} and name not in self._large:
            self._types[name] = pa.float64()
        else:
            self._types[name] = pa.string()

    def schemas(self, paths: list[str]) -> list[tuple[str, Schema]]:
        """Return the schema of all files, none if there are none or if they have no row. Raises SetupError."""
        if not paths or not self._found:
            return []
        for name in self._names.wanted:
            if name not in self._found:
                raise SetupError(f"no row of {paths[0]} has {name!r}; they have {_list(list(self._found))}.")
        if self._names.id and self._types.get(self._names.id) not in (pa.string(), pa.int64()):
            raise SetupError(f"{paths[0]}: {self._names.id!r} is no id; ids are texts or whole numbers.")
        kept = _kept(self._names, self._found)
        return [(paths[0], pa.schema([pa.field(name, self._types.get(name, pa.string())) for name in kept]))]


def _type_of(value: Any) -> DataType | None:
    """Return the type of a value of JSON; None for null, which every type holds."""
    if value is None:
        return None
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -_INT64 <= value < _INT64 else pa.string()
    return pa.float64() if isinstance(value, float) else pa.string()


def _common(schemas: list[tuple[str, Schema]]) -> Schema:
    """Return the columns of all files, which must agree, but in those that are null in a file. Raises SetupError."""
    found: dict[str, tuple[str, DataType]] = {}
    hint = "name the columns to keep with --keep, or run the files apart"
    for path, schema in schemas:
        for one, other in ((schemas[0], (path, schema)), ((path, schema), schemas[0])):
            if lacking := [name for name in one[1].names if name not in other[1].names]:
                raise SetupError(f"{one[0]} has a column {lacking[0]!r}, and {other[0]} has none.", hint=hint)
        for name, kind in zip(schema.names, schema.types, strict=True):
            before, known = found.setdefault(name, (path, kind))
            if pa.types.is_null(known):
                found[name] = path, kind
            elif known != kind and not pa.types.is_null(kind):
                raise SetupError(f"the column {name!r} is {known} in {before} and {kind} in {path}.", hint=hint)
    return pa.schema([pa.field(name, kind) for name, (_, kind) in found.items()])


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"{', '.join(map(repr, names[:12]))}{more}" if names else "none"
