"""An error as vLLM writes it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

from whimbrel.dialects.common.errors import ErrorTerms
from whimbrel.errors import WhimbrelError


class ErrorDetail(msgspec.Struct):
    """What went wrong; `param` is the path of the fault, `code` the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """Every answer that is not a success."""

    error: ErrorDetail


_STATUSES: Final = {415: 400, 429: 503, 507: 500}
"""Where vLLM answers with another status than other servers do."""
_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
"""Of other statuses it is their name in HTTP."""


def status(error: WhimbrelError) -> int:
    """The status of an error."""
    return _STATUSES.get(error.status, error.status)


TERMS: Final = ErrorTerms(options={"truncate": "truncate_prompt_tokens=-1"})


def render_error(error: WhimbrelError, terms: ErrorTerms = TERMS) -> bytes:
    """Return an error as vLLM writes it."""
    text, param = terms.describe(error)
    code = status(error)
    kind = _TYPES.get(code) or HTTPStatus(code).phrase
    return msgspec.json.encode(ErrorResponse(ErrorDetail(text, kind, param, code)))
