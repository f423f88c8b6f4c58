"""Bodies of errors in OpenAI's form, which most APIs share."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from whimbrel.dialects.common.route import ErrorTerms
from whimbrel.dialects.common.vllm_words import with_vllm_words
from whimbrel.errors import WhimbrelError


class OpenAIErrorDetail(msgspec.Struct):
    """The error itself."""

    message: str
    type: str
    param: Annotated[str | None, Meta(description="The place of the fault in the request.")]
    code: Annotated[str, Meta(description="A stable word for programs.")]


class OpenAIError(msgspec.Struct):
    """An error of OpenAI's API and of Whimbrel's own routes."""

    error: OpenAIErrorDetail


_ERROR_TYPES: Final = {429: "rate_limit_error", 503: "overloaded_error"}
OPENAI_TERMS: Final = ErrorTerms({"max_tokens": "truncate_prompt_tokens", "outputs": "model"})


def render_error(error: WhimbrelError, terms: ErrorTerms = OPENAI_TERMS) -> bytes:
    return msgspec.json.encode(OpenAIError(_detail(error, terms)))


def _detail(error: WhimbrelError, terms: ErrorTerms) -> OpenAIErrorDetail:
    text, param = terms.describe(error)
    kind = _ERROR_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    return OpenAIErrorDetail(text, kind, param, error.code)


class DetailedError(OpenAIError):
    """An error of OpenAI's API, with its text where the clients of Jina and Voyage look for it."""

    detail: str


def render_detailed_error(error: WhimbrelError, terms: ErrorTerms = OPENAI_TERMS) -> bytes:
    detail = _detail(error, terms)
    detail.message = with_vllm_words(error, detail.message)
    return msgspec.json.encode(DetailedError(detail, detail.message))
