"""Client side of the native API of Hugging Face's text-embeddings-inference (TEI)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from whimbrel.client.request_bodies import (
    choose_output,
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
from whimbrel.client.responses import (
    check_outputs,
    float_array,
    join_outputs,
    join_scores,
    offsets_of,
    scores_of,
    sort_by_index,
)
from whimbrel.client.task import Reply, Task
from whimbrel.types.arrays import Float32Array
from whimbrel.types.options import ScoreOptions, TextOptions, as_strings
from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs, Ragged, Sparse

MAX_TEXTS: Final = 32
"""Texts in one request, TEI's default of --max-client-batch-size."""
_TOKENS_PATH: Final = "/embed_all"
_PATHS: Final[dict[str, str]] = {
    "dense": "/embed",
    "sparse": "/embed_sparse",
    "multi_vector": _TOKENS_PATH,
    "hidden": _TOKENS_PATH,
}
_TOKEN_OPTIONS: Final = ("prompt", "truncate")
_OPTIONS: Final = (*_TOKEN_OPTIONS, "dimensions", "normalize")


class _Entry(msgspec.Struct):
    index: int
    value: float


class _RankedText(msgspec.Struct):
    index: int
    score: float


def encode(
    model: str | None, texts: str | Iterable[Any], outputs: OutputName | Sequence[OutputName], options: TextOptions
) -> Task[Outputs]:
    """Return the task that computes one output of texts: dense or sparse vectors, or a vector per token."""
    output = choose_output(outputs)
    reject_options("tei", outputs, tuple(_PATHS), options, _OPTIONS if output == "dense" else _TOKEN_OPTIONS)
    fields: dict[str, Any] = model_field(model) | _truncation(options.get("truncate"))
    if (prompt := options.get("prompt")) is not None:
        fields["prompt_name"] = prompt
    for name in ("dimensions", "normalize"):
        if options.get(name) is not None:
            fields[name] = options.get(name)
    write, read = partial(encode_items, fields, "inputs"), partial(_read, output)
    return Task(_PATHS[output], text_list(texts), write, read, join_outputs, size_of, locate=locate_input, max_items=MAX_TEXTS)


def rerank(model: str | None, query: Any, documents: Any, options: ScoreOptions) -> Task[Float32Array]:
    """Return the task that scores documents for a query. The scores are logits with `activate=False`."""
    reject_score_options("TEI", options, ("activate", "truncate"))
    require_string(query, "query")
    raw = {"query": query, "raw_scores": options.get("activate") is False}
    fields = model_field(model) | raw | _truncation(options.get("truncate"))
    texts = as_strings(documents, "documents")
    write = partial(encode_items, fields, "texts")
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


def _read(output: str, reply: Reply, count: int) -> Outputs:
    if output == "dense":
        outputs = Outputs(float_array(msgspec.json.decode(reply.content, type=list[list[float]]), 2))
    elif output == "sparse":
        outputs = Outputs(sparse=_sparse(msgspec.json.decode(reply.content, type=list[list[_Entry]])))
    else:
        rows = [float_array(each, 2) for each in msgspec.json.decode(reply.content, type=list[list[list[float]]])]
        tokens = Ragged(np.concatenate(rows), offsets_of([len(each) for each in rows]))
        outputs = Outputs(hidden=tokens) if output == "hidden" else Outputs(multi_vector=tokens)
    return check_outputs(outputs, (output,), count)


def _sparse(rows: list[list[_Entry]]) -> Sparse:
    entries = [entry for row in rows for entry in sorted(row, key=lambda entry: entry.index)]
    ids = np.array([entry.index for entry in entries], np.int32)
    return Sparse(ids, float_array([entry.value for entry in entries], 1), offsets_of([len(row) for row in rows]))


def _read_ranked(reply: Reply, count: int) -> Float32Array:
    rows = sort_by_index(msgspec.json.decode(reply.content, type=list[_RankedText]), count)
    return scores_of(rows)
