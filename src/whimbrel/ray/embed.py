"""Embed: batches of a table to the same batches with vectors, for Ray Data, for Spark, and for loops over tables.

It is made of the parts of a bulk run, so a text has the bits that `whimbrel run` gives it. It needs neither Ray nor Spark.
"""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Literal, TypeAlias, TypeVar, Unpack

import numpy as np

from whimbrel.bulk.arrow import Array, Schema, Table, pa
from whimbrel.bulk.columns import NumberType, output_fields, widths_of
from whimbrel.bulk.compute import CUT_FIELD, TableForm, begin
from whimbrel.bulk.embedder import Embedder
from whimbrel.bulk.manifest import ColumnNames, Shard
from whimbrel.bulk.rows import table_rows
from whimbrel.bulk.tables import is_text
from whimbrel.errors import InvalidRequest, SetupError
from whimbrel.ray.sources import EngineSource, Source
from whimbrel.types.options import TextOptions
from whimbrel.types.request import OutputName

B = TypeVar("B")

OnError: TypeAlias = Literal["raise", "null"]
_NUMBERS: Final = ("float32", "float16", "int8")
_ERROR: Final = pa.field("error", pa.string())
_PLACE: Final = pa.schema([pa.field("", pa.int64())])


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """A model in this process, with the threads that send its requests."""

    embedder: Embedder
    widths: dict[str, int]
    threads: ThreadPoolExecutor


_loaded: Final[dict[bytes, _Loaded]] = {}
_loading: Final = Lock()


