"""What bodies and errors of hosted embedding services have in common (Voyage's and Jina's). Pure functions over bytes."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.errors import ErrorTerms
from whimbrel.dialects.common.fields import TextFields, parse_input_type, text_request
from whimbrel.dialects.common.inputs import TextObject
from whimbrel.errors import WhimbrelError
from whimbrel.types.request import OutputName, Request


class ServiceFields(TextFields, frozen=True, kw_only=True):
    """What both take, beside the fields of /v1/embed that are ours."""

    input: Annotated[
        str | list[str | int | list[int] | TextObject],
        Meta(
            description="A text, a list of texts or of objects with a `text`, a list of token ids, or a list of such lists; at "
            "most 2,048 inputs and 524,288 ids. Token ids are taken as they are."
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


class DetailError(msgspec.Struct):
    """Every answer that is not a success."""

    detail: str


def service_request(body: ServiceFields, output: OutputName = "dense") -> Request:
    """The Request that a body stands for. Raises InvalidRequest and TooLarge."""
    return text_request(body, (output,), input_type=parse_input_type(body.input_type))


_STATUSES: Final = {404: 400, 413: 400}
"""Of a model that is not known, and of too much at once: their clients know one class of errors, of 400."""


def status(error: WhimbrelError) -> int:
    """The status of an error."""
    return _STATUSES.get(error.status, error.status)


def render_error(error: WhimbrelError, terms: ErrorTerms) -> bytes:
    """Return an error as clients of both expect it."""
    return msgspec.json.encode(DetailError(terms.describe(error)[0]))
