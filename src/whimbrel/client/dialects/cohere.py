"""Client side of Cohere's API, version 2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from whimbrel.client.request_bodies import (
    check_count,
    encode_items,
    locate_document,
    locate_input,
    model_field,
    reject_options,
    reject_score_options,
    require_string,
    size_of,
    text_list,
)
from whimbrel.client.responses import check_outputs, float_array, join_outputs, join_scores, scores_of, sort_by_index
from whimbrel.client.task import Reply, Task
from whimbrel.types.arrays import Float32Array
from whimbrel.types.options import ScoreOptions, TextOptions, as_strings
from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs
from whimbrel.wire import from_base64

MAX_TEXTS: Final = 96
"""Texts in one request, a limit of Cohere's service."""
_OPTIONS: Final = ("input_type", "dimensions", "truncate", "max_tokens")
_INPUT_TYPES: Final = {"query": "search_query", "document": "search_document", None: "search_document"}
_TRUNCATE: Final[dict[object, str | None]] = {
    "right": "END",
    "left": "START",
    "never": "NONE",
    False: "NONE",
    True: "END",
    None: None,
}


class _Embeddings(msgspec.Struct, rename={"floats": "float"}):
    floats: list[list[float]] | None = None
    base64: list[str] | None = None


class _EmbedResponse(msgspec.Struct):
    embeddings: _Embeddings


class _RankedDocument(msgspec.Struct, rename={"score": "relevance_score"}):
    index: int
    score: float


class _RerankResponse(msgspec.Struct):
    results: list[_RankedDocument]


def encode(
    model: str | None, texts: str | Iterable[Any], outputs: OutputName | Sequence[OutputName], options: TextOptions
) -> Task[Outputs]:
    """Return the task that embeds texts. They are documents unless `input_type` is "query"."""
    reject_options("cohere", outputs, ("dense",), options, _OPTIONS)
    fields: dict[str, Any] = {
        "input_type": _INPUT_TYPES[options.get("input_type")],
        "embedding_types": ["base64"],
        **model_field(model),
    }
    optional = {
        "output_dimension": options.get("dimensions"),
        "max_tokens": options.get("max_tokens"),
        "truncate": _TRUNCATE[options.get("truncate")],
    }
    fields |= {name: value for name, value in optional.items() if value is not None}
    items = text_list(texts)
    return Task(
        "/v2/embed",
        items,
        partial(encode_items, fields, "texts"),
        _read,
        join_outputs,
        size_of,
        locate=locate_input,
        max_items=MAX_TEXTS,
    )


def rerank(model: str | None, query: Any, documents: Any, options: ScoreOptions) -> Task[Float32Array]:
    """Return the task that scores documents for a query."""
    reject_score_options("Cohere", options, ("max_document_tokens",))
    require_string(query, "query")
    fields = {"query": query, **model_field(model)}
    check_count(limit := options.get("max_document_tokens"), "max_document_tokens")
    if limit is not None:
        fields["max_tokens_per_doc"] = limit
    texts = as_strings(documents, "documents")
    return Task(
        "/v2/rerank",
        texts,
        partial(encode_items, fields, "documents"),
        _read_ranked,
        join_scores,
        size_of,
        locate=locate_document,
        may_be_empty=True,
    )


def _read(reply: Reply, count: int) -> Outputs:
    embeddings = msgspec.json.decode(reply.content, type=_EmbedResponse).embeddings
    rows = from_base64(embeddings.base64) if embeddings.base64 is not None else float_array(embeddings.floats or [], 2)
    return check_outputs(Outputs(rows), ("dense",), count)


def _read_ranked(reply: Reply, count: int) -> Float32Array:
    rows = sort_by_index(msgspec.json.decode(reply.content, type=_RerankResponse).results, count)
    return scores_of(rows)
