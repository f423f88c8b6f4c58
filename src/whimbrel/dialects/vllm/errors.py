"""An error as vLLM writes it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

from whimbrel.dialects.common.fields import HINT_TRUNCATE, translate_hints
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


def render_error(error: WhimbrelError) -> bytes:
    """An error as vLLM writes it."""
    code = status(error)
    kind = _TYPES.get(code) or HTTPStatus(code).phrase
    error = translate_hints(error, {HINT_TRUNCATE: "truncate_prompt_tokens=-1"})
    return msgspec.json.encode(ErrorResponse(ErrorDetail(str(error), kind, error.param, code)))
