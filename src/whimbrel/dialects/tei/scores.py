"""TEI's /rerank and /predict. Pure functions over bytes.

Scores pass through the checkpoint's activation unless the body asks for raw scores.
"""

from typing import Annotated, Any, Final, TypeAlias, cast

import msgspec

from whimbrel.dialects.common.activation import ActivationName, Prediction, activate, activation_of, predict
from whimbrel.dialects.common.answers import answer_type
from whimbrel.dialects.common.bodies import LONGEST, Positive, decode, is_packed, schema, text_inputs
from whimbrel.dialects.common.pairs import TEXTS_OF_PAIRS
from whimbrel.dialects.common.responses import Response, ServedModel
from whimbrel.dialects.common.route import Parsed
from whimbrel.dialects.common.schemas import TEXT, TEXT_LISTS, TEXT_PAIRS, list_of
from whimbrel.dialects.tei.answers import TEI, TERMS, timed, wrong_model_type
from whimbrel.dialects.tei.embed import Direction, TEIModelName, TruncateFlag, count_characters, cut
from whimbrel.errors import InvalidRequest, locate_pairs
from whimbrel.outputs.scoring import descending
from whimbrel.types.options import require
from whimbrel.types.request import Pair, Request
from whimbrel.types.result import Result
from whimbrel.wire.json_base64 import to_json

Raw: TypeAlias = Annotated[bool | None, schema("Return logits, without any activation. Default: false.")]
Sequences: TypeAlias = str | list[str | list[str]]


class TEIRerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /rerank in TEI's form."""

    query: str
    texts: Annotated[list[str], LONGEST, TEXTS_OF_PAIRS.says("At most {most} texts.")]
    model: TEIModelName = None
    truncate: TruncateFlag = None
    truncation_direction: Direction = "right"
    raw_scores: Raw = None
    return_text: Annotated[bool | None, schema("Send the texts back.")] = None


Rank: Final = answer_type("Rank", "A text among those that were sent.", index=int, score=float, text=(str | None, None))


class PredictParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `InferenceClient.text_classification`."""

    function_to_apply: Annotated[
        ActivationName | None, schema("The function applied to logits. Default: the checkpoint's activation.")
    ] = None
    top_k: Annotated[Positive | None, schema("Return only the N best classes. Default: all.")] = None


class PredictRequest(msgspec.Struct, frozen=True, kw_only=True):
    inputs: Annotated[
        Sequences,
        text_inputs(TEXT, list_of(TEXT, 2), TEXT_LISTS, TEXT_PAIRS).says(
            "A text; a pair, as a list of two texts; or at most {most} lists, of one text each, or of two."
        ),
    ]
    model: TEIModelName = None
    truncate: TruncateFlag = None
    truncation_direction: Direction = "right"
    raw_scores: Raw = None
    parameters: Annotated[
        PredictParameters | None,
        schema("Parameters as `InferenceClient` sends them. With them the answer to one text is a list of lists too."),
    ] = None


def parse_rerank(raw: bytes) -> Parsed[TEIRerankRequest]:
    body = decode(TEIRerankRequest, raw, packed=is_packed(raw))
    pairs = [(body.query, text) for text in body.texts]

    def request(model: ServedModel) -> Request:
        output = model.card.outputs.get("scores")
        if output is not None and output.width != 1:
            message = f"this model gives {output.width} scores, of as many classes, and ranks nothing; ask /predict."
            raise wrong_model_type(message)
        activate = None if output is None else activation_of(body.raw_scores, model) is None
        truncate = cut(body.truncate, body.truncation_direction)
        return Request(pairs, ("scores",), listwise=True, activate=activate, truncate=truncate)

    return Parsed(body, request)


def render_rerank(body: TEIRerankRequest, result: Result, model: ServedModel) -> Response:
    order = descending(result.outputs.order[:, 0])
    scores_N = activate(activation_of(body.raw_scores, model), require(result.outputs.scores))[:, 0]
    ranks: list[dict[str, Any]] = [{"index": i, "score": score} for i, score in zip(order, scores_N[order], strict=True)]
    for rank in ranks if body.return_text else ():
        rank["text"] = body.texts[rank["index"]]
    characters = len(body.query) * len(body.texts) + sum(map(len, body.texts))
    return timed(to_json(ranks), result, model, characters)


def parse_predict(raw: bytes) -> Parsed[PredictRequest]:
    body = decode(PredictRequest, raw)
    texts = sequences(body.inputs)
    return Parsed(body, lambda model: classes(body, texts, model))


def classes(body: PredictRequest, texts: list[str] | list[Pair], model: ServedModel) -> Request:
    model.card.output("scores")
    activates = _activation_of(body, model) is None
    return Request(texts, ("scores",), activate=activates, truncate=cut(body.truncate, body.truncation_direction))


def _activation_of(body: PredictRequest, model: ServedModel) -> ActivationName | None:
    return activation_of(body.raw_scores, model, body.parameters and body.parameters.function_to_apply)


def sequences(inputs: Sequences) -> list[str] | list[Pair]:
    if isinstance(inputs, str):
        return [inputs]
    rows = inputs if isinstance(inputs[0], list) else [inputs]
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) not in (1, 2) or not all(isinstance(text, str) for text in row):
            item = index if rows is inputs else None
            raise InvalidRequest("must be one text, or a pair of two; many are a list of such lists.", param="input", item=item)
        if len(row) != len(rows[0]):
            raise InvalidRequest("texts and pairs cannot be mixed in one list.", item=index)
    if len(rows[0]) == 1:
        return [cast(str, row[0]) for row in rows]
    return [cast(Pair, tuple(row)) for row in rows]


def render_predict(body: PredictRequest, result: Result, model: ServedModel) -> Response:
    parameters = body.parameters or PredictParameters()
    predictions = predict(result, model, _activation_of(body, model), parameters.top_k)
    is_batch = not isinstance(body.inputs, str) and isinstance(body.inputs[0], list)
    answer: object = predictions if is_batch or body.parameters is not None else predictions[0]
    return timed(to_json(answer), result, model, count_characters(body.inputs))


RERANK: Final = TEI(
    "/rerank", "Texts ranked by a query (TEI).",
    parse_rerank, render_rerank, response_type=list[Rank],
    made_for="ranking", example='{"query": "What is a whimbrel?", "texts": ["A wader with a curved bill.", "A sandwich."]}',
    terms=TERMS.extended({"input": locate_pairs("query", "texts", single=(True, False))}), discriminators=frozenset({"texts"}),
)  # fmt: skip
PREDICT: Final = TEI(
    "/predict", "The classes of texts, or of pairs (TEI).",
    parse_predict, render_predict, response_type=list[Prediction | list[Prediction]],
    made_for="classes", example='{"inputs": "I like whimbrels."}',
)  # fmt: skip
ROUTES: Final = (RERANK, PREDICT)
