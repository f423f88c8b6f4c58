"""Cohere's embed API, versions 2 and 1, for texts. Pure functions over bytes.

Source: cohere-python 7.3 (v2/raw_client.py, raw_base_client.py, types). Texts that are too long are cut at their end, as there,
unless `truncate` says otherwise. Up to 2,048 texts are taken, not 96. Fields that are not known are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal
from uuid import uuid4

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.decode import decode
from whimbrel.dialects.common.errors import ErrorTerms
from whimbrel.dialects.common.fields import parse_texts, prompt_for_task
from whimbrel.dialects.common.hosted import check_bits, quantize
from whimbrel.dialects.common.responses import json_answer
from whimbrel.dialects.common.route import Dialect, Response, ServedModel
from whimbrel.errors import InvalidRequest, Location, WhimbrelError
from whimbrel.types.card import Card
from whimbrel.types.request import InputType, Request, Truncate
from whimbrel.types.result import Result
from whimbrel.wire import base64_rows


class CohereContent(msgspec.Struct, frozen=True):
    """A piece of an input."""

    type: str
    text: str | None = None


class CohereInput(msgspec.Struct, frozen=True):
    """An input as an object."""

    content: list[CohereContent]


class CohereEmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v2/embed, and of POST /v1/embed where it has `texts`."""

    model: Annotated[str | None, Meta(description="The served model's name, as /v1/models lists it.")] = None
    texts: Annotated[list[str] | None, Meta(description="At most 2,048 texts.")] = None
    inputs: Annotated[
        list[CohereInput] | None, Meta(description="The same as `texts`, each an object with one content, a text.")
    ] = None
    images: Annotated[list[str] | None, Meta(description="Rejected: the models served here take texts.")] = None
    input_type: Annotated[
        str | None,
        Meta(
            description="What the texts are for: the model's prompt of that name if it has one (vLLM). Else `search_query` is "
            "a query and `search_document` a document, for models that treat them differently, and `classification` and "
            "`clustering` say nothing to the model."
        ),
    ] = None
    embedding_types: Annotated[
        list[Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]] | None,
        Meta(
            description="The types of numbers, each of which the answer has. Default: `float`. `base64`: the bytes of "
            "little-endian float32."
        ),
    ] = None
    output_dimension: Annotated[
        int | None, Meta(description="Keep the first N columns of each vector; for models trained with Matryoshka loss.")
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="A limit of tokens per text below the model's maximum.")
    ] = None
    truncate: Annotated[
        Literal["NONE", "START", "END"] | None,
        Meta(description="The end at which a text that is too long is cut; `END` by default. `NONE` makes it an error."),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None, Meta(description="Requests with lower numbers run first.")
    ] = None


class CohereEmbeddings(msgspec.Struct):
    """The vectors in each of the types that were asked for."""

    float_: list[list[float]] | None = msgspec.field(default=None, name="float")
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereVersion(msgspec.Struct):
    """The version of the API."""

    version: str


class CohereMeta(msgspec.Struct):
    """Units of work: tokens of all texts after truncation, or one search for a list that was ranked."""

    api_version: CohereVersion
    billed_units: dict[str, int]


class CohereEmbedResponse(msgspec.Struct):
    """Answer of POST /v2/embed and /v1/embed. In /v1/embed `embeddings` is a list where no types were asked for."""

    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: CohereEmbeddings | list[list[float]]
    texts: list[str]
    meta: CohereMeta


class CohereError(msgspec.Struct):
    """The body of every error."""

    message: str


_TRUNCATE: Final[dict[str | None, Truncate]] = {"NONE": "never", "START": "left", "END": "right", None: "right"}
_INPUT_TYPES: Final[dict[str, InputType | None]] = {
    "search_query": "query",
    "search_document": "document",
    "classification": None,
    "clustering": None,
}


