"""Scoring verbs: `score`, `rerank`, `explain`, `classify`, `token_classify`.

Each verb returns an `Operation`: the request to run, and the function that turns its result into the verb's result. Engine and
AsyncEngine share them. Pure: no engine, no I/O.

Shapes: N texts or pairs, C classes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest, Locate, locate_pairs
from whimbrel.outputs.entities import AGGREGATIONS, Aggregation, choose_entities, find_entities, read_entity_labels
from whimbrel.outputs.requested import can_score, default_scoring_output
from whimbrel.outputs.stored_vectors import as_vector_list
from whimbrel.outputs.zero_shot import ZeroShot, entailment_of, read_zero_shot
from whimbrel.types.arrays import Float32Array
from whimbrel.types.card import Card
from whimbrel.types.options import ScoreOptions, as_list, as_strings, read_options, require
from whimbrel.types.request import OutputName, Request, ScoringOutput, VectorInput
from whimbrel.types.result import Classes, Entity, Explanation, Ragged, Ranked, Result, Sparse
from whimbrel.types.seq import Pair

T = TypeVar("T")
Texts: TypeAlias = "str | Iterable[str | VectorInput] | NDArray[Any] | Ragged | Sparse"
"""Queries or documents. For models that score by vectors, vectors may replace any text: an array, a list of arrays, or the
result of another verb."""


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """Request of a verb, and the conversion of its result."""

    request: Request
    postprocess: Callable[[Result], T]
    locate: Locate | None = None
    """The caller's names of the inputs, for errors; None: those of the request."""


def score(card: Card, queries: Texts, documents: Texts, **options: Unpack[ScoreOptions]) -> Operation[Float32Array]:
    """Return the scores of query-document pairs: float32, (N,), or (N, C) of a model with C classes.

    A single query is paired with every document. Otherwise there are as many queries as documents. Models that compare vectors
    also take stored vectors in place of texts, as the other verbs return them or in fewer bits (`outputs/stored_vectors.py`).
    The options are those of ScoreOptions.
    """
    return _score(card, {"queries": queries, "documents": documents}, options)


def _score(card: Card, inputs: Mapping[str, Texts], options: ScoreOptions) -> Operation[Float32Array]:
    if not can_score(card):
        card.output("scores")
    items = {name: _items(card, texts, name, options.get("score_by")) for name, texts in inputs.items()}
    (queries, one_query), (documents, one_document) = items.values()
    request = _request(card, "scores", _pair(queries, documents), options, listwise=len(queries) == 1)
    locate = locate_pairs(*inputs, single=(one_query, one_document))
    return Operation(request, lambda result: _squeeze(require(result.outputs.scores)), locate)


def _items(card: Card, texts: Texts, param: str, score_by: ScoringOutput | None) -> tuple[list[Any], bool]:
    """Return a list of texts or vectors, and whether the argument was a single one outside a list."""
    if "scores" in card.outputs:
        return as_strings(cast("str | Iterable[str]", texts), param), isinstance(texts, str)
    vectors = as_vector_list(texts, score_by or default_scoring_output(card))
    if vectors is not None:
        return vectors, not isinstance(texts, Ragged | Sparse) and len(vectors) == 1 and vectors[0] is texts
    return list(as_list(cast("str | Iterable[Any]", texts), param)), isinstance(texts, str)


def rerank(
    card: Card, query: str | VectorInput, documents: Texts, *, top_n: int | None = None, **options: Unpack[ScoreOptions]
) -> Operation[list[Ranked]]:
    """Return the index and the score of each document, best first, at most `top_n`. The options are those of ScoreOptions.

    Scores that only the activation has made equal are ordered by their logits; others keep the order of the documents.
    """
    if "scores" in card.outputs and card.output("scores").width != 1:
        labels = ", ".join(card.labels)
        raise InvalidRequest(f"this model gives a score for each of several classes ({labels}); ask for score or classify.")
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidRequest(f"must be a positive number, is {top_n!r}.", param="top_n")
    scoring = _one_to_many(card, query, documents, options)
    return Operation(
        scoring.request,
        lambda result: rank(scoring.postprocess(result), top_n, order_N=result.outputs.order[:, 0]),
        scoring.locate,
    )


def explain(
    card: Card, query: str | VectorInput, documents: Texts, **options: Unpack[ScoreOptions]
) -> Operation[list[Explanation]]:
    """Return the best match of each query token in each document, for late-interaction models. Options as ScoreOptions."""
    scoring = _one_to_many(card, query, documents, options)
    return Operation(replace(scoring.request, explain=True), explanations, scoring.locate)


def explanations(result: Result) -> list[Explanation]:
    """Return the explanation of each pair of a request with `explain`."""
    scores, matches, tokens = require(result.outputs.scores), require(result.outputs.token_matches), require(result.pair_tokens)
    return [
        Explanation(float(scores[i, 0]), *tokens[i], matches[i][:, 0], matches[i][:, 1].astype(np.int32))
        for i in range(len(tokens))
    ]


