"""Whimbrel's own routes: any outputs of one pass, classes of texts and pairs, and entities. Pure functions over bytes."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from whimbrel.dialects.common import responses, texts
from whimbrel.dialects.common.answers import Usage, answer_type, described, usage
from whimbrel.dialects.common.bodies import Positive, decode, schema, text_inputs
from whimbrel.dialects.common.openai_errors import OpenAIError, render_error
from whimbrel.dialects.common.responses import SENT_OUTPUTS, EncodingFormat, Response, ServedModel, json_answer
from whimbrel.dialects.common.route import ErrorTerms, Parsed, Route, binary_formats, ready
from whimbrel.dialects.common.schemas import ID_LISTS, IDS, TEXT, TEXT_PAIRS, TEXTS, Schema, absent, any_of, never, present
from whimbrel.dialects.common.texts import AdapterName, Instruction, ModelName, TextFields, TextUse, Truncation
from whimbrel.errors import TooLarge
from whimbrel.outputs import scoring
from whimbrel.outputs.scoring import Operation
from whimbrel.outputs.zero_shot import MAX_TEMPLATE
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.late_interaction import MuveraParameters, TokenPooling, read_muvera, read_token_pooling
from whimbrel.types.options import MAX_LABELS, MAX_PAIRS, ScoreOptions
from whimbrel.types.request import OutputName
from whimbrel.types.result import Classes, Entity, Ragged, Result, Sparse
from whimbrel.wire.dtypes import ByteOrder, EncodedArray
from whimbrel.wire.json_base64 import Base64, base64_rows, to_json

T = TypeVar("T")
EmbedType: TypeAlias = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8", "binary", "ubinary"]


class EmbedRequest(TextFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: Annotated[
        str | list[str | int | list[int | str]],
        text_inputs(TEXT, TEXTS, TEXT_PAIRS, IDS, ID_LISTS).says(
            "A text, a list of texts, a list of pairs of texts (query and document), a list of token ids, or a list of such "
            "lists; at most {most} inputs and {ids} ids. Token ids are taken as they are."
        ),
    ]
    outputs: Annotated[
        OutputName | list[OutputName] | None,
        schema(
            "One output or a list of them, all from one pass. Default: the outputs that the model is made for. /info lists "
            "them all."
        ),
    ] = None
    encoding_format: Annotated[
        EncodingFormat | None,
        schema(
            "`float` (default): JSON numbers. `base64`: JSON with the bytes of arrays (ids: int32). `bytes`: all arrays one "
            "after another, and a header `metadata` that says in JSON what is where. `bytes_only`: one array without the "
            "header. `npy`: one array as a file for numpy. `arrow`: a stream for Arrow, a column for each output. By default "
            "what `Accept` asks for."
        ),
    ] = None
    embed_dtype: Annotated[
        EmbedType | None,
        schema(
            "How numbers travel, float32 by default. Vectors also as `int8` (127ths of the largest entry), `uint8` (that + "
            "128), `ubinary` (packed bits: greater than 0) or `binary` (that - 128); others are then float32."
        ),
    ] = None
    endianness: Annotated[ByteOrder | None, schema("The byte order of binary and base64 numbers. Default: `little`.")] = None
    input_type: TextUse = None
    instruction: Instruction = None
    activate: Annotated[bool | None, schema("Apply the activation to scores. Default: as the model does.")] = None
    max_active_dims: Annotated[Positive | None, schema("Keep the N largest entries of each sparse vector.")] = None
    token_pooling: Annotated[
        Annotated[float, Meta(ge=1)] | TokenPooling | None,
        schema(
            "Merge similar token vectors of documents: a factor, which keeps about 1 / factor of them, or parameters. Default: "
            "as the model does; `1` keeps all."
        ),
    ] = None
    muvera: Annotated[
        bool | MuveraParameters | None,
        schema(
            "`true` or parameters: encode the token vectors of each text as one vector (MUVERA), to be compared by dot "
            "product. Needs `input_type`."
        ),
    ] = None
    max_tokens: Annotated[
        Positive | None,
        schema(
            "A limit of tokens per text below the model's maximum; for late-interaction models it replaces the default limit."
        ),
    ] = None


Entries: Final = answer_type(
    "Entries", "Entries of the vocabulary and their weights, by ascending id.",
    ids=described(list[int] | str, "JSON numbers, or base64 of little-endian int32."),
    weights=described(list[float] | str, "JSON numbers, or base64."),
)  # fmt: skip
Matrix: Final = answer_type(
    "Matrix", "Rows of equal width as bytes.",
    shape=Annotated[list[int], Meta(min_length=2, max_length=2)], data=described(str, "base64 of the rows, one after another."),
)  # fmt: skip
_VECTORS: Final = list[list[float] | str] | None
_ROWS: Final = list[list[list[float]] | Matrix] | None
EmbedOutputs: Final = answer_type(
    "EmbedOutputs", "The outputs that were asked for, each in the order of the inputs; the others are null.",
    dense=described(_VECTORS, "A vector for each input.", None),
    sparse=described(list[Entries] | None, "Weights of vocabulary entries for each input.", None),
    multi_vector=described(_ROWS, "For each input a vector for each token that takes part in scoring.", None),
    scores=described(_VECTORS, "For each input a score for each class.", None),
    token_scores=described(_ROWS, "For each input the scores of each token.", None),
    muvera=described(_VECTORS, "For each input a vector in place of its token vectors.", None),
    hidden=described(_ROWS, "For models with dense vectors: the last hidden state of every token of each input.", None),
    token_dense=described(
        _ROWS, "`hidden` after the layers that dense vectors go through, and normalised where those are.", None
    ),
)  # fmt: skip
EmbedResponse: Final = answer_type("EmbedResponse", "Answer of POST /v1/embed.", outputs=EmbedOutputs, model=str, usage=Usage)


def parse_embed(raw: bytes, default: EncodingFormat = "float") -> Parsed[EmbedRequest]:
    body = decode(EmbedRequest, raw)
    if body.encoding_format is None:
        body = msgspec.structs.replace(body, encoding_format=default)
    outputs = (body.outputs,) if isinstance(body.outputs, str) else tuple(body.outputs or ())
    request = texts.text_request(
        body,
        outputs,
        input_type=body.input_type,
        instruction=body.instruction,
        activate=body.activate,
        max_active_dims=body.max_active_dims,
        token_pooling=read_token_pooling(body.token_pooling),
        muvera=read_muvera(body.muvera),
        max_tokens=body.max_tokens,
    )
    return ready(body, request)


def render_embed(body: EmbedRequest, result: Result, model: ServedModel) -> bytes | Response:
    arrays = responses.encoded_outputs(result.outputs, body.embed_dtype or "float32", body.endianness or "little")
    if body.encoding_format in ("bytes", "bytes_only", "npy", "arrow"):
        return responses.binary_answer(body.encoding_format, arrays, result, model)
    as_text = body.encoding_format == "base64"
    outputs = {name: output for name in SENT_OUTPUTS if (output := getattr(result.outputs, name)) is not None}
    columns = {name: _column(name, output, arrays, as_text) for name, output in outputs.items()}
    content = {"outputs": columns, "model": model.plan.served_name, "usage": usage(result)}
    return json_answer(content, result, as_text=as_text)


def _column(name: str, output: Float32Array | Sparse | Ragged, arrays: Mapping[str, EncodedArray], as_text: bool) -> Any:
    if isinstance(output, Sparse):
        ids, weights = (_texts(arrays[f"{name}.{part}"], output.offsets_N1, as_text) for part in ("ids", "weights"))
        return [{"ids": each, "weights": weight} for each, weight in zip(ids, weights, strict=True)]
    if isinstance(output, Ragged):
        texts = _texts(arrays[f"{name}.rows"], output.offsets_N1, as_text)
        return [{"shape": each.array.shape, "data": each} for each in texts] if as_text else texts
    return base64_rows(arrays[name]) if as_text else _numbers(arrays[name])


def _texts(array: EncodedArray, offsets_N1: Int64Array, as_text: bool) -> list[Any]:
    offsets: list[int] = offsets_N1.tolist()
    parts = [array[start:end] for start, end in pairwise(offsets)]
    return [Base64(each) for each in parts] if as_text else [_numbers(each) for each in parts]


def _numbers(array: EncodedArray) -> EncodedArray | NDArray[Any]:
    """Return the plain array if it has its type already; JSON prints it as it is."""
    return array.array if array.dtype in ("float32", "int32") else array


class ClassFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both routes take."""

    model: ModelName = None
    adapter: AdapterName = None
    activate: Annotated[
        bool | None, schema("Apply the activation to scores; `false` gives logits. Default: as the model does.")
    ] = None
    prompt: Annotated[str | None, schema("The name of one of the model's prompts, or text with a space or a colon in it.")] = (
        None
    )
    truncate: Annotated[
        Truncation, schema("The end at which a text that is too long is cut. `false` or `never` makes it an error.")
    ] = None


