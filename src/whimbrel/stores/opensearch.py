"""Indices of OpenSearch, through `_bulk`. The document's id is the key.

Dense vectors are of the type knn_vector, sparse ones rank_features with token ids as names. Token vectors are kept in the
document and not indexed, as lateInteractionScore of OpenSearch 3.3 reads them.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

from whimbrel.bulk.arrow import Array, Table, pa
from whimbrel.errors import SetupError, Unavailable
from whimbrel.stores import values
from whimbrel.stores.form import Outcome, Refused, StoreForm, VectorColumn, is_text
from whimbrel.stores.location import Location
from whimbrel.stores.modules import client_module
from whimbrel.stores.status import PASSING, raise_for_status
from whimbrel.wire.json_base64 import to_json

_SECONDS: Final = 120
_MOST_KEY_BYTES: Final = 512
_SPACES: Final = {"cosine": "cosinesimil", "dot": "innerproduct"}


class OpenSearchStore:
    """Index of a cluster."""

    max_rows = 1000
    max_bytes = 2**22

    def __init__(self, place: Location, index: str) -> None:
        self._opensearch = client_module("opensearchpy", "opensearch")
        self._place, self._name = place, index
        self._form: StoreForm | None = None
        login = None if place.user is None and place.password is None else (place.user or "", place.password or "")
        self._client = self._opensearch.OpenSearch(place.address, http_auth=login, timeout=_SECONDS, max_retries=0)

    def prepare(self, form: StoreForm) -> None:
        self._form = form
        fields = {field.name: _field_type(field.type) for field in form.fields}
        fields[form.key] = {"type": "keyword"} if is_text(form.key_type) else {"type": "long"}
        properties = {name: kind for name, kind in fields.items() if kind} | {each.name: _vector(each) for each in form.vectors}
        with self._errors():
            if not self._client.indices.exists(index=self._name):
                body = {"settings": {"index.knn": True}, "mappings": {"date_detection": False, "properties": properties}}
                self._client.indices.create(index=self._name, body=body)
                return
            [there] = self._client.indices.get_mapping(index=self._name).values()
        found = there["mappings"].get("properties", {})
        for each in form.vectors:
            self._check(each, found.get(each.name, {}))

    def _check(self, vector: VectorColumn, found: dict[str, Any]) -> None:
        wanted = _vector(vector)
        of = {name: found.get(name) for name in ("type", "dimension")} | {"space_type": _space(found)}
        for name, value in {"type": wanted["type"], "dimension": wanted.get("dimension"), "space_type": _space(wanted)}.items():
            if of[name] != value:
                message = (
                    f"index {self._name!r} of {self._place.shown} has {vector.name!r} with {name} {of[name]}, not {value}."
                )
                raise SetupError(message, hint="choose another --table, or delete that one")

    def write(self, rows: Table) -> Outcome:
        assert self._form is not None
        keys, documents = rows.column(self._form.key).to_pylist(), self._documents(rows)
        refused, sent = list[Refused](), list[int]()
        lines: list[bytes] = []
        for index, (key, document) in enumerate(zip(keys, documents, strict=True)):
            if not 0 < len(str(key).encode()) <= _MOST_KEY_BYTES:
                refused.append(Refused(str(key)[:100], f"the id has no bytes, or more than {_MOST_KEY_BYTES}"))
                continue
            lines += (to_json({"index": {"_id": str(key)}}), to_json(document))
            sent.append(index)
        if not sent:
            return Outcome(refused, [])
        with self._errors():
            answer = self._client.bulk(body=b"\n".join(lines) + b"\n", index=self._name)
        return self._read(answer, keys, sent, refused)

    def _read(self, answer: Any, keys: list[Any], sent: list[int], refused: list[Refused]) -> Outcome:
        """Return what the answer says of each row."""
        items = answer.get("items", [])
        if len(items) != len(sent):
            raise Unavailable(f"OpenSearch answered {len(items):,} of {len(sent):,} rows.")
        again, reason = list[int](), ""
        for index, item in zip(sent, items, strict=True):
            about = item["index"]
            if about["status"] < 300:
                continue
            error: dict[str, Any] = about.get("error") or {}
            told = f"{error.get('type')}: {error.get('reason')}"
            if about["status"] in PASSING:
                again.append(index)
                reason = f"OpenSearch: {told}"
            else:
                cause: dict[str, Any] = error.get("caused_by") or {}
                refused.append(Refused(str(keys[index]), f"{told}: {cause['reason']}" if "reason" in cause else told))
        return Outcome(refused, again, reason)

    def _documents(self, rows: Table) -> list[dict[str, Any]]:
        assert self._form is not None
        documents = values.payloads(rows, [field.name for field in self._form.fields])
        for vector in self._form.vectors:
            for document, value in zip(documents, _values(rows.column(vector.name), vector), strict=True):
                document[vector.name] = value
        return documents

    def finish(self, *, index: bool) -> None:
        """Make all documents visible to searches. Their vectors have an index from the start."""
        with self._errors():
            self._client.indices.refresh(index=self._name)

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _errors(self) -> Generator[None]:
        of = self._opensearch.exceptions
        try:
            yield
        except of.ConnectionError as error:  # also a timeout
            raise Unavailable(f"{self._place.shown}: {str(error.info)[:300]}") from None
        except of.TransportError as error:
            raise_for_status(int(error.status_code), f"OpenSearch: {error.error}: {str(error.info)[:500]}")
        except of.OpenSearchException as error:
            raise SetupError(f"OpenSearch: {error}") from None


def _values(column: Array, vector: VectorColumn) -> Iterable[Any]:
    """Return the vectors of rows as a document has them."""
    if vector.kind == "dense":
        return values.dense(column)
    if vector.kind == "multi_vector":
        offsets_N1, rows_XD = values.tokens(column)
        return [rows_XD[begin:end] for begin, end in pairwise(offsets_N1)]
    offsets_N1, ids_X, weights_X = values.sparse(column)
    names, weights = ids_X.astype(str).tolist(), weights_X.tolist()
    return [dict(zip(names[begin:end], weights[begin:end], strict=True)) for begin, end in pairwise(offsets_N1)]


def _vector(vector: VectorColumn) -> dict[str, Any]:
    if vector.kind == "sparse":
        return {"type": "rank_features"}
    if vector.kind == "multi_vector":
        return {"type": "object", "enabled": False}
    method = {"name": "hnsw", "engine": "lucene", "space_type": _SPACES[vector.distance]}
    return {"type": "knn_vector", "dimension": vector.width, "method": method}


def _space(field: dict[str, Any]) -> str | None:
    method: dict[str, Any] = field.get("method", {})
    return method.get("space_type") or field.get("space_type")


def _field_type(kind: Any) -> dict[str, Any]:
    """Return the mapping of a column; nothing for one that OpenSearch maps by itself."""
    if pa.types.is_boolean(kind):
        return {"type": "boolean"}
    if pa.types.is_integer(kind):
        return {"type": "long"}
    if pa.types.is_floating(kind):
        return {"type": "double"}
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return {"type": "date"}
    return {"type": "text", "fields": {"keyword": {"type": "keyword", "ignore_above": 256}}} if is_text(kind) else {}
