"""Fields and errors that Voyage and Jina share."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.route import ErrorTerms
from whimbrel.dialects.common.rules import ID_LISTS, IDS, TEXT, TEXTS_OR_OBJECTS, text_inputs
from whimbrel.dialects.common.texts import TextFields, TextObject
from whimbrel.errors import WhimbrelError


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
        Meta(description="Whether texts are queries or documents, for models that treat them differently."),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        Meta(description="`float` (default): JSON numbers. `base64`: the bytes of numbers, little-endian."),
    ] = None


class ServiceError(msgspec.Struct):
    """An error of Voyage and Jina."""

    detail: str


_STATUSES: Final = {404: 400, 413: 400}
"""Statuses of an unknown model and of a request that is too large: clients of both services expect 400."""


def status(error: WhimbrelError) -> int:
    return _STATUSES.get(error.status, error.status)


def render_error(error: WhimbrelError, terms: ErrorTerms) -> bytes:
    return msgspec.json.encode(ServiceError(terms.describe(error)[0]))
