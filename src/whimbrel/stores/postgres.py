"""Tables of PostgreSQL with pgvector: COPY into a temporary table, then INSERT ... ON CONFLICT, in one transaction.

A number type of half the width is halfvec. Sparse vectors are sparsevec(1000000000) whatever the vocabulary, since a run does
not know that. Token vectors are vector(n)[].

Source of the binary forms: vector_recv, halfvec_recv and sparsevec_recv of pgvector, array_recv of PostgreSQL.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from whimbrel.bulk.arrow import DataType, Table, pa
from whimbrel.errors import InvalidRequest, SetupError, Unavailable
from whimbrel.stores import values
from whimbrel.stores.form import ALL_WRITTEN, Outcome, StoreForm, VectorColumn, is_text
from whimbrel.stores.location import Location
from whimbrel.stores.modules import client_module
from whimbrel.types.arrays import Float32Array

SPARSE_WIDTH: Final = 1_000_000_000
"""Numbers of a sparsevec, the most that pgvector takes."""
_MOST_IN_INDEX: Final = {"vector": 2000, "halfvec": 4000}
_TEMPORARY: Final = "whimbrel_rows"
_SECONDS: Final = 15
_ALIVE: Final = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
_PASSING: Final = ("starting up", "shutting down", "too many", "recovery", "remaining connection slots")
"""Words in the refusals of a server that will take connections later."""


class PostgresStore:
    """Table of a database."""

    max_rows = 5000
    max_bytes = 2**25

    def __init__(self, place: Location, table: str) -> None:
        self._psycopg = client_module("psycopg", "postgres")
        self._adapt = client_module("psycopg.adapt", "postgres")
        self._types = client_module("psycopg.types", "postgres")
        self._sql = client_module("psycopg.sql", "postgres")
        self._place, self._table = place, table
        self._name = self._sql.Identifier(*table.split("."))
        self._form: StoreForm | None = None
        self._oids: dict[str, int] = {}
        self._connection: Any = None

    def prepare(self, form: StoreForm) -> None:
        self._connected()
        self._form = form = self._fitting(form)
        with self._errors(), self._connected().transaction():
            if not (found := self._types_there()):  # of a table that is there, its owner may grant no more than writes
                self._execute("CREATE TABLE {} ({}, PRIMARY KEY ({}))", self._name, self._columns, self._id(form.key))
                return
            distances = self._index_distances()
        for name, kind in _types(form).items():
            if found.get(name) != kind:
                has = f"has {name!r} as {found[name]}" if name in found else f"has no column {name!r}"
                hint = "choose another --table, or drop that one"
                raise SetupError(f"table {self._table!r} of {self._place.shown} {has}; the run has {kind}.", hint=hint)
        for vector in form.vectors:
            there = distances.get(vector.name, [])
            if there and vector.distance not in there:
                has = f"has an index of {vector.name!r} for {there[0]}, not {vector.distance}"
                raise SetupError(f"table {self._table!r} of {self._place.shown} {has}.", hint="choose --distance")

    def _fitting(self, form: StoreForm) -> StoreForm:
        """Return a form for the types that there are: before 0.7 pgvector has neither sparse vectors nor those of float16."""
        vectors = form.vectors if "halfvec" in self._oids else tuple(each._replace(half=False) for each in form.vectors)
        if "sparsevec" not in self._oids and any(each.kind == "sparse" for each in vectors):
            others = ",".join(each.name for each in vectors if each.kind != "sparse")
            hint = f"update it, or leave them out with --outputs {others}"
            raise SetupError(f"pgvector of {self._place.shown} has no type sparsevec; it is older than 0.7.", hint=hint)
        return replace(form, vectors=vectors)

    def write(self, rows: Table) -> Outcome:
        assert self._form is not None
        form, sql = self._form, self._sql
        connection = self._connected()
        vectors = [_vectors(rows, each, self._oids["halfvec" if each.half else "vector"]) for each in form.vectors]
        columns = [*(_column(rows, field.name, field.type) for field in form.fields), *vectors]
        others = [name for name in form.names if name != form.key]
        sets = sql.SQL(", ").join([sql.SQL("{0} = EXCLUDED.{0}").format(self._id(name)) for name in others])
        names = sql.SQL(", ").join([self._id(name) for name in form.names])
        temporary = self._id(_TEMPORARY)
        with self._errors(), connection.transaction():
            self._execute("CREATE TEMP TABLE {} ({}) ON COMMIT DROP", temporary, self._columns)
            statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(temporary, names)
            with connection.cursor() as cursor, cursor.copy(statement) as copy:
                copy.set_types([_simple(kind) for kind in _types(form).values()])
                for row in zip(*columns, strict=True):
                    copy.write_row(row)
            self._execute(
                "INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT ({}) DO UPDATE SET {}",
                *(self._name, names, names, temporary, self._id(form.key), sets),
            )
        return ALL_WRITTEN

    def finish(self, *, index: bool) -> None:
        """Make an hnsw index of each dense vector, if asked."""
        assert self._form is not None
        for vector in self._form.vectors if index else ():
            kind = "halfvec" if vector.half else "vector"
            if vector.kind != "dense":
                continue
            if vector.width > _MOST_IN_INDEX[kind]:
                message = f"an index of pgvector takes {_MOST_IN_INDEX[kind]:,} numbers of a {kind}; {vector.name!r} has"
                raise SetupError(f"{message} {vector.width:,}. All rows are written.", hint="run with --dtype-out float16")
            operators = self._sql.SQL(f"{kind}_{'ip' if vector.distance == 'dot' else 'cosine'}_ops")
            name = self._id(f"{self._table.rpartition('.')[2]}_{vector.name}_hnsw")
            with self._errors(), self._connected().transaction():
                statement = "CREATE INDEX IF NOT EXISTS {} ON {} USING hnsw ({} {})"
                self._execute(statement, name, self._name, self._id(vector.name), operators)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _id(self, name: str) -> Any:
        return self._sql.Identifier(name)

    @property
    def _columns(self) -> Any:
        assert self._form is not None
        parts = [self._sql.SQL("{} " + kind).format(self._id(name)) for name, kind in _types(self._form).items()]
        return self._sql.SQL(", ").join(parts)

    def _execute(self, statement: str, *parts: Any) -> Any:
        return self._connection.execute(self._sql.SQL(statement).format(*parts))

    def _connected(self) -> Any:
        """Return the connection, a new one if it was lost, with the types of pgvector."""
        if self._connection is None or self._connection.closed:
            given = {} if self._place.password is None else {"password": self._place.password}
            with self._connecting():
                options = {"autocommit": True, "connect_timeout": _SECONDS, "application_name": "whimbrel", **_ALIVE, **given}
                self._connection = self._psycopg.connect(self._place.address, **options)
            with self._errors():
                self._connection.execute("SET client_min_messages = warning")
                self._learn_types()
        return self._connection

    def _learn_types(self) -> None:
        fetch, adapters = self._types.TypeInfo.fetch, self._connection.adapters
        if fetch(self._connection, "vector") is None:
            self._connection.execute("CREATE EXTENSION vector")
        for name in ("vector", "halfvec", "sparsevec"):
            if (info := fetch(self._connection, name)) is None:
                continue
            self._oids[name] = info.oid
            info.register(self._connection)
            for oid in (info.oid, info.array_oid):
                about = {"oid": oid, "format": self._psycopg.pq.Format.BINARY}
                adapters.register_dumper(_Wire, type("WireDumper", (_WireDumper, self._adapt.Dumper), about))

    def _types_there(self) -> dict[str, str]:
        """Return the columns of the table with their types."""
        statement = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass({}) AND attnum > 0 AND NOT attisdropped"
        )
        return dict(self._execute(statement, self._regclass).fetchall())

    @property
    def _regclass(self) -> Any:
        return self._sql.Literal(self._name.as_string(self._connection))

    def _index_distances(self) -> dict[str, list[str]]:
        """Return the distances of the columns that have an index for search."""
        statement = (
            "SELECT a.attname, o.opcname FROM pg_index i JOIN pg_opclass o ON o.oid = i.indclass[0] "
            "JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] WHERE i.indrelid = to_regclass({})"
        )
        known = {"ip": "dot", "cosine": "cosine", "l2": "euclidean distance", "l1": "taxicab distance"}
        found: dict[str, list[str]] = {}
        for name, operators in self._execute(statement, self._regclass).fetchall():
            kind, _, measure = operators.removesuffix("_ops").partition("_")
            if kind in ("vector", "halfvec") and measure in known:
                found.setdefault(name, []).append(known[measure])
        return found

    @contextmanager
    def _connecting(self) -> Generator[None]:
        try:
            yield
        except self._psycopg.OperationalError as error:
            text = _one_line(error)
            if "FATAL" in text and not any(words in text for words in _PASSING):
                raise SetupError(f"cannot connect to {self._place.shown}: {text}") from None
            raise Unavailable(f"{self._place.shown}: {text}") from None
        except self._psycopg.Error as error:
            raise SetupError(f"cannot connect to {self._place.shown}: {_one_line(error)}") from None

    @contextmanager
    def _errors(self) -> Generator[None]:
        of = self._psycopg.errors
        try:
            yield
        except (of.SerializationFailure, of.DeadlockDetected, of.QueryCanceled, self._psycopg.OperationalError) as error:
            raise Unavailable(f"{self._place.shown}: {_one_line(error)}") from None
        except (self._psycopg.DataError, self._psycopg.IntegrityError) as error:
            raise InvalidRequest(_first_line(error)) from None
        except of.InsufficientPrivilege as error:
            hint = "grant the right; only a superuser may CREATE EXTENSION vector"
            raise SetupError(f"{self._place.shown}: {_first_line(error)}", hint=hint) from None
        except self._psycopg.Error as error:
            raise SetupError(f"{self._place.shown}: {_first_line(error)}") from None


class _Wire:
    """Values in the binary form of a type of pgvector."""


class _WireDumper:
    """Dumper of bytes as they are."""

    def dump(self, obj: bytes) -> bytes:
        return obj


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _types(form: StoreForm) -> dict[str, str]:
    """Return the columns with their types, as PostgreSQL spells them."""
    return {field.name: _sql_type(field.type) for field in form.fields} | {
        each.name: _vector_type(each) for each in form.vectors
    }


def _simple(kind: str) -> str:
    """Return a type without its width."""
    name, _, rest = kind.partition("(")
    return f"{name}[]" if rest.endswith("[]") else name


def _vector_type(vector: VectorColumn) -> str:
    if vector.kind == "sparse":
        return f"sparsevec({SPARSE_WIDTH})"
    return f"{'halfvec' if vector.half else 'vector'}({vector.width}){'[]' if vector.kind == 'multi_vector' else ''}"


def _sql_type(kind: DataType) -> str:
    tests = pa.types
    for matches, name in (
        (tests.is_boolean, "boolean"), (tests.is_uint64, "numeric"), (tests.is_integer, "bigint"),
        (tests.is_floating, "double precision"), (is_text, "text"), (tests.is_date, "date"), (tests.is_decimal, "numeric"),
        (tests.is_binary, "bytea"), (tests.is_large_binary, "bytea"),
    ):  # fmt: skip
        if matches(kind):
            return name
    if tests.is_timestamp(kind):
        return f"timestamp {'with' if kind.tz else 'without'} time zone"
    return "jsonb"


def _column(rows: Table, name: str, kind: DataType) -> list[Any]:
    column = rows.column(name)
    return values.lists(column) if _sql_type(kind) == "jsonb" else values.python_values(column)


def _vectors(rows: Table, vector: VectorColumn, oid: int) -> list[bytes]:
    """Return the vectors of rows in their binary forms; `oid` is the type of token vectors."""
    column = rows.column(vector.name)
    if vector.kind == "dense":
        return _dense(values.dense(column), half=vector.half)
    if vector.kind == "multi_vector":
        offsets_N1, rows_XD = values.tokens(column)
        return _arrays(offsets_N1.tolist(), rows_XD, oid, half=vector.half)
    offsets_N1, ids_X, weights_X = values.sparse(column)
    return _sparse(offsets_N1.tolist(), ids_X, weights_X)


def _records(rows_XD: Float32Array, *, half: bool) -> Any:
    """Return vectors with the bytes before them: the length of the rest, as arrays have it, and the number of columns."""
    width = rows_XD.shape[1]
    number = ">f2" if half else ">f4"
    records = np.zeros(len(rows_XD), [("size", ">i4"), ("width", ">i2"), ("unused", ">i2"), ("row", number, (width,))])
    records["size"], records["width"], records["row"] = records.itemsize - 4, width, rows_XD
    return records


def _dense(rows_ND: Float32Array, *, half: bool) -> list[bytes]:
    records = _records(rows_ND, half=half)
    data, size = records.tobytes(), records.itemsize
    return [data[start + 4 : start + size] for start in range(0, len(data), size)]


def _arrays(offsets: Sequence[int], rows_XD: Float32Array, oid: int, *, half: bool) -> list[bytes]:
    records = _records(rows_XD, half=half)
    data, size = records.tobytes(), records.itemsize
    found: list[bytes] = []
    for begin, end in pairwise(offsets):
        shape = [1, 0, oid, end - begin, 1] if end > begin else [0, 0, oid]
        found.append(np.array(shape, ">u4").tobytes() + data[begin * size : end * size])
    return found


def _sparse(offsets: Sequence[int], ids_X: Any, weights_X: Float32Array) -> list[bytes]:
    found: list[bytes] = []
    for begin, end in pairwise(offsets):
        ids, weights = ids_X[begin:end], weights_X[begin:end]
        order = np.argsort(ids)[np.flatnonzero(weights[np.argsort(ids)])]
        head = np.array([SPARSE_WIDTH, len(order), 0], ">i4").tobytes()
        found.append(head + ids[order].astype(">i4").tobytes() + weights[order].astype(">f4").tobytes())
    return found
