"""Pair inputs: texts, also as objects, or vectors in place of texts. Pure functions."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest, Location
from whimbrel.types.request import VectorInput

_MAX_SIZE: Final = 2**31 - 1
"""Largest dimension of an array: numpy takes no larger shape, not even an empty one."""


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content, as chat APIs have it."""

    type: str
    text: str | None = None


class Document(msgspec.Struct, frozen=True):
    """A text as an object; or, for models that compare vectors, the vectors that stand for it."""

    text: str | None = None
    content: Annotated[
        list[ContentPart] | None, Meta(description="The text as a list of one part of the type `text` (vLLM).")
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
Texts = Annotated[list[Text], Meta(max_length=100_000)]  # so that a larger one is refused before it is read


def parse_parts(given: Text | list[Text], name: str) -> list[str | VectorInput]:
    if not isinstance(given, list):
        return [parse_part(given, Location(name))]
    return [parse_part(each, Location(name, index)) for index, each in enumerate(given)]


def parse_part(given: Text, location: Location) -> str | VectorInput:
    """A text, or the vectors that stand for it. Raises InvalidRequest."""
    if isinstance(given, str):
        return given
    sparse = given.ids is not None or given.weights is not None
    if (given.text is not None) + (given.content is not None) + (given.data is not None) + sparse != 1:
        raise InvalidRequest("must have one of text, data (vectors), or ids and weights (a sparse vector).", location=location)
    text = text_of(given) if given.content is None else _text_of(given.content, location.below(".content"))
    if text is not None:
        return text
    if given.data is not None:
        return _array(given.data, given.dtype, given.shape, location.below(".data"))
    if given.ids is None or given.weights is None:
        raise InvalidRequest("a sparse vector has both ids and weights.", location=location)
    return _array(given.ids, "int32", None, location.below(".ids")), _array(
        given.weights, "float32", None, location.below(".weights")
    )


def text_of(given: Text) -> str | None:
    """The text, of what is valid; None: it came as vectors."""
    if isinstance(given, str):
        return given
    return given.content[0].text if given.content else given.text


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
