"""The verbs that score: what a request must ask, and what becomes of the answer. The same for every kind of engine.

Which outputs a model has decides how it scores. Pure: no engine, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest, Locate, locate_pairs
from whimbrel.outputs.entities import AGGREGATIONS, Aggregation, find_entities
from whimbrel.outputs.pair_scoring import can_score, default_scoring_output
from whimbrel.outputs.stored_vectors import as_vector_list
from whimbrel.types.arrays import Float32Array
from whimbrel.types.card import Card
from whimbrel.types.late_interaction import read_token_pooling
from whimbrel.types.options import ScoreOptions, as_list, as_strings, check_options, read_truncate, require, resolve_prompt
from whimbrel.types.request import OutputName, Pair, Request, VectorInput
from whimbrel.types.result import Classes, Entity, Explanation, Ragged, Ranked, Result, Sparse

T = TypeVar("T")
Texts: TypeAlias = "str | Iterable[str | VectorInput] | NDArray[Any] | Ragged | Sparse"
"""Queries or documents. Of models that compare vectors, those may stand for any text: an array or the outcome of another verb,
or arrays in a list."""


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """A verb's request, and what it makes of the result."""

    request: Request
    postprocess: Callable[[Result], T]
    locate: Locate | None = None
    """What the caller calls the inputs, one of them, or a part of one, for errors; None: as the request does."""


def score(card: Card, queries: Texts, documents: Texts, **options: Unpack[ScoreOptions]) -> Operation[Float32Array]:
    """How well documents answer queries: (N,), or (N, C) of a model with C classes."""
    return _score(card, {"queries": queries, "documents": documents}, options)


def _score(card: Card, given: Mapping[str, Texts], options: ScoreOptions) -> Operation[Float32Array]:
    """Of queries and documents, by the names that the caller has for them."""
    if not can_score(card):
        card.output("scores")
    items = {name: _items(card, texts, name, options.get("score_by")) for name, texts in given.items()}
    (_, one_query), (_, one_document) = items.values()
    request = _request(card, "scores", _paired(*(texts for texts, _ in items.values())), options)
    return Operation(
        request, lambda result: _flat(require(result.outputs.scores)), locate_pairs(*given, single=(one_query, one_document))
    )


def _items(card: Card, given: Texts, param: str, score_by: OutputName | None) -> tuple[list[Any], bool]:
    """Texts, or vectors in place of them; and whether there is but one that stands for itself."""
    if "scores" in card.outputs:
        return as_strings(cast("str | Iterable[str]", given), param), isinstance(given, str)
    vectors = as_vector_list(given, score_by or default_scoring_output(card))
    if vectors is not None:
        return vectors, not isinstance(given, Ragged | Sparse) and len(vectors) == 1 and vectors[0] is given
    return list(as_list(cast("str | Iterable[Any]", given), param)), isinstance(given, str)


def rerank(
    card: Card, query: str | VectorInput, documents: Texts, *, top_n: int | None = None, **options: Unpack[ScoreOptions]
) -> Operation[list[Ranked]]:
    """The documents in order of their score, the best first; of equal ones the one that was given first."""
    if "scores" in card.outputs and card.output("scores").width != 1:
        labels = ", ".join(card.labels)
        raise InvalidRequest(f"this model gives a score for each of several classes ({labels}); ask for score or classify.")
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidRequest(f"must be a positive number, is {top_n!r}.", param="top_n")
    question = _one_to_many(card, query, documents, options)
    return Operation(question.request, lambda result: rank(question.postprocess(result), top_n), question.locate)


def explain(
    card: Card, query: str | VectorInput, documents: Texts, **options: Unpack[ScoreOptions]
) -> Operation[list[Explanation]]:
    """What each token of the query found in each document."""
    question = _one_to_many(card, query, documents, options)
    return Operation(replace(question.request, explain=True), explanations, question.locate)


def explanations(result: Result) -> list[Explanation]:
    """Of each pair of a request that asked for them."""
    scores, matches, tokens = require(result.outputs.scores), require(result.outputs.token_matches), require(result.pair_tokens)
    return [
        Explanation(float(scores[i, 0]), *tokens[i], matches[i][:, 0], matches[i][:, 1].astype(np.int32))
        for i in range(len(tokens))
    ]


def _one_to_many(card: Card, query: str | VectorInput, documents: Texts, options: ScoreOptions) -> Operation[Float32Array]:
    if not isinstance(query, str | np.ndarray | tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest(f"must be a string or its vectors, is {type(query).__name__}.", param="query")
    return _score(card, {"query": query, "documents": documents}, options)


def descending(scores_N: Float32Array, top_n: int | None = None) -> list[int]:
    """Return the indices of the highest scores, best first; of equal scores the first comes first."""
    return np.argsort(-scores_N, kind="stable")[:top_n].tolist()


def rank(scores_N: Float32Array, top_n: int | None) -> list[Ranked]:
    """Return the highest scores with their indices, best first."""
    order = descending(scores_N, top_n)
    return [Ranked(index, value) for index, value in zip(order, scores_N[order].tolist(), strict=True)]


def classify(card: Card, texts: str | Iterable[str | Pair], **options: Unpack[ScoreOptions]) -> Operation[Classes]:
    """The classes of texts, or of pairs."""
    card.output("scores")
    request = _request(card, "scores", as_list(texts), options)
    return Operation(request, lambda result: Classes(card.labels, require(result.outputs.scores)))


def token_classify(
    card: Card, texts: str | Iterable[str], aggregation: Aggregation = "simple", **options: Unpack[ScoreOptions]
) -> Operation[list[list[Entity]]]:
    """The entities in each text."""
    card.output("token_scores")
    if aggregation not in AGGREGATIONS:
        raise InvalidRequest(f"{aggregation!r} is not known; it takes {', '.join(AGGREGATIONS)}.", param="aggregation")
    given = as_list(texts)
    request = _request(card, "token_scores", given, options, locate=True)

    def answer(result: Result) -> list[list[Entity]]:
        scores, spans = require(result.outputs.token_scores), require(result.token_offsets)
        return [find_entities(text, scores[i], spans[i], card.labels, aggregation) for i, text in enumerate(given)]

    return Operation(request, answer)


def _request(card: Card, output: OutputName, texts: Sequence[Any], options: ScoreOptions, *, locate: bool = False) -> Request:
    check_options(options, ScoreOptions)
    name, text = resolve_prompt(card, options.get("prompt"))
    return Request(
        texts,
        (output,),
        prompt=text,
        prompt_name=name,
        activate=options.get("activate"),
        score_by=options.get("score_by"),
        token_pooling=read_token_pooling(options.get("token_pooling")),
        dimensions=options.get("dimensions"),
        truncate=read_truncate(options.get("truncate")),
        max_query_tokens=options.get("max_query_tokens"),
        max_document_tokens=options.get("max_document_tokens"),
        return_offsets=locate,
    )


def _paired(first: list[Any], second: list[Any]) -> list[Pair]:
    """Each query with its document, or the only query with each document."""
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequest(
            f"{len(first):,} queries and {len(second):,} documents; there must be one query, or one for each document.",
            param="documents",
        )
    return list(zip(first, second, strict=True))


def _flat(scores_NC: Float32Array) -> Float32Array:
    return scores_NC[:, 0] if scores_NC.shape[1] == 1 else scores_NC
