"""The native dialect of Hugging Face's text-embeddings-inference, from the client's side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from whimbrel.client.request_bodies import (
    body_of,
    choose_output,
    locate_document,
    locate_input,
    named,
    reject_options,
    size_of,
    text_list,
)
from whimbrel.client.responses import checked, floats, in_order, join_outputs, join_scores, offsets_of, scores_of
from whimbrel.client.task import Reply, Task
from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array
from whimbrel.types.options import ScoreOptions, TextOptions, as_strings
from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs, Ragged, Sparse

MAX_TEXTS: Final = 32
"""Of a request, unless TEI was started with another --max-client-batch-size."""
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
    output = choose_output(outputs)
    reject_options("tei", outputs, tuple(_PATHS), options, _OPTIONS if output == "dense" else _OPTIONS_OF_TOKENS)
    fields: dict[str, Any] = named(model) | _truncation(options.get("truncate"))
    if (prompt := options.get("prompt")) is not None:
        fields["prompt_name"] = prompt
    for name in ("dimensions", "normalize"):
        if options.get(name) is not None:
            fields[name] = options.get(name)
    write, read = partial(_body, fields, "inputs"), partial(_read, output)
    return Task(_PATHS[output], text_list(texts), write, read, join_outputs, size_of, locate=locate_input, max_items=MAX_TEXTS)


def rerank(model: str | None, query: Any, documents: Any, options: ScoreOptions) -> Task[Float32Array]:
    """The scores of documents for a query; with `activate=False` logits."""
    known = ("activate", "truncate")
    for name in options:
        if name not in known and options.get(name) is not None:
            raise InvalidRequest(f"TEI's API cannot say it; it takes {', '.join(known)}.", param=name)
    if not isinstance(query, str):
        raise InvalidRequest(f"must be a string, is {type(query).__name__}.", param="query")
    raw = {"query": query, "raw_scores": options.get("activate") is False}
    fields = named(model) | raw | _truncation(options.get("truncate"))
    texts = as_strings(documents, "documents")
    write = partial(_body, fields, "texts")
    return Task(
        "/rerank",
        texts,
        write,
        _read_ranked,
        join_scores,
        size_of,
        locate=locate_document,
        may_be_empty=True,
        max_items=MAX_TEXTS,
    )


def _truncation(truncate: str | bool | None) -> dict[str, Any]:
    if truncate in ("right", "left"):
        return {"truncate": True, "truncation_direction": str(truncate).capitalize()}
    return {} if truncate is None else {"truncate": truncate is True}


def _body(fields: dict[str, Any], name: str, items: Sequence[Any]) -> bytes:
    return body_of(fields, {name: items})


def _read(output: str, reply: Reply, count: int) -> Outputs:
    if output == "dense":
        found = Outputs(floats(msgspec.json.decode(reply.content, type=list[list[float]]), 2))
    elif output == "sparse":
        found = Outputs(sparse=_sparse(msgspec.json.decode(reply.content, type=list[list[_Entry]])))
    else:
        rows = [floats(each, 2) for each in msgspec.json.decode(reply.content, type=list[list[list[float]]])]
        tokens = Ragged(np.concatenate(rows), offsets_of([len(each) for each in rows]))
        found = Outputs(hidden=tokens) if output == "hidden" else Outputs(multi_vector=tokens)
    return checked(found, (output,), count)


def _sparse(rows: list[list[_Entry]]) -> Sparse:
    entries = [entry for row in rows for entry in sorted(row, key=lambda entry: entry.index)]
    ids = np.array([entry.index for entry in entries], np.int32)
    return Sparse(ids, floats([entry.value for entry in entries], 1), offsets_of([len(row) for row in rows]))


def _read_ranked(reply: Reply, count: int) -> Float32Array:
    rows = in_order(msgspec.json.decode(reply.content, type=list[_Ranked]), count)
    return scores_of(rows)
