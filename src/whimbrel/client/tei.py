"""The native dialect of Hugging Face's text-embeddings-inference, from the client's side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from whimbrel.client.answers import join_outputs
from whimbrel.client.bodies import chosen_output, json_body, listed_texts, refuse_options, size_of
from whimbrel.client.openai import matrix
from whimbrel.client.task import Reply, Task
from whimbrel.errors import InvalidRequest
from whimbrel.types import Float32Array, OutputName, Outputs, Ragged, Sparse
from whimbrel.verbs import ScoreOptions, TextOptions, strings

_TOKENS: Final = "/embed_all"
_PATHS: Final[dict[str, str]] = {"dense": "/embed", "sparse": "/embed_sparse", "multi_vector": _TOKENS, "hidden": _TOKENS}
_OPTIONS_OF_TOKENS: Final = ("prompt", "truncate")
_OPTIONS: Final = (*_OPTIONS_OF_TOKENS, "dimensions", "normalize")


class _Entry(msgspec.Struct):
    index: int
    value: float


class _Ranked(msgspec.Struct):
    index: int
    score: float


def encode(
    model: str | None, texts: str | Iterable[Any], outputs: OutputName | Sequence[OutputName], options: TextOptions
) -> Task[Outputs]:
    """One output of texts: dense or sparse vectors, or the hidden state of each token."""
    output = chosen_output(outputs)
    refuse_options("tei", outputs, tuple(_PATHS), options, _OPTIONS if output == "dense" else _OPTIONS_OF_TOKENS)
    fields: dict[str, Any] = _truncation(options.get("truncate"))
    if (prompt := options.get("prompt")) is not None:
        fields["prompt_name"] = prompt
    for name in ("dimensions", "normalize"):
        if options.get(name) is not None:
            fields[name] = options.get(name)
    return Task(_PATHS[output], listed_texts(texts), partial(_body, fields), partial(_read, output), join_outputs, size_of)


def rerank(model: str | None, query: Any, documents: Any, options: ScoreOptions) -> Task[Float32Array]:
    """The scores of documents for a query; with `activate=False` logits."""
    known = ("activate", "truncate")
    for name in options:
        if name not in known and options.get(name) is not None:
            raise InvalidRequest(f"TEI's API cannot say it; it takes {', '.join(known)}.", param=name)
    if not isinstance(query, str):
        raise InvalidRequest(f"must be a string, is {type(query).__name__}.", param="query")
    fields = {"query": query, "raw_scores": options.get("activate") is False, **_truncation(options.get("truncate"))}
    texts = strings(documents, "documents")
    return Task("/rerank", texts, partial(_rerank_body, fields), _read_ranked, np.concatenate, size_of)


def _truncation(truncate: str | bool | None) -> dict[str, Any]:
    if truncate in ("right", "left"):
        return {"truncate": True, "truncation_direction": str(truncate).capitalize()}
    return {} if truncate is None else {"truncate": truncate is True}


def _body(fields: dict[str, Any], items: Sequence[Any]) -> bytes:
    return json_body(fields | {"inputs": items})


def _rerank_body(fields: dict[str, Any], items: Sequence[Any]) -> bytes:
    return json_body(fields | {"texts": items})


def _read(output: str, reply: Reply, count: int) -> Outputs:
    if output == "dense":
        found = Outputs(matrix(msgspec.json.decode(reply.content, type=list[list[float]])))
    elif output == "sparse":
        found = Outputs(sparse=_sparse(msgspec.json.decode(reply.content, type=list[list[_Entry]])))
    else:
        rows = [matrix(each) for each in msgspec.json.decode(reply.content, type=list[list[list[float]]])]
        offsets = np.concatenate(([0], np.cumsum([len(each) for each in rows], dtype=np.int64)))
        tokens = Ragged(np.concatenate(rows), offsets)
        found = Outputs(hidden=tokens) if output == "hidden" else Outputs(multi_vector=tokens)
    rows_N: Any = getattr(found, output)
    if len(rows_N) != count:
        raise ValueError(f"{len(rows_N)} rows for {count} texts")
    return found


def _sparse(rows: list[list[_Entry]]) -> Sparse:
    entries = [entry for row in rows for entry in sorted(row, key=lambda entry: entry.index)]
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64)))
    ids = np.array([entry.index for entry in entries], np.int32)
    return Sparse(ids, np.array([entry.value for entry in entries], np.float32), offsets)


def _read_ranked(reply: Reply, count: int) -> Float32Array:
    rows = sorted(msgspec.json.decode(reply.content, type=list[_Ranked]), key=lambda row: row.index)
    if [row.index for row in rows] != list(range(count)):
        raise ValueError(f"{len(rows)} scores for {count} texts, or their numbers are wrong")
    return np.array([row.score for row in rows], np.float32)
