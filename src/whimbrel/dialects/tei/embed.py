"""TEI's /embed, /embed_all, /embed_sparse and /similarity. Pure functions over bytes."""

from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import msgspec
import numpy as np
import orjson

from whimbrel.dialects.common.answers import answer_type
from whimbrel.dialects.common.bodies import LONGEST, check, count, decode, schema
from whimbrel.dialects.common.responses import Response, ServedModel, json_answer
from whimbrel.dialects.common.route import Parsed, parser
from whimbrel.dialects.common.schemas import ID_LISTS, IDS, MAX_INPUTS, TEXT, Schema, any_of, never
from whimbrel.dialects.common.texts import Columns, PromptName, TokenInputs, parse_texts, side_of
from whimbrel.dialects.tei.answers import TEI, TERMS, timed
from whimbrel.errors import Location
from whimbrel.types.arrays import Float32Array, Int32Array
from whimbrel.types.options import require
from whimbrel.types.request import InputType, OutputName, Request, Truncate
from whimbrel.types.result import Result
from whimbrel.wire.json_base64 import LazyList, to_json

Direction: TypeAlias = Annotated[
    Literal["right", "left", "Right", "Left"] | None, schema("The end at which a text that is too long is cut.")
]
TruncateFlag: TypeAlias = Annotated[
    bool | None, schema("Cut texts that are too long; `false` makes them an error. Default: true, as in TEI since 1.9.")
]
TEIModelName: TypeAlias = Annotated[str | None, schema("The served model's name. TEI's own API has no such field.")]


class TEITextFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all routes that encode texts; each route declares its inputs."""

    RULES: ClassVar[tuple[Schema, ...]] = (never(prompt_name=TEXT, inputs=any_of(IDS, ID_LISTS)),)

    inputs: Any
    model: TEIModelName = None
    truncate: TruncateFlag = None
    truncation_direction: Direction = "right"
    prompt_name: PromptName = None
    input_type: Annotated[
        InputType | None,
        schema("Whether the texts are queries or documents, for models that treat them differently (Whimbrel's own)."),
    ] = None


class EmbedAllRequest(TEITextFields, frozen=True, kw_only=True):
    inputs: TokenInputs


class EmbedSparseRequest(TEITextFields, frozen=True, kw_only=True):
    inputs: TokenInputs


class VectorFields(TEITextFields, frozen=True, kw_only=True):
    """Fields of routes that give dense vectors."""

    normalize: Annotated[bool | None, schema("Divide vectors by their Euclidean norm. Default: true.")] = None
    dimensions: Columns = None


class TEIEmbedRequest(VectorFields, frozen=True, kw_only=True):
    inputs: TokenInputs


class Sentences(msgspec.Struct, frozen=True):
    """A sentence, and the sentences that it is compared with."""

    source_sentence: str
    sentences: Annotated[
        list[str], LONGEST, count(MAX_INPUTS, " sentences", empty="is an empty list; give at least one sentence.").says()
    ]


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the tokenizer."""

    truncate: TruncateFlag = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


class SimilarityRequest(msgspec.Struct, frozen=True, kw_only=True):
    inputs: Sentences
    parameters: Parameters | None = None
    model: TEIModelName = None


SparseValue: Final = answer_type("SparseValue", "An entry of the vocabulary, and its weight.", index=int, value=float)


def parse_embed_all(raw: bytes) -> Parsed[EmbedAllRequest]:
    """Parse a body that asks for hidden states, and of late-interaction models for token vectors, by default of documents."""
    body = decode(EmbedAllRequest, raw)
    request = encode_request(body, "hidden")

    def of_model(model: ServedModel) -> Request:
        side, is_late = side_of(model.card, body.input_type), "multi_vector" in model.card.outputs
        return encode_request(body, "multi_vector", side=side) if is_late else request

    return Parsed(body, of_model)


def dense(body: VectorFields) -> Request:
    return encode_request(body, "dense", normalize=body.normalize is not False, dimensions=body.dimensions)


def encode_request(body: TEITextFields, output: OutputName, *, side: InputType | None = None, **more: Any) -> Request:
    """Return the Request of a body. `side` replaces its own."""
    options: dict[str, Any] = {"prompt_name": body.prompt_name, "input_type": side or body.input_type, **more}
    return Request(parse_texts(body.inputs), (output,), truncate=cut(body.truncate, body.truncation_direction), **options)


