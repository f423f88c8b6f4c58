"""Source of the rows: the finished parts of a bulk run's folder, checked and read a piece at a time. Nothing is written there.

A row's key is its id. It is made where ids do not name rows: of file and row in a run without ids, and with the number of the
chunk in a run of chunks. So the same run gives the same keys.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.json  # pyright: ignore[reportMissingTypeStubs]

from whimbrel.bulk.arrow import Array, Schema, Table, pa, pc, pq
from whimbrel.bulk.compute import TableForm, form_of
from whimbrel.bulk.folder import DOUBLED, read_finished
from whimbrel.bulk.manifest import MANIFEST, Manifest, Record, Shard, read_manifest
from whimbrel.errors import SetupError
from whimbrel.stores.form import KEY, VECTORS, plain_type

_json: Final[Any] = pyarrow.json
_AGAIN: Final = "the same `whimbrel run` command computes what is missing"


@dataclass(frozen=True, slots=True)
class RunSource:
    """The rows of a run."""

    folder: Path
    manifest: Manifest
    form: TableForm
    outputs: tuple[str, ...]
    """Outputs to store."""
    parts: tuple[tuple[Shard, Record], ...]
    """Finished parts, in their order."""
    num_doubled: int
    """Rows that have the id of an earlier row."""

    @property
    def key(self) -> str:
        return self.manifest.options["id"] if self.form.has_id and self.form.chunking is None else KEY

    @property
    def schema(self) -> Schema:
        """Columns as `read` gives them."""
        fields = [field.with_type(plain_type(field.type)) for field in self.form.schema if field.name in self._wanted]
        fields = [_as_float(field) if field.name in VECTORS else field for field in fields]
        return pa.schema(([pa.field(KEY, pa.string())] if self.key == KEY else []) + fields)

    @property
    def _wanted(self) -> set[str]:
        return {name for name in self.form.schema.names if name not in self.form.widths or name in self.outputs}

    def read(self, shard: Shard, rows: int) -> Iterator[Table]:
        """Yield tables of at most this many rows of a part. Raises SetupError."""
        kind, stem = self.manifest.options["out_format"], self.folder / shard.name
        path = stem.with_suffix(f".{'ids.jsonl' if kind == 'npy' else kind}")
        with _reading(path):
            for table in _READERS[kind](path, self.form, rows):
                wanted = table.select([name for name in self.form.schema.names if name in self._wanted])
                yield self._keyed(wanted).cast(self.schema)

    def _keyed(self, table: Table) -> Table:
        if self.key != KEY:
            return table
        own = [self.manifest.options["id"]] if self.form.has_id else ["file", "row"]
        names = own if self.form.chunking is None else [*own, "chunk"]
        parts = [table.column(name).cast(plain_type(table.column(name).type)).cast(pa.string()) for name in names]
        return table.add_column(0, KEY, pc.binary_join_element_wise(*parts, "#"))


def open_run(folder: Path, outputs: Sequence[str] = (), *, unfinished: bool, verify: bool, last_of_doubled: bool) -> RunSource:
    """Return the rows of a run's folder. Raises SetupError for a folder that has no rows, or not all that it should have."""
    manifest = read_manifest(folder) if folder.is_dir() else None
    if manifest is None:
        reason = f"it has no {MANIFEST}" if folder.is_dir() else "there is no such folder"
        raise SetupError(f"{folder} is no folder of a run: {reason}.", hint="it takes what `whimbrel run ... --out DIR` wrote")
    try:
        form, _ = form_of(manifest), _READERS[manifest.options["out_format"]]
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise SetupError(f"{folder / MANIFEST} does not say what the run wrote: {error}.") from None
    if unknown := [name for name in outputs if name not in form.widths]:
        raise SetupError(f"{folder} has no output {unknown[0]!r}; it has {', '.join(form.widths)}.")
    if (not form.has_id or form.chunking is not None) and KEY in form.schema.names:
        raise SetupError(f"{folder}: a column is named {KEY!r}, as that of the keys that are made.")
    parts = _finished_parts(folder, manifest, unfinished=unfinished, verify=verify)
    num_doubled = _count_lines(folder / DOUBLED)
    if num_doubled and form.chunking is None and not last_of_doubled:
        hint = f"{DOUBLED} there names them; --last-of-doubled keeps the last row of each id"
        raise SetupError(f"{folder} repeats ids; rows with the id of an earlier row: {num_doubled:,}.", hint=hint)
    return RunSource(folder, manifest, form, tuple(outputs or form.widths), parts, num_doubled)


def _finished_parts(folder: Path, manifest: Manifest, *, unfinished: bool, verify: bool) -> tuple[tuple[Shard, Record], ...]:
    """Return the parts whose files are as they were written. Raises SetupError if others are missing, or if none has rows."""
    shards = list(manifest.shards())
    found = list[tuple[Shard, Record]]()
    for shard in shards:
        record, fault = read_finished(folder, manifest, shard, verify=verify)
        if fault:
            raise SetupError(f"{folder}: {fault}.", hint=_AGAIN)
        if record is not None:
            found.append((shard, record))
    if len(found) < len(shards) and not unfinished:
        hint = f"{_AGAIN}; --unfinished stores what there is"
        raise SetupError(f"{folder} has {len(found):,} of {len(shards):,} parts.", hint=hint)
    if not any(record.done for _, record in found):
        raise SetupError(f"{folder} has no rows to store.")
    return tuple(found)


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def _as_float(field: Any) -> Any:
    """Return a field of vectors with float32 in place of int8, which no store's search takes as it is."""
    kind = field.type
    if pa.types.is_fixed_size_list(kind) and pa.types.is_int8(kind.value_type):
        return field.with_type(pa.list_(pa.float32(), kind.list_size))
    if pa.types.is_list(kind):
        return field.with_type(pa.list_(_as_float(pa.field("item", kind.value_type)).type))
    return field


def _read_parquet(path: Path, form: TableForm, rows: int) -> Iterator[Table]:
    del form
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=rows):
            yield pa.Table.from_batches([batch])


def _read_arrow(path: Path, form: TableForm, rows: int) -> Iterator[Table]:
    del form
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
        for number in range(file.num_record_batches):
            table = pa.Table.from_batches([file.get_batch(number)])
            for start in range(0, table.num_rows, rows):
                yield table.slice(start, rows)


def _read_npy(path: Path, form: TableForm, rows: int) -> Iterator[Table]:
    own = pa.schema([field for field in form.schema if field.name not in form.widths])
    options = _json.ParseOptions(explicit_schema=own, unexpected_field_behavior="error")
    table = _json.read_json(path, parse_options=options)
    stem = path.name.removesuffix(".ids.jsonl")
    arrays = {name: np.load(path.with_name(f"{stem}.{name}.npy"), mmap_mode="r", allow_pickle=False) for name in form.widths}
    for start in range(0, table.num_rows, rows):
        piece = table.slice(start, rows)
        for name, values in arrays.items():
            piece = piece.append_column(name, _list_column(values[start : start + rows], form.schema.field(name).type))
        yield piece


def _list_column(rows_ND: Any, kind: Any) -> Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(rows_ND).reshape(-1), kind.value_type), type=kind)


_READERS: Final = {"parquet": _read_parquet, "arrow": _read_arrow, "npy": _read_npy}


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, ValueError) as error:
        raise SetupError(f"cannot read {path}: {str(error).rstrip('.')}.", hint=_AGAIN) from None
