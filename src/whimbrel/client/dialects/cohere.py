"""Cohere's dialect (v2), from the client's side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from whimbrel.client.request_bodies import (
    body_of,
    check_count,
    locate_document,
    locate_input,
    named,
    reject_options,
    size_of,
    text_list,
)
from whimbrel.client.responses import checked, floats, in_order, join_outputs, join_scores, scores_of
from whimbrel.client.task import Reply, Task
from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array
from whimbrel.types.options import ScoreOptions, TextOptions, as_strings
from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs
from whimbrel.wire import from_base64

MAX_TEXTS: Final = 96
"""Of a request, in Cohere's service."""
_OPTIONS: Final = ("input_type", "dimensions", "truncate", "max_tokens")
_INPUT_TYPES: Final = {"query": "search_query", "document": "search_document", None: "search_document"}
_TRUNCATE: Final[dict[object, str]] = {"right": "END", "left": "START", "never": "NONE", False: "NONE", True: "END"}


class _Embeddings(msgspec.Struct, rename={"floats": "float"}):
    floats: list[list[float]] | None = None
    base64: list[str] | None = None


class _Answer(msgspec.Struct):
    embeddings: _Embeddings


class _Ranked(msgspec.Struct, rename={"score": "relevance_score"}):
    index: int
    score: float


class _RankedAnswer(msgspec.Struct):
    results: list[_Ranked]


def encode(
    model: str | None, texts: str | Iterable[Any], outputs: OutputName | Sequence[OutputName], options: TextOptions
) -> Task[Outputs]:
    """Dense vectors of texts, which are documents unless `input_type` says otherwise."""
    reject_options("cohere", outputs, ("dense",), options, _OPTIONS)
    fields: dict[str, Any] = {
        "input_type": _INPUT_TYPES[options.get("input_type")],
        "embedding_types": ["base64"],
        **named(model),
    }
    if options.get("dimensions") is not None:
        fields["output_dimension"] = options.get("dimensions")
    if options.get("max_tokens") is not None:
        fields["max_tokens"] = options.get("max_tokens")
    if options.get("truncate") is not None:
        fields["truncate"] = _TRUNCATE[options.get("truncate")]
    items = text_list(texts)
    return Task(
        "/v2/embed",
        items,
        partial(_body, fields, "texts"),
        _read,
        join_outputs,
        size_of,
        locate=locate_input,
        max_items=MAX_TEXTS,
    )


def rerank(model: str | None, query: Any, documents: Any, options: ScoreOptions) -> Task[Float32Array]:
    """The scores of documents for a query."""
    for name in options:
        if name != "max_document_tokens" and options.get(name) is not None:
            raise InvalidRequest("Cohere's API cannot say it; it takes max_document_tokens.", param=name)
    if not isinstance(query, str):
        raise InvalidRequest(f"must be a string, is {type(query).__name__}.", param="query")
    fields = {"query": query, **named(model)}
    check_count(limit := options.get("max_document_tokens"), "max_document_tokens")
    if limit is not None:
        fields["max_tokens_per_doc"] = limit
    texts = as_strings(documents, "documents")
    return Task(
        "/v2/rerank",
        texts,
        partial(_body, fields, "documents"),
        _read_ranked,
        join_scores,
        size_of,
        locate=locate_document,
        may_be_empty=True,
    )


def _body(fields: dict[str, Any], name: str, items: Sequence[Any]) -> bytes:
    return body_of(fields, {name: items})


def _read(reply: Reply, count: int) -> Outputs:
    found = msgspec.json.decode(reply.content, type=_Answer).embeddings
    rows = from_base64(found.base64) if found.base64 is not None else floats(found.floats or [], 2)
    return checked(Outputs(rows), ("dense",), count)


def _read_ranked(reply: Reply, count: int) -> Float32Array:
    rows = in_order(msgspec.json.decode(reply.content, type=_RankedAnswer).results, count)
    return scores_of(rows)
