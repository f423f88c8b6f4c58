"""Cohere's embed and rerank APIs, versions 2 and 1, for texts. Pure functions over bytes.

/embed truncates texts at their end by default. /rerank takes the fields of Jina and vLLM too, and
refuses options that would run a long document in several chunks. Unknown fields are ignored.
Source: cohere-python 7.3 (v2/raw_client.py, raw_base_client.py, types).
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias
from uuid import uuid4

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from whimbrel.dialects.common.activation import class_names
from whimbrel.dialects.common.answers import Usage, answer_type, usage
from whimbrel.dialects.common.bodies import Positive, count, decode, holds, is_packed, schema
from whimbrel.dialects.common.hosted import check_bits, quantize
from whimbrel.dialects.common.pairs import RERANK_TERMS, ContentPart, RankedDocument, RerankRequest, rank, request_of
from whimbrel.dialects.common.responses import Response, ServedModel, json_answer
from whimbrel.dialects.common.route import ErrorTerms, Parsed, Route, parser, ready
from whimbrel.dialects.common.schemas import MAX_IDS, MAX_INPUTS, Schema, only
from whimbrel.dialects.common.texts import CUTS, Columns, ModelName, parse_texts, prompt_for_task
from whimbrel.errors import InvalidRequest, Location, WhimbrelError
from whimbrel.outputs.scoring import descending
from whimbrel.types.arrays import Float32Array
from whimbrel.types.card import Card
from whimbrel.types.options import require
from whimbrel.types.request import DetokenizeRequest, InputType, Request, TokenizeRequest
from whimbrel.types.result import Result
from whimbrel.types.seq import TokenInfo
from whimbrel.wire.json_base64 import base64_rows, to_json

Cut: TypeAlias = Annotated[
    Literal["NONE", "START", "END"] | None,
    schema("The end at which a text that is too long is cut; `END` by default. `NONE` makes it an error."),
]
_TEXTS: Final = count(MAX_INPUTS, " inputs")
_NO_IMAGES: Final = "this server takes texts, no images."


class CohereContent(ContentPart, frozen=True):
    """A piece of an input."""


class CohereInput(msgspec.Struct, frozen=True):
    """An input as an object."""

    content: Annotated[list[CohereContent], schema(minItems=1, maxItems=1)]


class CohereEmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v2/embed, and of POST /v1/embed where it has `texts`."""

    RULES: ClassVar[tuple[Schema, ...]] = (
        {"anyOf": [only("texts", of=("texts", "inputs")), only("inputs", of=("texts", "inputs"))]},
    )
    model: ModelName = None
    texts: Annotated[list[str] | None, _TEXTS.says("At most {most} texts.")] = None
    inputs: Annotated[
        list[CohereInput] | None, _TEXTS.says("The same as `texts`, each an object with one content, a text.")
    ] = None
    images: Annotated[
        list[str] | None,
        holds(lambda images: not images, _NO_IMAGES, maxItems=0).says("Rejected: the models served here take texts."),
    ] = None
    input_type: Annotated[
        str | None,
        schema(
            "What the texts are for: the model's prompt of that name if it has one (vLLM). Else `search_query` is a query and "
            "`search_document` a document, for models that treat them differently, and `classification` and `clustering` say "
            "nothing to the model."
        ),
    ] = None
    embedding_types: Annotated[
        list[Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]] | None,
        schema(
            "The types of numbers, each of which the answer has. Default: `float`. `base64`: the bytes of little-endian "
            "float32."
        ),
    ] = None
    output_dimension: Columns = None
    max_tokens: Annotated[Positive | None, schema("A limit of tokens per text below the model's maximum.")] = None
    truncate: Cut = None
    priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None, schema("Requests with lower numbers run first.")
    ] = None


CohereEmbeddings: Final = answer_type(
    "CohereEmbeddings", "The vectors in each of the types that were asked for.",
    float=(list[list[float]] | None, None),
    **dict.fromkeys(("int8", "uint8", "binary", "ubinary"), (list[list[int]] | None, None)),
    base64=(list[str] | None, None),
)  # fmt: skip
CohereVersion: Final = answer_type("CohereVersion", "The version of the API.", version=str)
CohereMeta: Final = answer_type(
    "CohereMeta", "Units of work: tokens of all texts after truncation, or one search for a list that was ranked.",
    api_version=CohereVersion, billed_units=dict[str, int],
)  # fmt: skip
CohereEmbedResponse: Final = answer_type(
    "CohereEmbedResponse",
    "Answer of POST /v2/embed and /v1/embed. In /v1/embed `embeddings` is a list where no types were asked for.",
    id=str, response_type=Literal["embeddings_by_type", "embeddings_floats"], embeddings=CohereEmbeddings | list[list[float]],
    texts=list[str], meta=CohereMeta,
)  # fmt: skip


class CohereTokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    model: ModelName = None


CohereTokens: Final = answer_type(
    "CohereTokens", "Answer of POST /v1/tokenize, without special tokens.",
    tokens=list[int], token_strings=list[str], meta=dict[str, CohereVersion],
)  # fmt: skip


class CohereDetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Annotated[
        list[Annotated[int, Meta(ge=0, lt=2**31)]], count(MAX_IDS, " token ids", least=0).says("At most {most} token ids.")
    ]
    model: ModelName = None


CohereText: Final = answer_type("CohereText", "Answer of POST /v1/detokenize.", text=str, meta=dict[str, CohereVersion])


class CohereClassifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/classify where it has `inputs`."""

    inputs: Annotated[list[str], count(MAX_INPUTS, " texts").says("At most {most} texts.")]
    model: ModelName = None
    examples: Annotated[
        list[dict[str, Any]] | None,
        holds(
            lambda examples: not examples, "are not learnt from here; serve a classifier, and leave them out.", maxItems=0
        ).says("Rejected: a model's classes are those that it was trained for."),
    ] = None
    truncate: Cut = None


CohereConfidence: Final = answer_type("CohereConfidence", "The score of a class.", confidence=float)
CohereClassification: Final = answer_type(
    "CohereClassification",
    "The classes of one text. Where a text may have several, `predictions` has each with a score of 0.5 or more.",
    id=str, input=str, prediction=str, predictions=list[str], confidence=float, confidences=list[float],
    labels=dict[str, CohereConfidence], classification_type=Literal["single-label", "multi-label"],
)  # fmt: skip
CohereClassifyResponse: Final = answer_type(
    "CohereClassifyResponse", "Answer of POST /v1/classify.",
    id=str, classifications=list[CohereClassification], meta=CohereMeta,
)  # fmt: skip


class CohereSpans(msgspec.Struct, frozen=True):
    """The choice of spans of documents."""

    mode: Annotated[str, schema(enum=["disabled"])]


class CohereRerankRequest(RerankRequest, frozen=True, kw_only=True):
    relevant_spans: Annotated[CohereSpans | None, schema("Rejected if its mode is `enabled`.")] = None
    return_documents: Annotated[bool | None, schema("Send the texts back. Default: false.")] = None


class CohereRerankRequestV1(RerankRequest, frozen=True, kw_only=True):
    """Body of POST /v1/rerank where it has one of these fields."""

    rank_fields: Annotated[
        list[str] | None,
        holds(
            lambda fields: fields == ["text"],
            'only ["text"] is known here; join the fields to one text.',
            enum=[None, ["text"]],
        ).says("The fields of documents that are ranked; only `text` is accepted."),
    ] = None
    max_chunks_per_doc: Annotated[
        Positive | None,
        schema("1 cuts documents that are too long. With any other number they are an error: documents are not run in chunks."),
    ] = None
    return_documents: Annotated[bool | None, schema("Send the texts back. Default: false.")] = None


CohereRerankResponse: Final = answer_type(
    "CohereRerankResponse",
    "Answer of POST /v1/rerank and /v2/rerank, best first by the scores before activation.\n\n    "
    "Of equal ones the first document comes first.",
    id=str, results=list[RankedDocument], meta=CohereMeta, model=str, usage=Usage,
)  # fmt: skip
_INPUT_TYPES: Final[dict[str, InputType | None]] = {
    "search_query": "query",
    "search_document": "document",
    "classification": None,
    "clustering": None,
}


def parse_embed(raw: bytes) -> Parsed[CohereEmbedRequest]:
    body = decode(CohereEmbedRequest, raw)
    texts = parse_texts(_texts(body))

    def request(model: ServedModel) -> Request:
        check_bits(model.card, "dense", body.output_dimension, body.embedding_types or (), param="embedding_types")
        return Request(
            texts,
            ("dense",),
            dimensions=body.output_dimension,
            truncate=CUTS.get(body.truncate, "right"),
            max_tokens=None if body.max_tokens is None else min(body.max_tokens, model.plan.max_length),
            **_purpose(model.card, body.input_type),
        )

    return Parsed(body, request)


def _purpose(card: Card, word: str | None) -> dict[str, Any]:
    purpose = prompt_for_task(card, word, _INPUT_TYPES.get(word or ""))
    if word is not None and word not in _INPUT_TYPES and purpose["prompt_name"] is None and "adapter" not in purpose:
        names = ", ".join(dict.fromkeys((*_INPUT_TYPES, *card.prompts, *card.tasks)))
        raise InvalidRequest(f"{word[:40]!r} is no prompt of this model; it takes: {names}.", param="input_type")
    return purpose


def _texts(body: CohereEmbedRequest) -> list[str]:
    if body.input_type == "image":
        raise InvalidRequest(_NO_IMAGES, param="input_type")
    if (body.texts is None) == (body.inputs is None):
        raise InvalidRequest("give either texts or inputs.", param="texts")
    if body.inputs is None:
        return body.texts or []
    return [_text(each, Location("inputs", index, path=".content")) for index, each in enumerate(body.inputs)]


def _text(value: CohereInput, location: Location) -> str:
    for index, each in enumerate(value.content):
        if each.type != "text" or each.text is None:
            raise InvalidRequest(
                f"is of type {each.type[:40]!r}, where a text is expected; this server takes no images.",
                location=location.below(f"[{index}]"),
            )
    if len(value.content) != 1:
        message = f"has {len(value.content):,} texts; give one, joined as the model is to read them."
        raise InvalidRequest(message, location=location)
    return value.content[0].text or ""


def render_embed(body: CohereEmbedRequest, result: Result, model: ServedModel, version: str = "2") -> bytes | Response:
    types = body.embedding_types or (() if version == "1" else ("float",))
    columns = {kind: quantize(result.dense, kind) for kind in types}
    by_type = {kind: base64_rows(column) if kind == "base64" else column for kind, column in columns.items()}
    content = {
        "id": str(uuid4()),
        "response_type": "embeddings_by_type" if types else "embeddings_floats",
        "embeddings": by_type if types else result.dense,
        "texts": _texts(body),
        "meta": _meta(version, input_tokens=result.num_tokens, image_tokens=0),
    }
    return json_answer(content, result, times=len(types) or 1)


def _meta(version: str, **units: int) -> dict[str, Any]:
    return {"api_version": {"version": version}, "billed_units": units}


parse_tokenize: Final = parser(CohereTokenizeRequest, lambda body: TokenizeRequest([body.text], special=False))
parse_detokenize: Final = parser(CohereDetokenizeRequest, lambda body: DetokenizeRequest([body.tokens]))


def render_tokenize(body: CohereTokenizeRequest, results: Sequence[TokenInfo], model: ServedModel) -> bytes:
    (tokens,) = results
    return to_json({"tokens": tokens.ids_T, "token_strings": list(tokens.names), "meta": _VERSION_1})


def render_detokenize(body: CohereDetokenizeRequest, results: Sequence[str], model: ServedModel) -> bytes:
    return to_json({"text": results[0], "meta": _VERSION_1})


_VERSION_1: Final = {"api_version": {"version": "1"}}


def parse_classify(raw: bytes) -> Parsed[CohereClassifyRequest]:
    body = decode(CohereClassifyRequest, raw)

    def request(model: ServedModel) -> Request:
        model.card.output("scores")
        return Request(parse_texts(body.inputs), ("scores",), truncate=CUTS.get(body.truncate, "right"))

    return Parsed(body, request)


def render_classify(body: CohereClassifyRequest, result: Result, model: ServedModel) -> bytes | Response:
    scores_NC = require(result.outputs.scores)
    labels = class_names(model.card.labels, scores_NC.shape[1])
    is_single = len(labels) == 1 or model.card.output("scores").activation != "sigmoid"
    rows = zip(body.inputs, scores_NC, result.outputs.order, strict=True)
    classes = [_classification(text, labels, scores_C, order_C, is_single) for text, scores_C, order_C in rows]
    content = {"id": str(uuid4()), "classifications": classes, "meta": _meta("1", classifications=len(classes))}
    return json_answer(content, result)


_LIKELY: Final = 0.5
"""The score from which on a text has a label, where it may have several."""


def _classification(
    text: str, labels: Sequence[str], scores_C: Float32Array, order_C: Float32Array, is_single: bool
) -> dict[str, Any]:
    order = descending(order_C)
    chosen = order[:1] if is_single else [i for i in order if scores_C[i] >= _LIKELY]
    return {
        "id": str(uuid4()),
        "input": text,
        "prediction": labels[order[0]],
        "predictions": [labels[i] for i in chosen],
        "confidence": scores_C[order[0]],
        "confidences": [scores_C[i] for i in chosen],
        "labels": {label: {"confidence": score} for label, score in zip(labels, scores_C, strict=True)},
        "classification_type": "single-label" if is_single else "multi-label",
    }


def parse_rerank(raw: bytes) -> Parsed[CohereRerankRequest]:
    body = decode(CohereRerankRequest, raw)
    if body.relevant_spans is not None and body.relevant_spans.mode != "disabled":
        raise InvalidRequest("spans are not given here; leave it out.", param="relevant_spans")
    return ready(body, request_of(replace(body, truncate=True if body.truncate is None else body.truncate)))


def parse_rerank_v1(raw: bytes) -> Parsed[CohereRerankRequestV1]:
    body = decode(CohereRerankRequestV1, raw, packed=is_packed(raw))
    cuts = True if body.truncate is None and body.max_chunks_per_doc == 1 else body.truncate
    return ready(body, request_of(replace(body, truncate=cuts)))


def render_rerank(body: RerankRequest, result: Result, model: ServedModel, version: str = "2") -> bytes | Response:
    content: dict[str, Any] = {
        "id": str(uuid4()),
        "results": rank(body, result, (lambda text: {"text": text}) if body.return_documents else None),
        "meta": _meta(version, search_units=1),
        "model": model.plan.served_name,
        "usage": usage(result),
    }
    return json_answer(content, result)


CohereError: Final = answer_type("CohereError", "An error of Cohere's API.", message=str)
_TERMS: Final = ErrorTerms(
    {"input": "texts", "dimensions": "output_dimension", "outputs": "model", "prompt_name": "input_type"},
    {"truncate": 'truncate="END"', "input_type": 'input_type="search_query" or "search_document"'},
)


def render_error(error: WhimbrelError, terms: ErrorTerms = _TERMS) -> bytes:
    return msgspec.json.encode({"message": terms.describe(error)[0]})


_COHERE: Final = partial(Route, render=render_error, error_type=CohereError, terms=_TERMS)
_RANKING: Final = '"query": "What is a whimbrel?", "documents": ["A wader with a curved bill.", "A sandwich."]'

ROUTES: Final = (
    _COHERE(
        "/v2/embed", "Dense vectors of texts, in several types of numbers (Cohere v2).",
        parse_embed, render_embed, response_type=CohereEmbedResponse,
        made_for="dense",
        example='{"texts": ["A whimbrel is a wader."], "input_type": "search_document", "embedding_types": ["float", "int8"]}',
    ),
    _COHERE(
        "/v1/embed", "Dense vectors of texts: a body with `texts` (Cohere v1).",
        parse_embed, partial(render_embed, version="1"), response_type=CohereEmbedResponse,
        made_for="dense", example='{"texts": ["A whimbrel is a wader."], "input_type": "search_document"}',
        discriminators=frozenset(("texts", "images")),
    ),
    _COHERE(
        "/v1/tokenize", "The token ids of a text (Cohere v1).", parse_tokenize, render_tokenize, response_type=CohereTokens,
        example='{"text": "A whimbrel is a wader."}', terms=_TERMS.extended({"input": lambda _: Location("text")}),
    ),
    _COHERE(
        "/v1/detokenize", "The text of token ids (Cohere v1).", parse_detokenize, render_detokenize, response_type=CohereText,
        example='{"tokens": [101, 102]}',
        terms=_TERMS.extended({"input": lambda location: Location("tokens", location.part)}),
    ),
    _COHERE(
        "/v1/classify", "The classes of texts: a body with `inputs` (Cohere v1).",
        parse_classify, render_classify, response_type=CohereClassifyResponse,
        made_for="classes", example='{"inputs": ["What a fine bird."]}', terms=_TERMS.extended({"input": "inputs"}),
        discriminators=frozenset(("inputs", "examples")),
    ),
    _COHERE(
        "/v2/rerank", "Documents ranked by a query (Cohere v2, vLLM).",
        parse_rerank, render_rerank, response_type=CohereRerankResponse,
        made_for="ranking", example=f'{{{_RANKING}, "top_n": 1}}', terms=RERANK_TERMS,
    ),
    _COHERE(
        "/v1/rerank", "Documents ranked by a query: a body with `rank_fields` or `max_chunks_per_doc` (Cohere v1).",
        parse_rerank_v1, partial(render_rerank, version="1"), response_type=CohereRerankResponse,
        made_for="ranking", example=f'{{{_RANKING}, "max_chunks_per_doc": 1}}',
        terms=RERANK_TERMS.extended({}, {"truncate": "max_chunks_per_doc=1"}),
        discriminators=frozenset(("rank_fields", "max_chunks_per_doc")),
    ),
)  # fmt: skip
