"""Client side of Cohere's API, version 2."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from whimbrel.client import request_bodies as bodies
from whimbrel.client.responses import Ranking, ScoredRow, check_outputs, float_array, join_outputs
from whimbrel.client.task import Reply, Task
from whimbrel.types.options import ScoreOptions, TextOptions
from whimbrel.types.result import Outputs
from whimbrel.wire.json_base64 import from_base64
from whimbrel.wire.whole_numbers import decode_json

MAX_TEXTS: Final = 96
"""Texts in one request, a limit of Cohere's service."""
_INPUT_TYPES: Final = {"query": "search_query", "document": "search_document", None: "search_document"}
_TRUNCATE: Final[dict[object, str | None]] = {
    "right": "END", "left": "START", "never": "NONE", False: "NONE", True: "END", None: None
}  # fmt: skip


class _Embeddings(msgspec.Struct, rename={"floats": "float"}):
    floats: list[list[float]] | None = None
    base64: list[str] | None = None


class _EmbedResponse(msgspec.Struct):
    embeddings: _Embeddings


class _RankedDocument(ScoredRow):
    score: float = msgspec.field(name="relevance_score")


class _RerankResponse(msgspec.Struct):
    results: list[_RankedDocument]


def encode(model: str | None, texts: str | Iterable[Any], outputs: bodies.OutputNames, options: TextOptions) -> Task[Outputs]:
    """Return the task that embeds texts. They are documents unless `input_type` is "query"."""
    bodies.choose_output("cohere", outputs, ("dense",))
    bodies.reject_options("cohere", options, ("input_type", "dimensions", "truncate", "max_tokens"))
    write = bodies.item_writer(
        "texts",
        model=model,
        input_type=_INPUT_TYPES[options.get("input_type")],
        embedding_types=["base64"],
        output_dimension=options.get("dimensions"),
        max_tokens=options.get("max_tokens"),
        truncate=_TRUNCATE[options.get("truncate")],
    )
    return Task("/v2/embed", bodies.text_list(texts), write, _read, join_outputs, max_items=MAX_TEXTS)


def rerank(model: str | None, query: Any, documents: Any, options: ScoreOptions) -> Task[Ranking]:
    bodies.reject_options("cohere", options, ("max_document_tokens",))
    bodies.check_count(limit := options.get("max_document_tokens"), "max_document_tokens")
    write = bodies.item_writer("documents", model=model, query=query, max_tokens_per_doc=limit)
    return bodies.ranking_task("/v2/rerank", query, documents, write, lambda body: decode_json(_RerankResponse, body).results)


def _read(reply: Reply, count: int) -> Outputs:
    embeddings = decode_json(_EmbedResponse, reply.content).embeddings
    rows = from_base64(embeddings.base64) if embeddings.base64 is not None else float_array(embeddings.floats or [], 2)
    return check_outputs(Outputs(rows), ("dense",), count)
