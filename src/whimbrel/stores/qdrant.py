"""Collections of Qdrant, of a server or in a folder (the client's local mode, for trials).

The point's id is the key if that is a whole number, else a UUID made of it (version 5), so the same key is the same point. The
payload has the key too.
"""

import sqlite3
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, NoReturn

from whimbrel.bulk.arrow import Table
from whimbrel.errors import InvalidRequest, SetupError, Unavailable
from whimbrel.stores import values
from whimbrel.stores.form import ALL_WRITTEN, Outcome, StoreForm, VectorColumn
from whimbrel.stores.location import Location
from whimbrel.stores.modules import client_module
from whimbrel.stores.status import raise_for_status

NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "whimbrel")
"""Namespace of the UUIDs."""
_SECONDS: Final = 120


def point_id(key: str | int) -> str | int:
    """Return the id of a point: whole numbers as they are, a UUID of version 5 for any other key."""
    return key if isinstance(key, int) and key >= 0 else str(uuid.uuid5(NAMESPACE, str(key)))


class QdrantStore:
    """Collection with named vectors: `dense`, `sparse`, `multi_vector`, `muvera`."""

    max_rows = 1000
    max_bytes = 2**21  # JSON has some 20 bytes a number, and Qdrant takes 32 MiB

    def __init__(self, place: Location, collection: str) -> None:
        self._qdrant = client_module("qdrant_client", "qdrant")
        self._errors_of = client_module("qdrant_client.http.exceptions", "qdrant")
        self._limits_of = client_module("qdrant_client.common.client_exceptions", "qdrant")
        self._place, self._name = place, collection
        self._form: StoreForm | None = None
        with self._errors():
            self._client = self._connect()

    def _connect(self) -> Any:
        if "://" not in self._place.address:
            return self._qdrant.QdrantClient(path=self._place.address)
        return self._qdrant.QdrantClient(
            url=self._place.address, port=None, api_key=self._place.password, timeout=_SECONDS, check_compatibility=False
        )

    def prepare(self, form: StoreForm) -> None:
        self._form = form
        models = self._qdrant.models
        dense = {each.name: self._params(each) for each in form.vectors if each.kind != "sparse"}
        sparse = {each.name: models.SparseVectorParams() for each in form.vectors if each.kind == "sparse"}
        with self._errors():
            if not self._client.collection_exists(self._name):
                self._client.create_collection(self._name, vectors_config=dense, sparse_vectors_config=sparse or None)
                return
            there = self._client.get_collection(self._name).config.params
        found: Any = there.vectors if hasattr(there.vectors, "get") else {}  # one vector without a name, or none
        for name, wanted in dense.items():
            self._check(name, found.get(name), wanted)
        for name in sparse:
            if name not in (there.sparse_vectors or {}):
                self._refuse(f"has no sparse vectors {name!r}.")

    def _params(self, vector: VectorColumn) -> Any:
        models = self._qdrant.models
        maxsim = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
        return models.VectorParams(
            size=vector.width,
            distance=models.Distance.DOT if vector.distance == "dot" else models.Distance.COSINE,
            datatype=models.Datatype.FLOAT16 if vector.half else None,
            multivector_config=maxsim if vector.kind == "multi_vector" else None,
        )

    def _check(self, name: str, found: Any, wanted: Any) -> None:
        if found is None:
            self._refuse(f"has no vectors {name!r}.")
        if found.size != wanted.size:
            self._refuse(f"has vectors {name!r} of {found.size:,} numbers; the run has {wanted.size:,}.")
        if found.distance != wanted.distance:
            self._refuse(f"has {name!r} for {found.distance.value}, not {wanted.distance.value}.", "or choose --distance")
        if (found.multivector_config is None) != (wanted.multivector_config is None):
            self._refuse(
                f"has {name!r} with {'one vector' if found.multivector_config is None else 'several vectors'} a point."
            )

    def _refuse(self, fault: str, more: str = "or drop that one") -> NoReturn:
        raise SetupError(f"collection {self._name!r} of {self._place.shown} {fault}", hint=f"choose another --table, {more}")

    def write(self, rows: Table) -> Outcome:
        assert self._form is not None
        form, models = self._form, self._qdrant.models
        batch = models.Batch(
            ids=[point_id(key) for key in rows.column(form.key).to_pylist()],
            vectors={each.name: self._vectors(rows, each) for each in form.vectors},
            payloads=values.payloads(rows, [field.name for field in form.fields]),
        )
        with self._errors():
            self._client.upsert(self._name, points=batch, wait=True)
        return ALL_WRITTEN

    def _vectors(self, rows: Table, vector: VectorColumn) -> list[Any]:
        column = rows.column(vector.name)
        if vector.kind == "dense":
            return values.dense(column).tolist()
        if vector.kind == "multi_vector":
            offsets_N1, rows_XD = values.tokens(column)
            return [rows_XD[begin:end].tolist() for begin, end in pairwise(offsets_N1)]
        offsets_N1, ids_X, weights_X = values.sparse(column)
        return [
            self._qdrant.models.SparseVector(indices=ids_X[begin:end].tolist(), values=weights_X[begin:end].tolist())
            for begin, end in pairwise(offsets_N1)
        ]

    def finish(self, *, index: bool) -> None:
        """Nothing is left to do: Qdrant makes its indices itself."""

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except self._errors_of.UnexpectedResponse as error:
            reason = error.content.decode("utf-8", "replace")[:500]
            raise_for_status(int(error.status_code or 0), f"Qdrant: {error.reason_phrase}: {reason}", error.headers)
        except self._limits_of.ResourceExhaustedResponse as error:
            raise Unavailable(f"Qdrant: {error.message}", retry_after=float(error.retry_after_s)) from None
        except self._errors_of.ResponseHandlingException as error:
            raise Unavailable(f"{self._place.shown}: {error}") from None
        except ValueError as error:
            raise InvalidRequest(f"Qdrant: {error}") from None
        except (OSError, RuntimeError, sqlite3.Error) as error:  # of the local mode
            raise SetupError(f"cannot write {self._place.shown}: {error}") from None
