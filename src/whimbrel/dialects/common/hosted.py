"""Number types of vectors as hosted services have them (Cohere, Jina, Voyage), and what Voyage and Jina share."""

from collections.abc import Collection
from typing import Annotated, Final, Literal, TypeAlias, cast

import msgspec

from whimbrel.dialects.common.answers import answer_type
from whimbrel.dialects.common.bodies import schema, text_inputs
from whimbrel.dialects.common.route import ErrorTerms
from whimbrel.dialects.common.schemas import ID_LISTS, IDS, TEXT, TEXTS_OR_OBJECTS
from whimbrel.dialects.common.texts import TextFields, TextObject
from whimbrel.errors import InvalidRequest, WhimbrelError
from whimbrel.types.arrays import Float32Array
from whimbrel.types.card import Card
from whimbrel.types.request import OutputName
from whimbrel.wire.dtypes import DType, EncodedArray

NumberType: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]

_BITS: Final = frozenset(("binary", "ubinary"))


def quantize(rows_ND: Float32Array, kind: str) -> EncodedArray:
    """Return the rows in a NumberType; `base64` holds floats.

    `int8` and `uint8`: 127ths of each row's largest entry, and that + 128. `ubinary` and `binary`: bits, eight columns to a
    byte, and that - 128, for widths that `check_bits` accepts.
    """
    return EncodedArray(rows_ND, "float32" if kind in ("float", "base64") else cast(DType, kind))


def check_bits(card: Card, output: OutputName, dimensions: int | None, kinds: Collection[str], *, param: str) -> None:
    """Raise InvalidRequest at `param` if it asks for bits and the columns of vectors do not fill whole bytes."""
    if _BITS.isdisjoint(kinds):
        return
    columns = card.output(output)
    width = dimensions or columns.default_width or columns.width
    if width % 8:
        raise InvalidRequest(
            f"bits are packed eight to a byte, and {width:,} columns are no multiple of 8. Ask for another width, or for int8.",
            param=param,
        )


class ServiceFields(TextFields, frozen=True, kw_only=True):
    """The fields of both services."""

    input: Annotated[
        str | list[str | int | list[int] | TextObject],
        text_inputs(TEXT, TEXTS_OR_OBJECTS, IDS, ID_LISTS).says(
            "A text, a list of texts or of objects with a `text`, a list of token ids, or a list of such lists; at most {most} "
            "inputs and {ids} ids. Token ids are taken as they are."
        ),
    ]
    input_type: Annotated[
        Literal["query", "document", "passage"] | None,
        schema("Whether texts are queries or documents, for models that treat them differently."),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        schema("`float` (default): JSON numbers. `base64`: the bytes of numbers, little-endian."),
    ] = None


ServiceError: Final = answer_type("ServiceError", "An error of Voyage and Jina.", detail=str)
_STATUSES: Final = {404: 400, 413: 400}
"""Statuses of an unknown model and of a request that is too large: clients of both services expect 400."""


def status(error: WhimbrelError) -> int:
    return _STATUSES.get(error.status, error.status)


def render_error(error: WhimbrelError, terms: ErrorTerms) -> bytes:
    return msgspec.json.encode({"detail": terms.describe(error)[0]})