_MOST_LABELS: Final = f"At most {MAX_LABELS:,}, and {MAX_PAIRS:,} pairs of a text and a label."


def _labels(about: str) -> Meta:
    return schema(about, minItems=1, maxItems=MAX_LABELS, uniqueItems=True, items={"type": "string", "pattern": r"\S"})


class ClassifyRequest(ClassFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    RULES: ClassVar[tuple[Schema, ...]] = (
        any_of(present("labels"), {"allOf": [absent("hypothesis_template"), never(multi_label={"const": True})]}),
        never(labels={"type": "array"}, activate={"const": False}),
        never(labels={"type": "array"}, input=TEXT_PAIRS),
    )
    input: Annotated[
        str | list[str | list[str]],
        text_inputs(TEXT, TEXTS, TEXT_PAIRS).says("A text, a list of texts, or a list of pairs of texts; at most {most}."),
    ]
    labels: Annotated[
        list[str] | None,
        _labels(
            f"Zero-shot classification: judge the texts by these labels instead of the model's classes. {_MOST_LABELS} For "
            "models for natural language inference (NLI)."
        ),
    ] = None
    hypothesis_template: Annotated[
        str | None,
        schema(
            "The statement that a label becomes, with its place `{}`. Default: `This example is {}.`",
            pattern=r"^[^{}]*\{\}[^{}]*$",
            maxLength=MAX_TEMPLATE,
        ),
    ] = None
    multi_label: Annotated[
        bool | None, schema("Judge each label alone, so that several may be true. Default: the scores sum to 1.")
    ] = None
    return_order: Annotated[
        bool | None,
        schema("Report the order of the classes of each text, also of those whose scores are equal, as with `labels`."),
    ] = None


ClassifyResponse: Final = answer_type(
    "ClassifyResponse", "Answer of POST /v1/classify.",
    labels=described(list[str], "The names of the classes: the model's, or those of the request."),
    scores=described(list[list[float]], "For each input a score for each class."), model=str, usage=Usage,
    order=described(
        list[list[int]] | None,
        "To `labels` or `return_order`: for each input the places of all labels in the list, best first.", None,
    ),
)  # fmt: skip


class TokenClassifyRequest(ClassFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    RULES: ClassVar[tuple[Schema, ...]] = (
        any_of(present("labels"), absent("threshold")),
        never(labels={"type": "array"}, activate={"const": False}),
        never(labels={"type": "array"}, aggregation={"enum": ["none", "first", "average", "max"]}),
    )

    input: Annotated[str | list[str], text_inputs(TEXT, TEXTS).says("A text, or a list of at most {most} texts.")]
    aggregation: Annotated[
        Literal["none", "simple", "first", "average", "max"],
        schema("How token labels are grouped into entities, as in transformers."),
    ] = "simple"
    labels: Annotated[
        list[str] | None,
        _labels(f"Find entities of these labels instead of the model's classes. {_MOST_LABELS} For GLiNER models."),
    ] = None
    threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, schema("The score that entities of `labels` exceed. Default: 0.5.")
    ] = None


FoundEntity: Final = answer_type(
    "FoundEntity", "An entity in a text; `start` and `end` count characters.",
    label=str, score=float, start=int, end=int, text=str,
)  # fmt: skip
TokenClassifyResponse: Final = answer_type(
    "TokenClassifyResponse", "Answer of POST /v1/token_classify.",
    entities=described(list[list[FoundEntity]], "The entities of each input."), model=str, usage=Usage,
)  # fmt: skip


def parse_classify(raw: bytes) -> Parsed[ClassifyRequest]:
    body = decode(ClassifyRequest, raw)
    return Parsed(body, lambda model: _classify(body, model).request)


def parse_token_classify(raw: bytes) -> Parsed[TokenClassifyRequest]:
    body = decode(TokenClassifyRequest, raw)
    return Parsed(body, lambda model: _token_classify(body, model).request)


def _classify(body: ClassifyRequest, model: ServedModel) -> Operation[Classes]:
    options: Any = {"hypothesis_template": body.hypothesis_template, "multi_label": bool(body.multi_label), **_options(body)}
    return _limited(scoring.classify(model.card, texts.parse_texts(body.input), body.labels, **options), body.labels)


def _token_classify(body: TokenClassifyRequest, model: ServedModel) -> Operation[list[list[Entity]]]:
    options: Any = {"labels": body.labels, "threshold": body.threshold, **_options(body)}
    return _limited(scoring.token_classify(model.card, texts.parse_texts(body.input), body.aggregation, **options), body.labels)


def _limited(operation: Operation[T], labels: list[str] | None) -> Operation[T]:
    """Return the operation. Raises TooLarge for too many pairs of a text and a label."""
    num_texts = len(operation.request.texts)
    if labels is not None and (count := num_texts * len(labels)) > MAX_PAIRS:
        most = f"Send at most {MAX_PAIRS // len(labels):,} of the texts at once."
        counts = f"{num_texts:,} texts with {len(labels):,} labels are {count:,} pairs"
        raise TooLarge(f"{counts}; the limit is {MAX_PAIRS:,}. {most}", param="input")
    return operation


def _options(body: ClassFields) -> ScoreOptions:
    return {"prompt": body.prompt, "adapter": body.adapter, "activate": body.activate, "truncate": body.truncate}


def render_classify(body: ClassifyRequest, result: Result, model: ServedModel) -> bytes | Response:
    classes = _classify(body, model).postprocess(result)
    name, counts = model.plan.served_name, usage(result)
    content = {"labels": classes.labels, "scores": classes.scores_NC, "model": name, "usage": counts}
    with_order = body.return_order or body.labels is not None
    return json_answer(content | {"order": classes.order_NC} if with_order else content, result)


def render_token_classify(body: TokenClassifyRequest, result: Result, model: ServedModel) -> bytes:
    found = _token_classify(body, model).postprocess(result)
    entities = [[{**asdict(each), "score": np.float32(each.score)} for each in row] for row in found]
    return to_json({"entities": entities, "model": model.plan.served_name, "usage": usage(result)})


_CLASS_TERMS: Final = ErrorTerms({"outputs": "model", "hypotheses": "labels"})
_NATIVE: Final = partial(Route, render=render_error, error_type=OpenAIError)

ROUTES: Final = (
    _NATIVE(
        "/v1/embed", "Any of a model's outputs, all from one pass (Whimbrel's own).",
        parse_embed, render_embed, response_type=EmbedResponse,
        example='{"input": ["A whimbrel is a wader."], "encoding_format": "base64"}',
        accepts=binary_formats(parse_embed),
    ),
    _NATIVE(
        "/v1/classify", "The classes of texts or of pairs, also by labels of the request (Whimbrel's own).",
        parse_classify, render_classify, response_type=ClassifyResponse,
        made_for="classes", example='{"input": ["A whimbrel is a wader."]}', terms=_CLASS_TERMS,
    ),
    _NATIVE(
        "/v1/token_classify", "The entities in texts, also by labels of the request (Whimbrel's own).",
        parse_token_classify, render_token_classify, response_type=TokenClassifyResponse,
        made_for="entities", example='{"input": ["Whimbrels winter in Ghana."]}', terms=_CLASS_TERMS,
    ),
)  # fmt: skip
