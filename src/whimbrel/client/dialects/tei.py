"""Client side of the native API of Hugging Face's text-embeddings-inference (TEI)."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from whimbrel.client import request_bodies as bodies
from whimbrel.client import responses
from whimbrel.client.responses import Ranking, ScoredRow, float_array
from whimbrel.client.task import Reply, Task
from whimbrel.types.arrays import Int64Array
from whimbrel.types.batch import offsets_of
from whimbrel.types.options import ScoreOptions, TextOptions, as_strings
from whimbrel.types.result import Outputs, Ragged, Sparse, Tokens
from whimbrel.wire.whole_numbers import decode_json

MAX_TEXTS: Final = 32
"""Texts in one request, TEI's default of --max-client-batch-size."""
_PATHS: Final[dict[str, str]] = {
    "dense": "/embed", "sparse": "/embed_sparse", "multi_vector": "/embed_all", "hidden": "/embed_all"
}  # fmt: skip
_TOKEN_OPTIONS: Final = ("prompt", "truncate")
_OPTIONS: Final = (*_TOKEN_OPTIONS, "dimensions", "normalize")


class _Entry(msgspec.Struct):
    index: int
    value: float


def encode(model: str | None, texts: str | Iterable[Any], outputs: bodies.OutputNames, options: TextOptions) -> Task[Outputs]:
    output = bodies.choose_output("tei", outputs, _PATHS)
    bodies.reject_options("tei", options, _OPTIONS if output == "dense" else _TOKEN_OPTIONS)
    same = {name: options.get(name) for name in ("dimensions", "normalize")}
    truncation = _truncation(options.get("truncate"))
    write = bodies.item_writer("inputs", model=model, prompt_name=options.get("prompt"), **same, **truncation)
    items, read, join = bodies.text_list(texts), partial(_read, output), responses.join_outputs
    return Task(_PATHS[output], items, write, read, join, max_items=MAX_TEXTS)


def rerank(model: str | None, query: Any, documents: Any, options: ScoreOptions) -> Task[Ranking]:
    """Return the task that scores documents for a query. The scores are logits with `activate=False`."""
    bodies.reject_options("tei", options, ("activate", "truncate"))
    raw_scores, truncation = options.get("activate") is False, _truncation(options.get("truncate"))
    write = bodies.item_writer("texts", model=model, query=query, raw_scores=raw_scores, **truncation)
    return bodies.ranking_task("/rerank", query, documents, write, partial(decode_json, list[ScoredRow]), max_items=MAX_TEXTS)


def _truncation(truncate: str | bool | None) -> bodies.Json:
    if truncate in ("right", "left"):
        return {"truncate": True, "truncation_direction": str(truncate).capitalize()}
    return {} if truncate is None else {"truncate": truncate is True}


def _read(output: str, reply: Reply, count: int) -> Outputs:
    if output == "dense":
        outputs = Outputs(float_array(decode_json(list[list[float]], reply.content), 2))
    elif output == "sparse":
        outputs = Outputs(sparse=_sparse(decode_json(list[list[_Entry]], reply.content)))
    else:
        rows = [float_array(each, 2) for each in decode_json(list[list[list[float]]], reply.content)]
        tokens = Ragged(np.concatenate(rows), _offsets(rows))
        outputs = Outputs(hidden=tokens) if output == "hidden" else Outputs(multi_vector=tokens)
    return responses.check_outputs(outputs, (output,), count)


def _sparse(rows: list[list[_Entry]]) -> Sparse:
    entries = [entry for row in rows for entry in sorted(row, key=lambda entry: entry.index)]
    ids = np.array([entry.index for entry in entries], np.int32)
    return Sparse(ids, float_array([entry.value for entry in entries], 1), _offsets(rows))


def _offsets(rows: Sequence[Any]) -> Int64Array:
    return offsets_of(np.array([len(row) for row in rows], np.int64))


class _Token(msgspec.Struct):
    id: int
    text: str
    special: bool
    start: int | None = None
    stop: int | None = None


def tokenize(model: str | None, texts: str | Iterable[str]) -> Task[list[Tokens]]:
    items, write, join = as_strings(texts, "texts"), bodies.item_writer("inputs", model=model), responses.flatten
    return Task("/tokenize", items, write, _read_tokens, join, may_be_empty=True, max_items=MAX_TEXTS)


def _read_tokens(reply: Reply, count: int) -> list[Tokens]:
    rows = decode_json(list[list[_Token]], reply.content)
    return [
        Tokens(
            np.array([token.id for token in row], np.int32),
            tuple(token.text for token in row),
            np.array([token.special for token in row], np.bool_),
            np.array([(token.start or 0, token.stop or 0) for token in row], np.int32).reshape(-1, 2),
        )
        for row in responses.check_count(rows, count, " of tokens")
    ]
