"""Pairs of a query and a document: the fields of bodies that rank or score them, their Request, and their scores.

Models that compare vectors also take vectors in place of any text, as /v1/embed gives them in base64, or in fewer bits. Bodies
are JSON or MessagePack, where vectors are bytes.

Texts that exceed the limit are an error by default, because a score of half a document looks like any other. Models of late
interaction cut queries and documents to their lengths, as their libraries do.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from whimbrel.dialects.common import texts
from whimbrel.dialects.common.answers import answer_type, described
from whimbrel.dialects.common.bodies import LONGEST, NOT_EMPTY, Natural, Positive, count, schema
from whimbrel.dialects.common.responses import ServedModel
from whimbrel.dialects.common.route import ErrorTerms
from whimbrel.dialects.common.schemas import ONE_PROMPT, ONE_SIDE, Schema, any_of, only, present
from whimbrel.dialects.common.texts import AdapterName, Instruction, ModelName, Priority, RequestId
from whimbrel.errors import InvalidRequest, Location, locate_pairs
from whimbrel.outputs.scoring import descending
from whimbrel.types.arrays import Float32Array
from whimbrel.types.late_interaction import TokenPooling, read_token_pooling
from whimbrel.types.options import MAX_PAIRS, require
from whimbrel.types.request import PairInput, Request, VectorInput
from whimbrel.types.result import Result

_MAX_SIZE: Final = 2**31 - 1
"""The limit of a dimension: numpy accepts no larger one, even if the array is empty."""


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content, as chat APIs have it."""

    RULES: ClassVar[tuple[Schema, ...]] = (present("text"),)

    type: Annotated[str, schema(enum=["text"])]
    text: str | None = None


_FIELDS: Final = ("text", "content", "data", "ids", "weights")


class Document(msgspec.Struct, frozen=True):
    """A text as an object; or, for models that compare vectors, the vectors that stand for it."""

    RULES: ClassVar[tuple[Schema, ...]] = (
        any_of(
            only("text", of=_FIELDS), only("content", of=_FIELDS), only("data", of=_FIELDS), only("ids", "weights", of=_FIELDS)
        ),
    )
    text: str | None = None
    content: Annotated[
        list[ContentPart] | None, schema("The text as a list of one part of the type `text` (vLLM).", minItems=1, maxItems=1)
    ] = None
    data: Annotated[bytes | None, schema("Vectors in place of the text: base64 of little-endian numbers, row by row.")] = None
    shape: Annotated[
        Annotated[list[Annotated[int, Meta(ge=0, le=_MAX_SIZE)]], Meta(max_length=2)] | None,
        schema("The shape of token vectors: [tokens, width]. Without it `data` is one vector."),
    ] = None
    dtype: Annotated[
        Literal["float32", "float16", "int8", "binary"],
        schema(
            "The type of numbers in `data`. `int8`: 127ths. `binary`: 8 columns to a byte, the first in the highest bit; a bit "
            "of 1 is 1, and 0 is -1."
        ),
    ] = "float32"
    ids: Annotated[bytes | None, schema("The entries of a sparse vector: base64 of little-endian int32.")] = None
    weights: Annotated[bytes | None, schema("The weights of a sparse vector: base64 of little-endian float32.")] = None


Text = str | Document
Query = Annotated[str, schema(**NOT_EMPTY.schema)] | Document
Queries = Annotated[list[Query], LONGEST]
Texts = Annotated[list[Text], LONGEST]
PAIRS: Final = count(MAX_PAIRS, " texts", empty="is empty; give at least one text.")
TEXTS_OF_PAIRS: Final = count(MAX_PAIRS, " texts")


def parse_parts(value: Text | list[Text], name: str) -> list[str | VectorInput]:
    if not isinstance(value, list):
        return [parse_part(value, Location(name))]
    return [parse_part(each, Location(name, index)) for index, each in enumerate(value)]


def parse_part(value: Text, location: Location) -> str | VectorInput:
    """Return a text, or the vectors that stand for it. Raises InvalidRequest."""
    if isinstance(value, str):
        return value
    sparse = value.ids is not None or value.weights is not None
    if (value.text is not None) + (value.content is not None) + (value.data is not None) + sparse != 1:
        raise InvalidRequest("must have one of text, data (vectors), or ids and weights (a sparse vector).", location=location)
    text = text_of(value) if value.content is None else _text_of(value.content, location.below(".content"))
    if text is not None:
        return text
    if value.data is not None:
        return _array(value.data, value.dtype, value.shape, location.below(".data"))
    if value.ids is None or value.weights is None:
        raise InvalidRequest("a sparse vector has both ids and weights.", location=location)
    ids = _array(value.ids, "int32", None, location.below(".ids"))
    return ids, _array(value.weights, "float32", None, location.below(".weights"))


