"""Backends of `whimbrel bench serve`: the path, body and usage of each kind of server, as a table.

A backend turns a sample of a dataset into the body of a request. It knows nothing of connections.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import orjson
import pybase64

from whimbrel.errors import SetupError
from whimbrel.types.arrays import Float32Array

Fields = dict[str, Any]


class Sample(NamedTuple):
    """Texts of one request: inputs, or documents with their query."""

    texts: tuple[str, ...]
    query: str | None = None
    num_tokens: int | None = None
    """Tokens by the client's count, or None if it does not know."""


@dataclass(frozen=True)
class Backend:
    """A kind of server."""

    path: str
    body: Callable[[str, Sample], Fields]
    rows: Callable[[Any], Sequence[Any]]
    """Rows of a decoded answer."""
    key: str = ""
    """Key of the vector or score of a row that is an object with its index; other rows are in the order of the texts."""
    ranks: bool = False
    """It takes a query and documents."""
    usage: str = "prompt_tokens"
    """Key of the number of tokens; "" where a header states it."""


def _inputs(sample: Sample) -> list[str] | str:
    return sample.texts[0] if len(sample.texts) == 1 else list(sample.texts)


def _with_input(model: str, sample: Sample) -> Fields:
    return {"model": model, "input": _inputs(sample), "truncate_prompt_tokens": -1}


def _with_documents(model: str, sample: Sample) -> Fields:
    return {"model": model, "query": sample.query, "documents": list(sample.texts), "truncate_prompt_tokens": -1}


BACKENDS: Final[Mapping[str, Backend]] = {
    "openai-embeddings": Backend("/v1/embeddings", _with_input, lambda answer: answer["data"], "embedding"),
    "rerank": Backend("/v1/rerank", _with_documents, lambda answer: answer["results"], "relevance_score", ranks=True),
    "pooling": Backend("/pooling", _with_input, lambda answer: answer["data"], "data"),
    "tei": Backend(
        "/embed", lambda _, sample: {"inputs": _inputs(sample), "truncate": True}, lambda answer: answer[:], usage=""
    ),
    "ollama": Backend(
        "/api/embed",
        lambda model, sample: {"model": model, "input": _inputs(sample)},
        lambda answer: answer["embeddings"],
        usage="prompt_eval_count",
    ),
    "native": Backend(
        "/v1/embed",
        lambda model, sample: {"model": model, "input": list(sample.texts), "truncate": True},
        lambda answer: next(rows for rows in answer["outputs"].values() if rows is not None),
    ),
}
"""Kinds of servers by name. vLLM's own names are accepted too: see ALIASES."""
ALIASES: Final[Mapping[str, str]] = {
    "vllm-rerank": "rerank",
    "vllm-pooling": "pooling",
    "infinity-embeddings": "openai-embeddings",
}


_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Endpoint(NamedTuple):
    """Place of a server, from its URL."""

    host: str
    port: int
    is_tls: bool
    authority: str
    prefix: str
    """Path before the backend's path."""

    @property
    def url(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.prefix}"


def read_url(url: str) -> Endpoint:
    """Return the place that a URL names. Raises SetupError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise SetupError(f"{url} is no URL: {error}.", hint="for example http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or " " in url:
        raise SetupError(f"{url} is no URL of an HTTP server.", hint="for example http://127.0.0.1:8000")
    is_tls = parts.scheme == "https"
    netloc = parts.netloc.rpartition("@")[2]
    return Endpoint(parts.hostname, port or (443 if is_tls else 80), is_tls, netloc, parts.path.rstrip("/"))


def read_path(path: str) -> str:
    """Return the path of `--endpoint`. Raises SetupError."""
    if not (path.isascii() and path.isprintable()) or " " in path:
        raise SetupError(f"--endpoint {path!r} is no path.", hint="for example /v1/embeddings")
    return path if path.startswith("/") else f"/{path}"


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise SetupError for a header that HTTP does not take. Its value may be a secret and is not shown."""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise SetupError(f"{name!r} is no name of a header.", hint="for example --header x-tenant=name")
        if not (value.isascii() and value.isprintable()):
            raise SetupError(
                f"the value of the header {name} has characters that HTTP does not take.",
                hint="--header and --api-key take printable ASCII",
            )


def find_backend(name: str) -> Backend:
    """Return a backend by its name. Raises SetupError."""
    found = BACKENDS.get(ALIASES.get(name, name))
    if found is None:
        raise SetupError(f"no backend {name!r}.", hint=f"--backend takes one of: {', '.join(BACKENDS)}")
    return found


def make_payload(endpoint: Endpoint, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return a request as bytes, head and body."""
    fields = {"host": endpoint.authority, "content-type": "application/json", "accept": "*/*"} | dict(headers)
    lines = [f"POST {endpoint.prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("latin-1") + body


def make_body(backend: Backend, model: str, sample: Sample, extra: Fields) -> bytes:
    """Return the JSON of a request. A field of `extra` that is None removes the backend's own. Raises SetupError."""
    if backend.ranks and sample.query is None:
        raise SetupError(
            "this backend ranks documents, and the dataset has no queries.",
            hint="use --dataset-name random-rerank, or lists of a query and documents as prompts of a custom dataset",
        )
    if not backend.ranks and sample.query is not None:
        sample = sample._replace(texts=(sample.query, *sample.texts), query=None)
    fields = backend.body(model, sample) | extra
    return orjson.dumps({name: value for name, value in fields.items() if value is not None})


def read_rows(backend: Backend, body: bytes) -> list[Float32Array]:
    """Return an array per text from a JSON answer: its vector or vectors, or its score. Raises SetupError."""
    try:
        rows = backend.rows(orjson.loads(body))
        if backend.key:
            rows = [row[backend.key] for row in sorted(rows, key=lambda row: row["index"])]
        return [_row(row) for row in rows]
    except (ValueError, KeyError, TypeError, IndexError, StopIteration) as error:
        raise SetupError(f"the answer cannot be read: {error!r}.", hint="choose the backend that suits the server") from error


def _row(value: Any) -> Float32Array:
    if isinstance(value, str):
        return np.frombuffer(pybase64.b64decode(value), "<f4")
    if isinstance(value, Mapping):
        value = value["embedding"]  # pyright: ignore[reportUnknownVariableType]
    return np.array(value, np.float32)
