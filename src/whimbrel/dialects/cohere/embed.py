"""Cohere's embed, versions 2 and 1, as far as texts go. Pure functions over bytes.

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
from whimbrel.dialects.common.fields import prompt_for_task
from whimbrel.dialects.common.inputs import parse_texts
from whimbrel.dialects.common.quantized import check_bits, quantize
from whimbrel.dialects.common.responses import json_answer
from whimbrel.dialects.common.route import Response, Route, ServedModel
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
    texts: Annotated[list[str] | None, Meta(description="At most 2,048.")] = None
    inputs: Annotated[
        list[CohereInput] | None, Meta(description="The same as `texts`, each an object with one content, a text.")
    ] = None
    images: Annotated[list[str] | None, Meta(description="Refused: the models served here take texts.")] = None
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
        Meta(description="Any of them in one answer; `float` by default. `base64`: the bytes of little-endian float32."),
    ] = None
    output_dimension: Annotated[
        int | None, Meta(description="Keep the first so many columns of vectors (Matryoshka models).")
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="A limit of tokens per text below the model's.")
    ] = None
    truncate: Annotated[
        Literal["NONE", "START", "END"] | None,
        Meta(description="Which end of a text that is too long is cut, `END` by default; `NONE`: it is an error."),
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
    """Which API it is."""

    version: str


class CohereMeta(msgspec.Struct):
    """What else there is to say: tokens of all texts after truncation, or that a list was ranked."""

    api_version: CohereVersion
    billed_units: dict[str, int]


class CohereEmbedResponse(msgspec.Struct):
    """Answer of POST /v2/embed. That of /v1/embed has bare `embeddings` where no types were asked for."""

    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: CohereEmbeddings | list[list[float]]
    texts: list[str]
    meta: CohereMeta


class CohereError(msgspec.Struct):
    """Every answer that is not a success."""

    message: str


_TRUNCATE: Final[dict[str | None, Truncate]] = {"NONE": "never", "START": "left", "END": "right", None: "right"}
_INPUT_TYPES: Final[dict[str, InputType | None]] = {
    "search_query": "query",
    "search_document": "document",
    "classification": None,
    "clustering": None,
}


def parse_embed(raw: bytes) -> tuple[CohereEmbedRequest, Callable[[ServedModel], Request]]:
    """The body as it was sent, and what makes a Request of it. Raises InvalidRequest or TooLarge."""
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
    found = prompt_for_task(card, word, _INPUT_TYPES.get(word or ""))
    if word is not None and word not in _INPUT_TYPES and found["prompt_name"] is None:
        names = ", ".join(dict.fromkeys((*_INPUT_TYPES, *card.prompts)))
        raise InvalidRequest(f"{word[:40]!r} is no prompt of this model; it takes: {names}.", param="input_type")
    return found


def _texts(body: CohereEmbedRequest) -> list[str]:
    if body.images or body.input_type == "image":
        raise InvalidRequest("this server takes texts, no images.", param="images" if body.images else "input_type")
    if (body.texts is None) == (body.inputs is None):
        raise InvalidRequest("give either texts or inputs.", param="texts")
    if body.inputs is None:
        return body.texts or []
    return [_text(each, Location("inputs", index, path=".content")) for index, each in enumerate(body.inputs)]


def _text(given: CohereInput, location: Location) -> str:
    for index, each in enumerate(given.content):
        if each.type != "text" or each.text is None:
            raise InvalidRequest(
                f"is of type {each.type[:40]!r}, where a text is expected; this server takes no images.",
                location=location.below(f"[{index}]"),
            )
    if len(given.content) != 1:
        raise InvalidRequest(
            f"has {len(given.content):,} texts; give one, joined as the model is to read them.", location=location
        )
    return given.content[0].text or ""


def render_embed(body: CohereEmbedRequest, result: Result, model: ServedModel) -> bytes | Response:
    """The answer of version 2; its numbers are printed from arrays' memory."""
    return _write(body, result, "2", "embeddings_by_type", _by_type(body, result))


def render_embed_v1(body: CohereEmbedRequest, result: Result, model: ServedModel) -> bytes | Response:
    """The answer of version 1."""
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
    """A CohereMeta."""
    return {"api_version": {"version": version}, "billed_units": units}


_TERMS: Final = ErrorTerms(
    {"input": "texts", "dimensions": "output_dimension", "outputs": "model", "prompt_name": "input_type"},
    {"truncate": 'truncate="END"', "input_type": 'input_type="search_query" or "search_document"'},
)


def render_error(error: WhimbrelError, terms: ErrorTerms = _TERMS) -> bytes:
    """Return an error as Cohere's clients expect it."""
    return msgspec.json.encode(CohereError(terms.describe(error)[0]))


ROUTES: Final = (
    Route(
        path="/v2/embed",
        summary="Dense vectors of texts, in several types of numbers (Cohere v2).",
        parse_request=parse_embed,
        render_response=render_embed,
        render_error=render_error,
        request_type=CohereEmbedRequest,
        response_type=CohereEmbedResponse,
        example='{"texts": ["A whimbrel is a wader."], "input_type": "search_document", "embedding_types": ["float", "int8"]}',
    ),
    Route(
        path="/v1/embed",
        summary="A body with `texts`: dense vectors (Cohere v1).",
        parse_request=parse_embed,
        render_response=render_embed_v1,
        render_error=render_error,
        request_type=CohereEmbedRequest,
        response_type=CohereEmbedResponse,
        example='{"texts": ["A whimbrel is a wader."], "input_type": "search_document"}',
        discriminators=frozenset(("texts", "images")),
    ),
)