def _one_to_many(card: Card, query: str | VectorInput, documents: Texts, options: ScoreOptions) -> Operation[Float32Array]:
    if not isinstance(query, str | np.ndarray | tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest(f"must be a string or its vectors, is {type(query).__name__}.", param="query")
    return _score(card, {"query": query, "documents": documents}, options)


def descending(order_N: Float32Array, top_n: int | None = None) -> list[int]:
    """Return the indices of the greatest numbers, at most `top_n`, in descending order; of equals the first comes first."""
    return np.argsort(-order_N, kind="stable")[:top_n].tolist()


def rank(scores_N: Float32Array, top_n: int | None, *, order_N: Float32Array) -> list[Ranked]:
    """Return the scores in descending order of `order_N`."""
    order = descending(order_N, top_n)
    return [Ranked(index, value) for index, value in zip(order, scores_N[order].tolist(), strict=True)]


def classify(
    card: Card,
    texts: str | Iterable[str | Pair],
    labels: Iterable[str] | None = None,
    *,
    hypothesis_template: str | None = None,
    multi_label: bool = False,
    **options: Unpack[ScoreOptions],
) -> Operation[Classes]:
    """Return the class scores of texts or pairs. A single string is a list of one. The options are those of ScoreOptions.

    With `labels`, up to 1,000, a model for natural language inference judges how far each text entails each label (zero-shot
    classification, as in transformers). `hypothesis_template` makes a statement of a label; default: "This example is {}.". The
    scores of a text's labels sum to 1; with `multi_label` each label is judged alone.
    """
    card.output("scores")
    zero_shot = read_zero_shot(labels, hypothesis_template, multi_label=multi_label)
    if zero_shot is not None:
        return _zero_shot(card, texts, zero_shot, options)
    request = _request(card, "scores", as_list(texts), options)
    return Operation(request, lambda result: classes_of(card.labels, require(result.outputs.scores), result.outputs.order))


def classes_of(labels: tuple[str, ...], scores_NC: Float32Array, order_NC: Float32Array | None = None) -> Classes:
    """Return classes in descending order of their scores, or of `order_NC`; equal ones keep theirs."""
    return Classes(labels, scores_NC, np.argsort(-(scores_NC if order_NC is None else order_NC), axis=1, kind="stable"))


def _zero_shot(card: Card, texts: str | Iterable[str | Pair], zero_shot: ZeroShot, options: ScoreOptions) -> Operation[Classes]:
    entailment = entailment_of(card)
    if options.get("activate") is False:
        raise InvalidRequest("the scores of labels are shares of their logits; leave it out.", param="activate")
    items = as_list(texts)
    for index, item in enumerate(items):
        if isinstance(item, tuple | list):
            raise InvalidRequest("labels are for texts, not for pairs of texts.", item=index)
    request = _request(card, "scores", as_strings(cast("list[str]", items), "input"), options)
    request = replace(request, hypotheses=zero_shot.hypotheses, activate=False)
    return Operation(request, lambda result: zero_shot.classes(require(result.outputs.scores), entailment))


def token_classify(
    card: Card,
    texts: str | Iterable[str],
    aggregation: Aggregation = "simple",
    *,
    labels: Iterable[str] | None = None,
    threshold: float | None = None,
    **options: Unpack[ScoreOptions],
) -> Operation[list[list[Entity]]]:
    """Return the entities in each of `texts`. A single string is a list of one. The options are those of ScoreOptions.

    With `labels`, up to 1,000, a GLiNER model finds entities of these: spans with a score above `threshold`, 0.5 by default, of
    which the best are taken and those that overlap them are not.
    """
    if "token_scores" not in card.outputs:
        raise InvalidRequest(f"this model gives no 'token_scores'; it gives: {', '.join(card.outputs)}.", param="outputs")
    if aggregation not in AGGREGATIONS:
        raise InvalidRequest(f"{aggregation!r} is not known; it takes {', '.join(AGGREGATIONS)}.", param="aggregation")
    strings = as_list(texts)
    if labels is not None or threshold is not None:
        return _find_spans(card, strings, options, labels=labels, threshold=threshold, aggregation=aggregation)
    request = _request(card, "token_scores", strings, options, return_offsets=True)

    def postprocess(result: Result) -> list[list[Entity]]:
        scores, offsets = require(result.outputs.token_scores), require(result.token_offsets)
        return [find_entities(text, scores[i], offsets[i], card.labels, aggregation) for i, text in enumerate(strings)]

    return Operation(request, postprocess)


def _find_spans(
    card: Card, texts: list[str], options: ScoreOptions, *, labels: Iterable[str] | None, threshold: object, aggregation: str
) -> Operation[list[list[Entity]]]:
    wanted = read_entity_labels(labels, threshold, aggregation)
    if options.get("activate") is False:
        raise InvalidRequest("the threshold is for scores, not for logits; leave it out.", param="activate")
    head = card.output("token_scores").spans
    if head is None:
        known = ", ".join(card.labels)
        raise InvalidRequest(f"this model finds its own classes alone: {known}; leave them out.", param="labels")
    request = _request(card, "token_scores", texts, options, labels=wanted.labels)

    def postprocess(result: Result) -> list[list[Entity]]:
        scores, offsets = require(result.outputs.token_scores), require(result.token_offsets)
        return [choose_entities(text, scores[i], offsets[i].chars_T2, wanted, head.max_words) for i, text in enumerate(texts)]

    return Operation(request, postprocess)


def _request(card: Card, output: OutputName, texts: Sequence[Any], options: ScoreOptions, **more: Any) -> Request:
    return Request(texts, (output,), **read_options(card, options, ScoreOptions), **more)


def _pair(first: list[Any], second: list[Any]) -> list[Pair]:
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        counts = f"{len(first):,} queries and {len(second):,} documents"
        raise InvalidRequest(f"{counts}; there must be one query, or one for each document.", param="documents")
    return list(zip(first, second, strict=True))


def _squeeze(scores_NC: Float32Array) -> Float32Array:
    return scores_NC[:, 0] if scores_NC.shape[1] == 1 else scores_NC
