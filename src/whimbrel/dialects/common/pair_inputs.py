"""Inputs of pairs: a text, a text as an object, or vectors that stand for a text. Pure functions."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from whimbrel.dialects.common.rules import LONGEST, NOT_EMPTY, Schema, any_of, count, only, present, schema
from whimbrel.errors import InvalidRequest, Location
from whimbrel.types.options import MAX_PAIRS
from whimbrel.types.request import VectorInput

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
        list[ContentPart] | None,
        schema("The text as a list of one part of the type `text` (vLLM).", minItems=1, maxItems=1),
    ] = None
    data: Annotated[
        bytes | None, Meta(description="Vectors in place of the text: base64 of little-endian numbers, row by row.")
    ] = None
    shape: Annotated[
        Annotated[list[Annotated[int, Meta(ge=0, le=_MAX_SIZE)]], Meta(max_length=2)] | None,
        Meta(description="The shape of token vectors: [tokens, width]. Without it `data` is one vector."),
    ] = None
    dtype: Annotated[
        Literal["float32", "float16", "int8", "binary"],
        Meta(
            description="The type of numbers in `data`. `int8`: 127ths. `binary`: 8 columns to a byte, the first in the "
            "highest bit; a bit of 1 is 1, and 0 is -1."
        ),
    ] = "float32"
    ids: Annotated[bytes | None, Meta(description="The entries of a sparse vector: base64 of little-endian int32.")] = None
    weights: Annotated[bytes | None, Meta(description="The weights of a sparse vector: base64 of little-endian float32.")] = (
        None
    )


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
    return _array(value.ids, "int32", None, location.below(".ids")), _array(
        value.weights, "float32", None, location.below(".weights")
    )


def text_of(value: Text) -> str | None:
    """Return the text of a valid input; None if it came as vectors."""
    if isinstance(value, str):
        return value
    return value.content[0].text if value.content else value.text


def _text_of(content: list[ContentPart], location: Location) -> str:
    for index, part in enumerate(content):
        if part.type != "text":
            raise InvalidRequest(
                f"is of type {part.type[:40]!r}; this server takes text alone.", location=location.below(f"[{index}]")
            )
    if len(content) != 1 or content[0].text is None:
        raise InvalidRequest("must be one part with a text.", location=location)
    return content[0].text


def _array(data: bytes, dtype: str, shape: list[int] | None, location: Location) -> NDArray[Any]:
    kind = np.dtype("uint8" if dtype == "binary" else dtype).newbyteorder("<")
    count, rest = divmod(len(data), kind.itemsize)
    if rest:
        raise InvalidRequest(
            f"{len(data):,} bytes are no whole numbers of {dtype}, {kind.itemsize} bytes each.", location=location
        )
    array = np.frombuffer(data, kind)
    if shape is None:
        return array
    sizes = [*shape[:-1], -(-shape[-1] // 8)] if dtype == "binary" and shape else shape
    if not shape or prod(sizes) != count:
        raise InvalidRequest(
            f"{len(data):,} bytes are not the shape {shape}, which takes {prod(sizes) * kind.itemsize:,}.", location=location
        )
    return array.reshape(sizes)