class Embed:
    """Adds vectors to batches of texts: to pyarrow's tables and pandas' DataFrames.

    The model is loaded by the first batch, once in each process, and stays. So the object can be pickled, as Spark does.

        dataset.map_batches(Embed, fn_constructor_kwargs={"text": "body"}, batch_format="pyarrow", concurrency=2)
        frame.mapInPandas(Embed(text="body", cores=1).frames, "id string, body string, cut boolean, dense array<float>")

    A batch gets a column for each output, `fixed_size_list<float>` for dense vectors, and `cut`: whether the model read only a
    part of the text. A row without a text, or one that the model refuses, raises InvalidRequest. With `errors="null"` its
    outputs are null, and the column `error` has the reason.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        text: str | Sequence[str] = "text",
        query: str | None = None,
        separator: str = "\n",
        outputs: OutputName | Sequence[OutputName] = (),
        dtype_out: NumberType = "float32",
        errors: OnError = "raise",
        cores: float | None = None,
        engine: dict[str, Any] | None = None,
        source: Source | None = None,
        **options: Unpack[TextOptions],
    ) -> None:
        """`text` names the columns with the text, `query` one with a query that it is scored for. `outputs` is empty for the
        model's main output, and `engine` has arguments of Engine. `cores` is the number of cores for each process; None: all.
        `source` takes the place of model, outputs, engine and options.
        """
        if dtype_out not in _NUMBERS:
            raise SetupError(f"dtype_out takes {', '.join(_NUMBERS)}, not {dtype_out}.")
        if errors not in ("raise", "null"):
            raise SetupError(f"errors takes raise or null, not {errors}.")
        texts = (text,) if isinstance(text, str) else tuple(text)
        named: tuple[OutputName, ...] = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        self._names = ColumnNames(texts, separator, None, (), query)
        self._dtype: NumberType = dtype_out
        self._errors: OnError = errors
        self._cores = cores
        named = named or (("scores",) if query is not None else ())
        self._source: Source = source or EngineSource(model, engine or {}, named, options)

    def __call__(self, batch: B) -> B:
        """Return a batch with its outputs, as a table or a DataFrame, whichever it is. Raises InvalidRequest."""
        given: Any = batch
        if isinstance(given, pa.Table):
            added = self._outputs(given)
            for field, column in zip(added.schema, added.columns, strict=True):
                given = given.append_column(field, column)
            return given
        if not hasattr(given, "assign"):
            hint = 'map_batches takes batch_format="pyarrow"'
            raise SetupError(f"a batch is a pyarrow.Table or a pandas.DataFrame, not {type(given).__name__}.", hint=hint)
        if missing := [name for name in self._names.texts if name not in given.columns]:
            raise _missing(missing[0], given.columns)
        added = self._outputs(pa.table({name: _texts(given[name], name) for name in self._names.texts}), taken=given.columns)
        return given.assign(**{name: _series(added.column(name), given) for name in added.column_names})

    def frames(self, batches: Iterable[B]) -> Iterator[B]:
        """Yield batches with their outputs, for Spark's `mapInPandas`."""
        return map(self, batches)

    def _outputs(self, table: Table, taken: Iterable[str] | None = None) -> Table:
        """Return the columns to add to a table that has the names `taken`."""
        names, loaded = self._names, self._load()
        for name in names.texts:
            if name not in table.column_names:
                raise _missing(name, table.column_names)
            kind = table.schema.field(name).type
            if not is_text(kind) and not pa.types.is_null(kind):
                raise InvalidRequest(f"the column {name} has no texts, but {kind}.")
        fields = [CUT_FIELD, *output_fields(loaded.widths, self._dtype), *([_ERROR] if self._errors == "null" else [])]
        present = set(table.column_names if taken is None else taken)
        if doubled := [field.name for field in fields if field.name in present]:
            raise InvalidRequest(f"the batch has a column {doubled[0]} already; rename it first.")
        places = pa.array(np.arange(table.num_rows))
        numbered = table.select(list(dict.fromkeys(names.texts))).append_column(_PLACE.field(0), places)
        rows = table_rows(numbered, Shard(0, 0, 0, table.num_rows, 0), "", names, _PLACE)
        form = TableForm(_PLACE, True, loaded.widths, self._dtype, None)
        result = begin(rows, form, loaded.embedder, loaded.threads, _ignore).result()
        if result.faults and self._errors == "raise":
            first, number = result.faults[0], len(result.faults)
            message = f"{number:,} of {table.num_rows:,} rows cannot be run, the first of them row {first.row:,} of the batch"
            raise InvalidRequest(f'{message}: {first.reason}. errors="null" leaves their outputs empty.')
        return _by_place(result.table, dict(result.faults), table.num_rows, pa.schema(fields))

    def _load(self) -> _Loaded:
        key = pickle.dumps((self._source, self._cores))
        with _loading:
            if key not in _loaded:
                embedder = self._source.load(self._cores)
                widths = widths_of(embedder.run([("a", "a") if self._names.query else "a"]).outputs)
                if not widths:
                    raise SetupError("the model gives none of the outputs that a column can hold.")
                _loaded[key] = _Loaded(embedder, widths, ThreadPoolExecutor(embedder.sizes.in_flight))
            return _loaded[key]


def _by_place(table: Table, reasons: dict[int, str], size: int, schema: Schema) -> Table:
    """Return the outputs in the order of the batch, null where a row has a reason."""
    place_N = np.full(size, -1)
    place_N[table.column("").to_numpy()] = np.arange(table.num_rows)
    taken = table.drop_columns([""]).take(pa.array(place_N, mask=place_N < 0))
    columns = [taken.column(name) for name in taken.column_names]
    if _ERROR in schema:
        columns.append(pa.array([reasons.get(row) for row in range(size)], _ERROR.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _ignore(rows: float, tokens: int) -> None:
    del rows, tokens


def _missing(name: str, there: Iterable[str]) -> InvalidRequest:
    return InvalidRequest(f"the batch has no column {name}; it has {', '.join(map(str, there))}.")


def _texts(series: Any, name: str) -> Array:
    try:
        return pa.array(series, from_pandas=True)
    except pa.ArrowException:
        raise InvalidRequest(f"the column {name} has values that are no texts.") from None


def _series(column: Array, frame: Any) -> Any:
    series = column.to_pandas()
    series.index = frame.index
    return series
