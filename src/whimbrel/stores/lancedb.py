"""Tables of LanceDB, in a folder or an object store.

Rows are merged by their key. Dense and token vectors can be searched. Sparse vectors are a column that is kept, not searched.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from whimbrel.bulk.arrow import Table, pa
from whimbrel.errors import InvalidRequest, SetupError
from whimbrel.stores.form import ALL_WRITTEN, Outcome, StoreForm, VectorColumn, is_text, plain_type
from whimbrel.stores.location import Location
from whimbrel.stores.modules import client_module

_FEWEST_FOR_INDEX: Final = 256


class LanceStore:
    """Table of a database."""

    max_rows = 50_000  # a merge reads the keys of the whole table, so few large ones are quicker
    max_bytes = 2**27

    def __init__(self, place: Location, table: str) -> None:
        self._lancedb = client_module("lancedb", "lancedb")
        self._place, self._name = place, table
        self._table: Any = None
        self._form: StoreForm | None = None

    def prepare(self, form: StoreForm) -> None:
        self._form = form
        schema = pa.schema([*form.fields, *(pa.field(each.name, _type_of(each)) for each in form.vectors)])
        with self._errors():
            database = self._lancedb.connect(self._place.address)
            try:
                self._table = database.open_table(self._name)
            except ValueError:  # there is none
                self._table = database.create_table(self._name, schema=schema, exist_ok=True)
            there = {field.name: field.type for field in self._table.schema}
        for field in schema:
            kind = there.get(field.name)
            if kind is None or _plain(kind) != _plain(field.type):
                was = "no such column" if kind is None else f"a column of type {kind}"
                message = f"table {self._name!r} of {self._place.shown} has {was} {field.name!r}; the run has {field.type}."
                raise SetupError(message, hint="choose another --table, or drop that one")

    def write(self, rows: Table) -> Outcome:
        assert self._form is not None
        with self._errors():
            merge = self._table.merge_insert(self._form.key).when_matched_update_all().when_not_matched_insert_all()
            merge.execute(rows)
        return ALL_WRITTEN

    def finish(self, *, index: bool) -> None:
        assert self._form is not None
        with self._errors():
            self._table.optimize()
            if not index or self._table.count_rows() < _FEWEST_FOR_INDEX:
                return
            for vector in self._form.vectors:
                if vector.kind == "dense":
                    self._table.create_index(metric=vector.distance, vector_column_name=vector.name, index_type="IVF_HNSW_SQ")

    def close(self) -> None:
        self._table = None

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except ValueError as error:
            raise InvalidRequest(f"LanceDB: {error}") from None
        except (OSError, RuntimeError) as error:  # its own clients of object stores have tried again
            hint = "rows that are written stay; the same command goes on"
            raise SetupError(f"cannot write {self._place.shown}: {error}", hint=hint) from None


def _type_of(vector: VectorColumn) -> Any:
    number = pa.float16() if vector.half else pa.float32()
    if vector.kind == "sparse":
        return pa.struct([pa.field("ids", pa.list_(pa.int32())), pa.field("weights", pa.list_(number))])
    dense = pa.list_(number, vector.width)
    return pa.list_(dense) if vector.kind == "multi_vector" else dense


def _plain(kind: Any) -> Any:
    """Return a type as it counts: nullable or not, and of any length of text."""
    return "text" if is_text(plain_type(kind)) else str(kind).replace(" not null", "").replace("element:", "item:")