def text_of(value: Text) -> str | None:
    """Return the text of a valid input; None if it came as vectors."""
    if isinstance(value, str):
        return value
    return value.content[0].text if value.content else value.text


def _text_of(content: list[ContentPart], location: Location) -> str:
    for index, part in enumerate(content):
        if part.type != "text":
            place = location.below(f"[{index}]")
            raise InvalidRequest(f"is of type {part.type[:40]!r}; this server takes text alone.", location=place)
    if len(content) != 1 or content[0].text is None:
        raise InvalidRequest("must be one part with a text.", location=location)
    return content[0].text


def _array(data: bytes, dtype: str, shape: list[int] | None, location: Location) -> NDArray[Any]:
    kind = np.dtype("uint8" if dtype == "binary" else dtype).newbyteorder("<")
    count, rest = divmod(len(data), kind.itemsize)
    if rest:
        message = f"{len(data):,} bytes are no whole numbers of {dtype}, {kind.itemsize} bytes each."
        raise InvalidRequest(message, location=location)
    array = np.frombuffer(data, kind)
    if shape is None:
        return array
    sizes = [*shape[:-1], -(-shape[-1] // 8)] if dtype == "binary" and shape else shape
    if not shape or prod(sizes) != count:
        message = f"{len(data):,} bytes are not the shape {shape}, which takes {prod(sizes) * kind.itemsize:,}."
        raise InvalidRequest(message, location=location)
    return array.reshape(sizes)


TextDocument: Final = answer_type(
    "TextDocument", "A text as an object.",
    text=str, multi_modal=described(None, "Always null: documents are texts (vLLM).", None),
)  # fmt: skip


class PairFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both routes take."""

    RULES: ClassVar[tuple[Schema, ...]] = (*ONE_PROMPT, *ONE_SIDE)
    model: ModelName = None
    adapter: AdapterName = None
    truncate: Annotated[
        texts.Truncation,
        schema(
            "The end at which a text that is too long is cut; `true` cuts as the model does. Default: such a text is an error."
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        schema(
            "Cut each pair to N tokens; -1 cuts to the model's maximum (vLLM). Where vectors are compared each text is cut; "
            "queries of a fixed length keep it."
        ),
    ] = None
    truncation_side: texts.TruncationSide = None
    max_tokens_per_query: Annotated[
        Natural | None, schema("Cut queries to N tokens before they are joined with documents; 0 does not (vLLM).")
    ] = None
    max_tokens_per_doc: Annotated[
        Natural | None, schema("Cut documents to N tokens before they are joined with queries; 0 does not (vLLM, Cohere).")
    ] = None
    request_id: RequestId = None
    score_by: Annotated[
        Literal["dense", "sparse", "multi_vector"] | None,
        schema("For models that give vectors: the kind that is compared. Default: the kind that the model is made for."),
    ] = None
    dimensions: Annotated[
        Positive | None, schema("Compare only the first N columns of vectors; for models trained with Matryoshka loss.")
    ] = None
    explain: Annotated[
        bool | None, schema("For late-interaction models: report the best match of each query token in each document.")
    ] = None
    token_pooling: Annotated[
        float | TokenPooling | None,
        schema(
            "For late-interaction models: merge similar token vectors of documents before scoring. A factor keeps about 1 / "
            "factor of them. Default: as the model does.",
            minimum=1,
        ),
    ] = None
    instruction: Instruction = None
    prompt_name: Annotated[str | None, schema("The name of one of the model's prompts, which is put before queries.")] = None
    prompt: Annotated[str | None, schema("Text put before queries, instead of a named prompt.")] = None
    use_activation: Annotated[bool | None, schema("Apply the activation to scores. Default: as the model does.")] = None
    priority: Priority = None


class RerankRequest(PairFields, frozen=True, kw_only=True):
    query: Query
    documents: Annotated[
        Texts,
        PAIRS.says(
            "At most {most} documents. An object has a `text`, or in its place `data` (vectors) or `ids` and `weights` (a "
            "sparse vector)."
        ),
    ]
    top_n: Annotated[Natural | None, schema("Return only the N best. Default: 0, which returns all.")] = None
    return_documents: Annotated[
        bool | Literal["true", "false", "True", "False"] | None,
        schema("Send the texts back. Default: true. The words are those of Xinference's clients."),
    ] = None


Explained: Final = answer_type(
    "Explained", "The best match of each query token in a document. Tokens are null where vectors came in place of a text.",
    query_tokens=list[str] | None, document_tokens=list[str] | None,
    maxima=described(list[float], "The greatest similarity of each query token to a document token."),
    places=described(list[int], "The index of that document token; -1 if the document has none."),
)  # fmt: skip
RankedDocument: Final = answer_type(
    "RankedDocument", "A document among those that were sent.",
    index=int, relevance_score=float, document=(TextDocument | None, None), explanation=(Explained | None, None),
)  # fmt: skip
RankedText: Final = answer_type(
    "RankedText", "A document among those that were sent, with its text if `return_documents` is true (Voyage).",
    index=int, relevance_score=float, document=(str | None, None),
)  # fmt: skip


def cut_by_format(body: PairFields, request: Request) -> Callable[[ServedModel], Request]:
    """Return the function from a model to its Request. Late-interaction models cut texts where the body does not say."""
    by_default = body.truncate is None and body.truncate_prompt_tokens is None

    def of_model(model: ServedModel) -> Request:
        cuts = by_default and (model.card.text_formats or model.card.list_template)
        return replace(request, truncate=body.truncation_side) if cuts else request

    return of_model


def request_of(body: RerankRequest) -> Request:
    query = parse_part(body.query, Location("query"))
    NOT_EMPTY.check(query, Location("query"))
    pairs = [(query, parse_part(each, Location("documents", index))) for index, each in enumerate(body.documents)]
    return pairs_request(body, pairs, listwise=True)


def pairs_request(body: PairFields, pairs: list[PairInput], *, listwise: bool) -> Request:
    truncate, limit = texts.parse_truncation(body.truncate, body.truncation_side, body.truncate_prompt_tokens, default=False)
    return Request(
        pairs,
        ("scores",),
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        adapter=body.adapter,
        instruction=body.instruction,
        listwise=listwise,
        activate=body.use_activation,
        score_by=body.score_by,
        token_pooling=read_token_pooling(body.token_pooling),
        dimensions=body.dimensions,
        explain=bool(body.explain),
        truncate=truncate,
        max_tokens=limit,
        max_query_tokens=body.max_tokens_per_query or None,
        max_document_tokens=body.max_tokens_per_doc or None,
    )


def rank(body: RerankRequest, result: Result, shape: Callable[[str], Any] | None = None) -> list[dict[str, Any]]:
    """Return a row for each document, best first. `shape` makes its `document` of its text; None leaves texts out."""
    rows: list[dict[str, Any]] = [{"index": i, "relevance_score": score} for i, score in best_pairs(result, body.top_n)]
    for row in rows:
        index: int = row["index"]
        if shape is not None and (text := text_of(body.documents[index])) is not None:
            row["document"] = shape(text)
        if body.explain:
            row["explanation"] = explained(result, index)
    return rows


def best_pairs(result: Result, top_n: int | None = None) -> list[tuple[int, np.float32]]:
    """Return the index and the score of each pair, best first; at most `top_n`, unless it is 0 or None."""
    order = descending(result.outputs.order[:, 0], top_n or None)
    return list(zip(order, pair_scores(result)[order], strict=True))


def pair_scores(result: Result) -> Float32Array:
    """Return the score of each pair. Raises InvalidRequest if the model gives several."""
    scores_PC = require(result.outputs.scores)
    if scores_PC.shape[1] != 1:
        raise InvalidRequest(f"this model gives {scores_PC.shape[1]} scores for a pair, of as many classes.", param="model")
    return scores_PC[:, 0]


def explained(result: Result, index: int) -> dict[str, Any]:
    maxima, places = np.ascontiguousarray(require(result.outputs.token_matches)[index].T)
    columns = *require(result.pair_tokens)[index], maxima, places.astype(np.int32)
    return dict(zip(Explained.__struct_fields__, columns, strict=True))


PAIR_FIELDS: Final = {
    "max_tokens": "truncate_prompt_tokens",
    "max_query_tokens": "max_tokens_per_query",
    "max_document_tokens": "max_tokens_per_doc",
    "activate": "use_activation",
    "outputs": "model",
}
RERANK_TERMS: Final = ErrorTerms({**PAIR_FIELDS, "input": locate_pairs("query", "documents", single=(True, False))})
