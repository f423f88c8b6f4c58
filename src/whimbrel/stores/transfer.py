"""Transfer of a run's rows into a store: part by part, in pieces of bounded memory, with the rows that are refused told apart.

A piece that the store refuses as a whole is sent in halves, so only rows that fail alone are refused. Pieces may be sent twice:
a store keeps one row of each key.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from whimbrel.bulk.arrow import Table, pa
from whimbrel.bulk.job import Totals, Watch
from whimbrel.bulk.manifest import Record, Shard
from whimbrel.errors import InvalidRequest, SetupError, Unavailable
from whimbrel.stores.form import VECTORS, Distance, Outcome, Refused, Store, StoreForm, VectorColumn
from whimbrel.stores.retry import Retry
from whimbrel.stores.source import RunSource
from whimbrel.stores.values import has_unit_length, is_finite

_MOST_REFUSED_FIRST: Final = 100
"""Number of rows that may be refused while none is written."""
_MOST_REFUSED: Final = 100_000


class RefusedRow(NamedTuple):
    """A row that was not written."""

    part: str
    key: str
    reason: str


def form_of_run(source: RunSource, first: Table, distance: Distance | None) -> StoreForm:
    """Return the columns of a run. Without `distance`, vectors of length 1 get dot, which is cosine there, others cosine."""

    def vector(name: str) -> VectorColumn:
        kind = VECTORS[name]
        if kind == "sparse":
            chosen: Distance = "dot"
        elif distance is not None:
            chosen = distance
        else:  # a MUVERA vector is made for dot products, and its length is part of them
            chosen = "dot" if name == "muvera" or has_unit_length(first, name) else "cosine"
        width = source.form.widths[name]
        return VectorColumn(name, kind, width, source.form.dtype == "float16", chosen)

    names = [name for name in source.schema.names if name in VECTORS and name in source.outputs]
    fields = [field for field in source.schema if field.name not in names]
    return StoreForm(source.key, tuple(fields), tuple(vector(name) for name in names))


@dataclass(frozen=True, slots=True)
class Transfer:
    """The rows of a run on their way into a store."""

    source: RunSource
    store: Store
    watch: Watch
    totals: Totals
    """Counts of this call: `done` and `refused` are rows of the output."""
    retry: Retry
    refuse: Callable[[RefusedRow], None]
    distance: Distance | None = None
    index: bool = False
    first_part: int = 0
    """Number of parts to leave out."""

    def run(self) -> None:
        """Write all rows. Raises SetupError; rows that were written before stay."""
        parts = self.source.parts[self.first_part :]
        self.totals.shards, self.totals.rows = len(self.source.parts), sum(record.done for _, record in self.source.parts)
        self.totals.shards_done = len(self.source.parts) - len(parts)
        self.totals.rows_before = self.totals.rows - sum(record.done for _, record in parts)
        if self.first_part > len(self.source.parts):
            raise SetupError(f"{self.source.folder} has no part {self.first_part:,}, but {self.totals.shards:,} parts.")
        form = form_of_run(self.source, self._first(), self.distance)
        self._check_names(form)
        for vector in form.vectors:
            if vector.kind != "sparse":
                self.watch.tell(f"{vector.name}: {vector.width:,} numbers, {vector.distance}")
        self._set_up(lambda: self.store.prepare(form))
        self.watch.start(self.totals)
        for shard, record in parts:
            self._write_part(form, shard, record)
            self.totals.shards_done += 1
        self._set_up(lambda: self.store.finish(index=self.index))

    def _first(self) -> Table:
        """Return the first rows that there are."""
        for shard, record in self.source.parts:
            for table in self.source.read(shard, self.store.max_rows) if record.done else ():
                if table.num_rows:
                    return table
        raise SetupError(f"{self.source.folder} has no rows to store.")

    def _check_names(self, form: StoreForm) -> None:
        for name in form.names:
            if form.names.count(name) > 1:
                raise SetupError(f"{self.source.folder} has two columns {name!r}.")

    def _set_up(self, function: Callable[[], None]) -> None:
        try:
            self.retry(function)
        except InvalidRequest as error:
            raise SetupError(error.message) from None

    def _write_part(self, form: StoreForm, shard: Shard, record: Record) -> None:
        rows_read = 0
        for table in self.source.read(shard, self.store.max_rows):
            rows_read += table.num_rows
            for rows in pieces(last_of_each(table, form.key), self.store.max_bytes):
                refused = self._write_checked(form, rows)
                for each in refused:
                    self.refuse(RefusedRow(shard.name, each.key, each.reason))
                self.totals.refused += len(refused)
                self._check_refused(refused)
            self.totals.done += table.num_rows
            self.watch.advance(float(table.num_rows), 0)
        if (rows_read == 0) != (record.done == 0):
            raise SetupError(f"{shard.name} has {rows_read:,} rows, and its record {record.done:,}.")

    def _check_refused(self, refused: list[Refused]) -> None:
        if self.totals.refused > _MOST_REFUSED:
            raise SetupError(f"more than {_MOST_REFUSED:,} rows were refused, the last since {refused[-1].reason}")

    def _write_checked(self, form: StoreForm, rows: Table) -> list[Refused]:
        """Write rows without those whose vectors are not finite; return the refused ones."""
        refused = list[Refused]()
        for vector in form.vectors:
            good_N = is_finite(rows, vector)
            if not good_N.all():
                keys = rows.filter(pa.array(~good_N)).column(form.key).to_pylist()
                refused += [Refused(str(key), f"{vector.name} has a number that is not finite") for key in keys]
                rows = rows.filter(pa.array(good_N))
        return refused + self._write(form, rows, [0])

    def _write(self, form: StoreForm, rows: Table, failed: list[int]) -> list[Refused]:
        """Write rows, in halves where they are refused together. `failed` counts the refused ones until one is written."""
        if not rows.num_rows:
            return []
        try:
            refused = self._send(rows)
        except InvalidRequest as error:
            if rows.num_rows == 1:
                failed[0] += 1
                if failed[0] >= _MOST_REFUSED_FIRST and not self.totals.done:
                    raise SetupError(f"the store refused the first {failed[0]:,} rows: {error.message}") from None
                return [Refused(str(rows.column(form.key)[0].as_py()), error.message)]
            middle = rows.num_rows // 2
            return self._write(form, rows.slice(0, middle), failed) + self._write(form, rows.slice(middle), failed)
        if len(refused) < rows.num_rows:
            failed[0] = -rows.num_rows
        return refused

    def _send(self, rows: Table) -> list[Refused]:
        left, refused = rows, list[Refused]()

        def attempt() -> None:
            nonlocal left
            outcome: Outcome = self.store.write(left)
            refused.extend(outcome.refused)
            if outcome.again:
                left = left.take(outcome.again)
                raise Unavailable(outcome.reason)

        self.retry(attempt)
        return refused


def last_of_each(rows: Table, key: str) -> Table:
    """Return the rows without those whose key a later one has."""
    codes_N = pa.concat_arrays(rows.column(key).chunks).dictionary_encode().indices.to_numpy()
    _, from_end = np.unique(codes_N[::-1], return_index=True)
    return rows if len(from_end) == rows.num_rows else rows.take(np.sort(rows.num_rows - 1 - from_end))


def pieces(rows: Table, max_bytes: int) -> Iterator[Table]:
    """Yield slices of about at most this size."""
    number = max(1, -(-rows.nbytes // max_bytes))
    size = max(1, -(-rows.num_rows // number))
    for start in range(0, rows.num_rows, size):
        yield rows.slice(start, size)
