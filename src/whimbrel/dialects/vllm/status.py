"""Statuses and bodies of vLLM's errors."""

from functools import partial
from http import HTTPStatus
from typing import Final

import msgspec

from whimbrel.dialects.common.answers import answer_type, described
from whimbrel.dialects.common.openai_errors import with_vllm_words
from whimbrel.dialects.common.route import PLACEHOLDERS, ErrorTerms, Route
from whimbrel.errors import RateLimited, WhimbrelError

_STATUSES: Final = {415: 400, 429: 503, 507: 500}
"""Statuses that differ from those of other servers."""
_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
"""Types of errors by status; the others have the name of their status in HTTP."""


def status(error: WhimbrelError) -> int:
    """Return the HTTP status of an error. A full queue is 503, and a key's used-up budget 429, as at gateways before vLLM."""
    return error.status if isinstance(error, RateLimited) else _STATUSES.get(error.status, error.status)


_ErrorDetail: Final = answer_type(
    "VLLMErrorDetail", "The error itself.",
    message=str, type=str, param=described(str | None, "The place of the fault in the request."),
    code=described(int, "The HTTP status."),
)  # fmt: skip
VLLMError: Final = answer_type("VLLMError", "An error of vLLM's own routes.", error=_ErrorDetail)
TERMS: Final = ErrorTerms(options={"truncate": "truncate_prompt_tokens=-1"})


def render_error(error: WhimbrelError, terms: ErrorTerms = TERMS) -> bytes:
    text, param = terms.describe(error)
    code = status(error)
    kind = _TYPES.get(code) or HTTPStatus(code).phrase
    detail = {"message": with_vllm_words(error, text), "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": detail})


VLLM: Final = partial(Route, render=render_error, error_type=VLLMError, terms=TERMS, status=status, placeholders=PLACEHOLDERS)

TEXT_TERMS: Final = TERMS.extended({"max_tokens": "truncate_prompt_tokens", "activate": "use_activation", "outputs": "task"})
