"""NVIDIA's ranking API (NIM). Its embeddings are OpenAI's, with `input_type` and `truncate`. Pure functions over bytes.

Scores are logits, without the checkpoint's activation; those of models that compare vectors are similarities. Unknown fields
are ignored. Source: NVIDIA NIM for text reranking 1.10, API reference; langchain-nvidia-ai-endpoints 1.0.
"""

from typing import Annotated, Final, Literal

import msgspec

from whimbrel.dialects.common.answers import Usage, answer_type, usage
from whimbrel.dialects.common.bodies import LONGEST, NOT_EMPTY, check, count, decode, schema
from whimbrel.dialects.common.openai_errors import DETAILED
from whimbrel.dialects.common.pairs import RERANK_TERMS, best_pairs
from whimbrel.dialects.common.responses import Response, ServedModel, json_answer
from whimbrel.dialects.common.route import Parsed
from whimbrel.dialects.common.texts import CUTS, ModelName
from whimbrel.errors import Location, locate_pairs
from whimbrel.types.options import MAX_PAIRS
from whimbrel.types.request import Request
from whimbrel.types.result import Result


class Passage(msgspec.Struct, frozen=True):
    """A text as an object."""

    text: str


class RankingQuery(msgspec.Struct, frozen=True):
    """The query as an object."""

    text: Annotated[str, NOT_EMPTY.says()]


class RankingRequest(msgspec.Struct, frozen=True, kw_only=True):
    query: RankingQuery
    passages: Annotated[
        list[Passage],
        LONGEST,
        count(MAX_PAIRS, " passages", empty="is an empty list; give at least one passage.").says("At most {most} texts."),
    ]
    model: ModelName = None
    truncate: Annotated[
        Literal["NONE", "END"] | None,
        schema("`END` cuts texts that are too long; `NONE` makes them an error. Default: `NONE`."),
    ] = None


Ranking: Final = answer_type("Ranking", "A passage among those that were sent.", index=int, logit=float)
RankingResponse: Final = answer_type(
    "RankingResponse", "Answer of POST /v1/ranking, best first; of equal scores the first passage comes first.",
    rankings=list[Ranking], usage=Usage,
)  # fmt: skip


def parse_ranking(raw: bytes) -> Parsed[RankingRequest]:
    body = decode(RankingRequest, raw)
    check(body.query, Location("query"))
    pairs = [(body.query.text, each.text) for each in body.passages]

    def request(model: ServedModel) -> Request:
        activate = False if "scores" in model.card.outputs else None
        return Request(pairs, ("scores",), listwise=True, activate=activate, truncate=CUTS[body.truncate or "NONE"])

    return Parsed(body, request)


def render_ranking(body: RankingRequest, result: Result, model: ServedModel) -> bytes | Response:
    rankings = [{"index": index, "logit": score} for index, score in best_pairs(result)]
    return json_answer({"rankings": rankings, "usage": usage(result)}, result)


ROUTES: Final = tuple(
    DETAILED(
        path, "Passages ranked by a query (NVIDIA).", parse_ranking, render_ranking, response_type=RankingResponse,
        made_for="ranking",
        example='{"query": {"text": "What is a whimbrel?"}, "passages": [{"text": "A wader."}, {"text": "A sandwich."}]}',
        terms=RERANK_TERMS.extended(
            {"input": locate_pairs("query", "passages", single=(True, False))}, {"truncate": 'truncate="END"'}
        ),
    )
    for path in ("/v1/ranking", "/ranking")
)  # fmt: skip
