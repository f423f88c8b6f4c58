"""POST /v1/rerank and /v1/score, in the shapes that Jina's API and vLLM share. Pure functions over bytes.

Texts that are too long are refused unless cutting is asked for: a score of half a document looks like any other. Sources:
Jina's API (api.jina.ai/openapi.json) and vLLM 0.33, entrypoints/pooling/scoring. Fields that are not known are ignored, as
there.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from whimbrel.dialects.openai import Usage, render_error
from whimbrel.dialects.read import decode
from whimbrel.errors import InvalidRequest, TooLarge, WhimbrelError, relocated
from whimbrel.types import Float32Array, Pair, Request, Result, read_truncate
from whimbrel.wire import to_json

MAX_PAIRS: Final = 10_000


class Document(msgspec.Struct, frozen=True):
    """A text as an object."""

    text: str


Text = str | Document


class PairFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes take."""

    model: Annotated[str | None, Meta(description="The served model's name, as /v1/models lists it.")] = None
    truncate: Annotated[
        bool | Literal["right", "left", "never"] | None,
        Meta(description="Which end of a text that is too long is cut; `true`: as the model does. By default it is an error."),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Cut to so many tokens; -1: to the model's maximum (vLLM)."),
    ] = None
    score_by: Annotated[
        Literal["dense", "sparse", "multi_vector"] | None,
        Meta(description="Of models that give vectors: which are compared; by default those that the model is made for."),
    ] = None
    instruction: Annotated[str | None, Meta(description="What a reranker with a template is told to judge.")] = None
    prompt_name: Annotated[str | None, Meta(description="The name of one of the model's prompts, put before queries.")] = None
    prompt: Annotated[str | None, Meta(description="Text put before queries, instead of a named prompt.")] = None
    use_activation: Annotated[
        bool | None, Meta(description="Apply the activation of scores; by default as the model does.")
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None,
        Meta(description="Requests with lower numbers run first; 0 by default (vLLM)."),
    ] = None


class RerankRequest(PairFields, frozen=True, kw_only=True):
    """Body of POST /v1/rerank."""

    query: Text
    documents: Annotated[list[Text], Meta(description="At most 10,000 texts.")]
    top_n: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="So many of the best are given; 0 or absent: all.")
    ] = None
    return_documents: Annotated[bool | None, Meta(description="Whether the texts are sent back; they are by default.")] = None


class ScoreRequest(PairFields, frozen=True, kw_only=True):
    """Body of POST /v1/score: pairs as `queries` and `documents`, or `text_1` and `text_2`."""

    queries: Annotated[Text | list[Text] | None, Meta(description="One, for all documents, or one for each.")] = None
    documents: Text | list[Text] | None = None
    text_1: Annotated[Text | list[Text] | None, Meta(description="The same as `queries` (vLLM).")] = None
    text_2: Annotated[Text | list[Text] | None, Meta(description="The same as `documents` (vLLM).")] = None


class RankedDocument(msgspec.Struct):
    """A document among those that were sent."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankResponse(msgspec.Struct):
    """Answer of POST /v1/rerank; the best first, and of equal ones the one that came first."""

    results: list[RankedDocument]
    model: str
    usage: Usage


class Score(msgspec.Struct):
    """The score of a pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(msgspec.Struct):
    """Answer of POST /v1/score."""

    data: list[Score]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


def read_rerank(body: bytes) -> tuple[RerankRequest, Request]:
    """The body as it was sent, and the Request it stands for. Raises InvalidRequest or TooLarge."""
    sent = decode(RerankRequest, body)
    query = _text(sent.query)
    return sent, _request(sent, [(query, _text(document)) for document in sent.documents], ("query", "documents"))


def read_score(body: bytes) -> tuple[ScoreRequest, Request]:
    """The same of /v1/score."""
    sent = decode(ScoreRequest, body)
    names = ("queries", "documents") if sent.queries is not None or sent.documents is not None else ("text_1", "text_2")
    first, second = (sent.queries, sent.documents) if names[0] == "queries" else (sent.text_1, sent.text_2)
    if first is None or second is None:
        name = names[0] if first is None else names[1]
        raise InvalidRequest("is missing; give queries and documents, or text_1 and text_2.", param=name)
    queries, documents = _texts(first), _texts(second)
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        message = f"{len(queries):,} for {len(documents):,} {names[1]}; there must be one, or one for each."
        raise InvalidRequest(message, param=names[0])
    return sent, _request(sent, list(zip(queries, documents, strict=True)), names)


def _request(sent: PairFields, pairs: list[Pair], names: tuple[str, str]) -> Request:
    if not pairs:
        raise InvalidRequest("is empty; give at least one text.", param=names[1])
    if len(pairs) > MAX_PAIRS:
        raise TooLarge(f"{len(pairs):,} texts; the limit is {MAX_PAIRS:,}. Split the request.", param=names[1])
    for index, (query, _) in enumerate(pairs):
        if not query:
            raise InvalidRequest("is empty.", param=names[0] if names[0] == "query" else f"{names[0]}[{index}]")
    limit = sent.truncate_prompt_tokens
    cuts = sent.truncate if sent.truncate is not None else limit is not None
    return Request(
        pairs,
        ("scores",),
        prompt=sent.prompt,
        prompt_name=sent.prompt_name,
        instruction=sent.instruction,
        activate=sent.use_activation,
        score_by=sent.score_by,
        truncate=read_truncate(cuts),
        max_tokens=None if limit == -1 else limit,
        priority=sent.priority or 0,
    )


def write_rerank(sent: RerankRequest, result: Result, model: str) -> bytes:
    """The answer, the best first."""
    scores_P = _scores(result)
    order: list[int] = np.argsort(-scores_P, kind="stable")[: sent.top_n or None].tolist()
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": score} for index, score in zip(order, scores_P[order], strict=True)
    ]
    if sent.return_documents is not False:
        texts = _texts(sent.documents)
        for each in results:
            each["document"] = {"text": texts[each["index"]]}
    return to_json({"model": model, "usage": _usage(result), "results": results})


def write_score(sent: ScoreRequest, result: Result, model: str) -> bytes:
    """The answer, in the order of the pairs."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(_scores(result))]
    return to_json({"object": "list", "data": data, "model": model, "usage": _usage(result)})


def write_rerank_error(error: WhimbrelError) -> bytes:
    """An error that names the query, or a document by its place."""
    return render_error(_named(error, "query", "documents"))


def write_score_error(error: WhimbrelError) -> bytes:
    """An error that names a query or a document by its place."""
    return render_error(_named(error, "queries", "documents"))


_NAMES: Final = {"max_tokens": "truncate_prompt_tokens", "activate": "use_activation"}
"""Fields of a Request that have another name here."""


def _named(error: WhimbrelError, *names: str) -> WhimbrelError:
    def name(index: int | None = None, part: int = 1) -> str:
        return names[part] if index is None or names[part] == "query" else f"{names[part]}[{index}]"

    return relocated(error, name).renamed(_NAMES)


def _scores(result: Result) -> Float32Array:
    scores_PC = result.outputs.scores
    assert scores_PC is not None
    if scores_PC.shape[1] != 1:
        raise InvalidRequest(f"this model gives {scores_PC.shape[1]} scores for a pair, of as many classes.", param="model")
    return scores_PC[:, 0]


def _usage(result: Result) -> dict[str, int]:
    return {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens}


def _texts(given: Text | list[Text]) -> list[str]:
    return [_text(each) for each in given] if isinstance(given, list) else [_text(given)]


def _text(given: Text) -> str:
    return given if isinstance(given, str) else given.text