def similarity(inputs: Sentences, parameters: Parameters) -> Request:
    """Return the Request of /similarity: as in TEI, the source is encoded as the sentences are."""
    check(inputs, Location("inputs"))
    texts, prompt_name = [inputs.source_sentence, *inputs.sentences], parameters.prompt_name
    truncate = cut(parameters.truncate, parameters.truncation_direction)
    return Request(texts, ("dense",), normalize=True, prompt_name=prompt_name, truncate=truncate)


def cut(truncate: bool | None, direction: str | None) -> Truncate:
    if truncate is False:
        return "never"
    return "left" if direction in ("left", "Left") else "right"


parse_embed: Final = parser(TEIEmbedRequest, dense)
parse_embed_sparse: Final = parser(EmbedSparseRequest, lambda body: encode_request(body, "sparse"))
parse_similarity: Final = parser(SimilarityRequest, lambda body: similarity(body.inputs, body.parameters or Parameters()))


def render_embed(body: TEITextFields, result: Result, model: ServedModel) -> Response:
    return timed(json_answer(result.dense, result), result, model, count_characters(body.inputs))


def render_embed_all(body: TEITextFields, result: Result, model: ServedModel) -> Response:
    vectors = require(result.outputs.multi_vector if result.outputs.hidden is None else result.outputs.hidden)
    rows = [vectors[index] for index in range(len(vectors))]
    return timed(json_answer(rows, result), result, model, count_characters(body.inputs))


def render_embed_sparse(body: TEITextFields, result: Result, model: ServedModel) -> Response:
    entries = LazyList(_entries(*each) for each in require(result.outputs.sparse))
    return timed(json_answer(entries, result), result, model, count_characters(body.inputs))


def _entries(ids_X: Int32Array, weights_X: Float32Array) -> orjson.Fragment:
    """Print two arrays and join them as text: an object for each entry would take longer than the model."""
    pairs = map(b',"value":'.join, zip(_printed(ids_X), _printed(weights_X), strict=True))
    return orjson.Fragment(b'[{"index":%b}]' % b'},{"index":'.join(pairs) if ids_X.size else b"[]")


def _printed(array_X: np.ndarray[Any, Any]) -> list[bytes]:
    return to_json(np.ascontiguousarray(array_X))[1:-1].split(b",") if array_X.size else []


def render_similarity(body: SimilarityRequest, result: Result, model: ServedModel) -> Response:
    vectors_ND = result.dense
    characters = len(body.inputs.source_sentence) + sum(map(len, body.inputs.sentences))
    return timed(to_json((vectors_ND[1:] * vectors_ND[0]).sum(axis=1)), result, model, characters)


def count_characters(inputs: str | list[Any]) -> int:
    if isinstance(inputs, str):
        return len(inputs)
    return sum(1 if isinstance(each, int) else count_characters(each) for each in inputs)


def _locate_sentence(location: Location) -> Location:
    return Location("inputs.sentences", location.item - 1) if location.item else Location("inputs.source_sentence")


_SIMILARITY_TERMS: Final = TERMS.extended({"input": _locate_sentence}, {"truncate": "parameters.truncate: true"})
_EXAMPLE: Final = '{"inputs": "What is a whimbrel?"}'

ROUTES: Final = (
    TEI(
        "/embed", "Dense vectors of texts (TEI).", parse_embed, render_embed, response_type=list[list[float]],
        made_for="dense", example=_EXAMPLE,
    ),
    TEI(
        "/embed_all", "A vector for each token of texts (TEI).",
        parse_embed_all, render_embed_all, response_type=list[list[list[float]]],
        made_for="multi_vector", example=_EXAMPLE,
    ),
    TEI(
        "/embed_sparse", "Weights of vocabulary entries for texts (TEI).",
        parse_embed_sparse, render_embed_sparse, response_type=list[list[SparseValue]],
        made_for="sparse", example=_EXAMPLE,
    ),
    TEI(
        "/similarity", "The cosine similarity of a sentence to others (TEI).",
        parse_similarity, render_similarity, response_type=list[float],
        made_for="dense", example='{"inputs": {"source_sentence": "A wader.", "sentences": ["A bird.", "A sandwich."]}}',
        terms=_SIMILARITY_TERMS,
    ),
)  # fmt: skip
