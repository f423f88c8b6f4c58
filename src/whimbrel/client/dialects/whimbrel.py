"""Client side of Whimbrel's own API: all verbs, arrays as binary data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from whimbrel.client import request_bodies as bodies
from whimbrel.client import responses
from whimbrel.client.responses import Ranking
from whimbrel.client.task import JSON, MESSAGE_PACK, Task
from whimbrel.errors import InvalidRequest
from whimbrel.outputs.entities import EntityLabels
from whimbrel.outputs.zero_shot import ZeroShot
from whimbrel.types.arrays import Float32Array
from whimbrel.types.late_interaction import read_muvera, read_token_pooling
from whimbrel.types.options import MAX_PAIRS, ScoreOptions, TextOptions, as_strings, check_options
from whimbrel.types.request import read_prompt
from whimbrel.types.result import Classes, Entity, Explanation, Outputs
from whimbrel.wire.json_base64 import to_json

_FIELDS: Final = {
    "activate": "use_activation", "max_query_tokens": "max_tokens_per_query", "max_document_tokens": "max_tokens_per_doc"
}  # fmt: skip
"""Fields of a body by the options that have other names."""


def _fields(model: str | None, options: TextOptions | ScoreOptions) -> bodies.Json:
    prompt_name, prompt = read_prompt(options.get("prompt"))
    fields = {_FIELDS.get(name, name): value for name, value in options.items()}
    pooling = read_token_pooling(options.get("token_pooling"))
    return fields | {"model": model, "prompt": prompt, "prompt_name": prompt_name, "token_pooling": pooling}


def encode(model: str | None, texts: str | Iterable[Any], outputs: bodies.OutputNames, options: TextOptions) -> Task[Outputs]:
    requested = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    fields = _fields(model, options) | {"outputs": requested or None, "encoding_format": "bytes"}
    fields["muvera"] = read_muvera(options.get("muvera"))
    if fields["muvera"] is not None:
        requested = tuple("muvera" if name == "multi_vector" else name for name in requested)
    write, read = bodies.item_writer("input", **fields), partial(responses.read_outputs, requested)
    is_one_document = bool(options.get("late_chunking"))
    return Task("/v1/embed", bodies.text_list(texts), write, read, responses.join_outputs, whole=is_one_document)


def score(model: str | None, queries: Any, documents: Any, options: ScoreOptions) -> Task[Float32Array]:
    return _pair_task(model, {"queries": queries, "documents": documents}, options)


def rerank(model: str | None, query: Any, documents: Any, options: ScoreOptions) -> Task[Ranking]:
    """Return the task that scores documents for a query. The caller ranks them."""
    if not isinstance(query, str | np.ndarray | tuple):
        raise InvalidRequest(f"must be a string or its vectors, is {type(query).__name__}.", param="query")
    task = _pair_task(model, {"query": query, "documents": documents}, options, return_logits=True)
    return replace(task, read=responses.read_ranking, join=responses.join_rankings)


def explain(model: str | None, query: Any, documents: Any, options: ScoreOptions) -> Task[list[Explanation]]:
    task = _pair_task(model, {"query": query, "documents": documents}, options, explain=True)
    return replace(task, read=responses.read_explanations, join=responses.flatten)


def classify(model: str | None, texts: str | Iterable[Any], zero_shot: ZeroShot | None, options: ScoreOptions) -> Task[Classes]:
    judged, labels = ({}, 1) if zero_shot is None else (asdict(zero_shot), len(zero_shot.labels))
    write = _class_writer(model, options, return_order=True, **judged)
    read, join, most = responses.read_classes, responses.join_classes, max(1, MAX_PAIRS // labels)
    return Task("/v1/classify", bodies.text_list(texts), write, read, join, max_items=most, times=labels)


def token_classify(
    model: str | None, texts: str | Iterable[str], aggregation: str, wanted: EntityLabels | None, options: ScoreOptions
) -> Task[list[list[Entity]]]:
    found, labels = ({"aggregation": aggregation}, 1) if wanted is None else (asdict(wanted), len(wanted.labels))
    write, most = _class_writer(model, options, **found), max(1, MAX_PAIRS // labels)
    read, join = responses.read_entities, responses.flatten
    return Task("/v1/token_classify", as_strings(texts, "input"), write, read, join, max_items=most)


def _class_writer(model: str | None, options: ScoreOptions, **fields: Any) -> bodies.Writer:
    check_options(options, ScoreOptions)
    for name in ("score_by", "dimensions", "token_pooling", "max_query_tokens", "max_document_tokens"):
        if options.get(name) is not None:
            raise InvalidRequest("is for pairs that are compared.", param=name)
    return bodies.item_writer("input", **{**options, "model": model, **fields})


def _pair_task(model: str | None, inputs: Mapping[str, Any], options: ScoreOptions, **more: bool) -> Task[Any]:
    """Return the task that scores the `inputs`, by the names of the caller's arguments. `more` are fields of the body."""
    pairs, locate = bodies.build_pairs(inputs, options)
    check_options(options, ScoreOptions)
    for limit in ("max_query_tokens", "max_document_tokens"):
        bodies.check_count(options.get(limit), limit)  # to a server, 0 means no limit
    fields = bodies.set_fields(**_fields(model, options), **more)
    fields.setdefault("truncate", True)
    has_vectors = any(isinstance(part, dict) for pair in pairs for part in pair)
    write = partial(_pair_body, fields, msgspec.msgpack.encode if has_vectors else to_json)
    media_type = MESSAGE_PACK if has_vectors else JSON
    read, join = responses.read_scores, responses.join_scores
    return Task("/v1/score", pairs, write, read, join, media_type, locate, is_list=_has_one_query(pairs), may_be_empty=True)


def _pair_body(fields: bodies.Json, write: Callable[[bodies.Json], bytes], pairs: Sequence[tuple[Any, Any]]) -> bytes:
    queries, documents = [query for query, _ in pairs], [document for _, document in pairs]
    return bodies.encode_body(
        fields, {"queries": queries[0] if _has_one_query(pairs) else queries, "documents": documents}, write
    )


def _has_one_query(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether the caller gave one query for all documents."""
    return bool(pairs) and all(query is pairs[0][0] for query, _ in pairs)
