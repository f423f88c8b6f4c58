"""Client side of Whimbrel's own API: all verbs, arrays as binary data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from whimbrel.client.request_bodies import Json, build_pairs, check_count, encode_body, encode_items, size_of, text_list
from whimbrel.client.responses import (
    flatten,
    join_classes,
    join_outputs,
    join_scores,
    read_classes,
    read_entities,
    read_explanations,
    read_outputs,
    read_scores,
)
from whimbrel.client.task import JSON, MESSAGE_PACK, Reply, Task
from whimbrel.errors import InvalidRequest, Locate
from whimbrel.types.arrays import Float32Array
from whimbrel.types.late_interaction import read_muvera, read_token_pooling
from whimbrel.types.options import ScoreOptions, TextOptions, as_strings, check_options
from whimbrel.types.request import OutputName, read_prompt
from whimbrel.types.result import Classes, Entity, Explanation, Outputs
from whimbrel.wire import to_json


def encode(
    model: str | None, texts: str | Iterable[Any], outputs: OutputName | Sequence[OutputName], options: TextOptions
) -> Task[Outputs]:
    """Return the task that computes any outputs of texts, pairs or token ids."""
    check_options(options, TextOptions)
    name, text = read_prompt(options.get("prompt"))
    fields = _set_fields({
        **options,
        "model": model,
        "outputs": outputs if isinstance(outputs, str) else list(outputs) or None,
        "encoding_format": "bytes",
        "prompt": text,
        "prompt_name": name,
        "token_pooling": read_token_pooling(options.get("token_pooling")),
        "muvera": read_muvera(options.get("muvera")),
    })  # fmt: skip
    requested = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if "muvera" in fields:
        requested = tuple("muvera" if name == "multi_vector" else name for name in requested)
    read = partial(read_outputs, requested)
    items = text_list(texts)
    return Task(
        "/v1/embed", items, partial(encode_items, fields, "input"), read, join_outputs, size_of, whole="late_chunking" in fields
    )


def score(model: str | None, queries: Any, documents: Any, options: ScoreOptions) -> Task[Float32Array]:
    """Return the task that scores pairs."""
    pairs, locate = build_pairs(queries, documents, ("queries", "documents"), options)
    return _pair_task(model, pairs, options, locate, read=read_scores, join=join_scores)


def rerank(model: str | None, query: Any, documents: Any, options: ScoreOptions) -> Task[Float32Array]:
    """Return the task that scores documents for a query. The caller ranks them."""
    if not isinstance(query, str | np.ndarray | tuple):
        raise InvalidRequest(f"must be a string or its vectors, is {type(query).__name__}.", param="query")
    pairs, locate = build_pairs(query, documents, ("query", "documents"), options)
    return _pair_task(model, pairs, options, locate, read=read_scores, join=join_scores)


def explain(model: str | None, query: Any, documents: Any, options: ScoreOptions) -> Task[list[Explanation]]:
    """Return the task that finds the best match of each query token in documents."""
    pairs, locate = build_pairs(query, documents, ("query", "documents"), options)
    return _pair_task(model, pairs, options, locate, read=read_explanations, join=flatten, explain=True)


def classify(model: str | None, texts: str | Iterable[Any], options: ScoreOptions) -> Task[Classes]:
    """Return the task that classifies texts or pairs."""
    items = text_list(texts)
    fields = _class_fields(model, options)
    return Task("/v1/classify", items, partial(encode_items, fields, "input"), read_classes, join_classes, size_of)


def token_classify(
    model: str | None, texts: str | Iterable[str], aggregation: str, options: ScoreOptions
) -> Task[list[list[Entity]]]:
    """Return the task that finds entities in texts."""
    fields = _class_fields(model, options) | {"aggregation": aggregation}
    return Task(
        "/v1/token_classify",
        as_strings(texts, "input"),
        partial(encode_items, fields, "input"),
        read_entities,
        flatten,
        size_of,
    )


def _set_fields(fields: Mapping[str, Any]) -> Json:
    """Return the fields that are not at their defaults, structs as dicts."""
    return {
        name: msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value
        for name, value in fields.items()
        if value is not None and (value is not False or name in _FALSE_IS_SET)
    }


_FALSE_IS_SET: Final = frozenset({"normalize", "activate", "use_activation", "truncate", "token_pooling"})
"""Fields whose default is not `false`."""


def _class_fields(model: str | None, options: ScoreOptions) -> Json:
    check_options(options, ScoreOptions)
    for name in ("score_by", "dimensions", "token_pooling", "max_query_tokens", "max_document_tokens"):
        if options.get(name) is not None:
            raise InvalidRequest("is for pairs that are compared.", param=name)
    return _set_fields({**options, "model": model})


_RENAMED: Final = frozenset({"activate", "prompt", "truncate", "max_query_tokens", "max_document_tokens"})
"""Options that have another name or form in the API."""


def _pair_task(
    model: str | None,
    pairs: list[tuple[Any, Any]],
    options: ScoreOptions,
    locate: Locate,
    *,
    read: Callable[[Reply, int], Any],
    join: Callable[[list[Any]], Any],
    **extra: Any,
) -> Task[Any]:
    check_options(options, ScoreOptions)
    for limit in ("max_query_tokens", "max_document_tokens"):
        check_count(options.get(limit), limit)  # to a server, 0 means no limit
    prompt_name, prompt = read_prompt(options.get("prompt"))
    truncate = options.get("truncate")
    fields = _set_fields({
        **{key: value for key, value in options.items() if key not in _RENAMED},
        **extra,
        "model": model,
        "prompt": prompt,
        "prompt_name": prompt_name,
        "use_activation": options.get("activate"),
        "max_tokens_per_query": options.get("max_query_tokens"),
        "max_tokens_per_doc": options.get("max_document_tokens"),
        "token_pooling": read_token_pooling(options.get("token_pooling")),
        "truncate": True if truncate is None else truncate,
    })  # fmt: skip
    packed = any(isinstance(part, dict) for pair in pairs for part in pair)
    write = partial(_pair_body, fields, msgspec.msgpack.encode if packed else to_json)
    return Task("/v1/score", pairs, write, read, join, size_of, MESSAGE_PACK if packed else JSON, locate, may_be_empty=True)


def _pair_body(fields: Json, write: Callable[[Json], bytes], pairs: Sequence[tuple[Any, Any]]) -> bytes:
    queries, documents = [query for query, _ in pairs], [document for _, document in pairs]
    same = all(query is queries[0] for query in queries)
    return encode_body(fields, {"queries": queries[0] if same and queries else queries, "documents": documents}, write)