def parse_embed(raw: bytes) -> tuple[CohereEmbedRequest, Callable[[ServedModel], Request]]:
    """Return the body, and the function from a model to its Request. Raises InvalidRequest or TooLarge."""
    body = decode(CohereEmbedRequest, raw)
    texts = parse_texts(_texts(body))

    def request(model: ServedModel) -> Request:
        check_bits(model.card, "dense", body.output_dimension, body.embedding_types or (), param="embedding_types")
        return Request(
            texts,
            ("dense",),
            dimensions=body.output_dimension,
            truncate=_TRUNCATE[body.truncate],
            max_tokens=None if body.max_tokens is None else min(body.max_tokens, model.plan.max_length),
            priority=body.priority or 0,
            **_purpose(model.card, body.input_type),
        )

    return body, request


def _purpose(card: Card, word: str | None) -> dict[str, Any]:
    purpose = prompt_for_task(card, word, _INPUT_TYPES.get(word or ""))
    if word is not None and word not in _INPUT_TYPES and purpose["prompt_name"] is None:
        names = ", ".join(dict.fromkeys((*_INPUT_TYPES, *card.prompts)))
        raise InvalidRequest(f"{word[:40]!r} is no prompt of this model; it takes: {names}.", param="input_type")
    return purpose


def _texts(body: CohereEmbedRequest) -> list[str]:
    if body.images or body.input_type == "image":
        raise InvalidRequest("this server takes texts, no images.", param="images" if body.images else "input_type")
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
        raise InvalidRequest(
            f"has {len(value.content):,} texts; give one, joined as the model is to read them.", location=location
        )
    return value.content[0].text or ""


def render_embed(body: CohereEmbedRequest, result: Result, model: ServedModel) -> bytes | Response:
    """Return the answer of version 2; its numbers are printed from the arrays' memory."""
    return _write(body, result, "2", "embeddings_by_type", _by_type(body, result))


def render_embed_v1(body: CohereEmbedRequest, result: Result, model: ServedModel) -> bytes | Response:
    """Return the answer of version 1."""
    if body.embedding_types:
        return _write(body, result, "1", "embeddings_by_type", _by_type(body, result))
    return _write(body, result, "1", "embeddings_floats", result.dense)


def _by_type(body: CohereEmbedRequest, result: Result) -> dict[str, Any]:
    columns = {kind: quantize(result.dense, kind) for kind in body.embedding_types or ("float",)}
    return {kind: base64_rows(column) if kind == "base64" else column for kind, column in columns.items()}


def _write(body: CohereEmbedRequest, result: Result, version: str, kind: str, embeddings: Any) -> bytes | Response:
    content = {
        "id": str(uuid4()),
        "response_type": kind,
        "embeddings": embeddings,
        "texts": _texts(body),
        "meta": meta(version, input_tokens=result.num_tokens),
    }  # fmt: skip
    return json_answer(content, result, times=len(body.embedding_types or "1"))


def meta(version: str, **units: int) -> dict[str, Any]:
    """Return the fields of a CohereMeta."""
    return {"api_version": {"version": version}, "billed_units": units}


_TERMS: Final = ErrorTerms(
    {"input": "texts", "dimensions": "output_dimension", "outputs": "model", "prompt_name": "input_type"},
    {"truncate": 'truncate="END"', "input_type": 'input_type="search_query" or "search_document"'},
)


def render_error(error: WhimbrelError, terms: ErrorTerms = _TERMS) -> bytes:
    """Return an error as Cohere's clients expect it."""
    return msgspec.json.encode(CohereError(terms.describe(error)[0]))


COHERE: Final = Dialect(render_error, _TERMS)

ROUTES: Final = (
    COHERE.route(
        "/v2/embed", "Dense vectors of texts, in several types of numbers (Cohere v2).",
        parse_embed, render_embed, response_type=CohereEmbedResponse,
        example='{"texts": ["A whimbrel is a wader."], "input_type": "search_document", "embedding_types": ["float", "int8"]}',
    ),
    COHERE.route(
        "/v1/embed", "Dense vectors of texts: a body with `texts` (Cohere v1).",
        parse_embed, render_embed_v1, response_type=CohereEmbedResponse,
        example='{"texts": ["A whimbrel is a wader."], "input_type": "search_document"}',
        discriminators=frozenset(("texts", "images")),
    ),
)  # fmt: skip
