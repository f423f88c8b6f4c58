"""Bodies of errors in OpenAI's form, which most APIs share, with the words of vLLM's errors that programs look for.

These words stand beside the place and the fix that our errors name. Source: vLLM 0.32, renderers/params.py,
entrypoints/pooling/base/serving.py, entrypoints/pooling/scoring/utils.py, entrypoints/serve/engine/serving.py and
entrypoints/serve/exception_handling; pydantic for the types of errors.
"""

from functools import partial
from typing import Final

import msgspec

from whimbrel.dialects.common.answers import answer_type, described
from whimbrel.dialects.common.bodies import Empty, MalformedBody, MissingField, UnknownWord
from whimbrel.dialects.common.route import PLACEHOLDERS, ErrorTerms, Route
from whimbrel.errors import InvalidRequest, ModelNotFound, TooLong, UnsupportedMediaType, WhimbrelError

_EMPTY: Final = {
    "input": "You must pass at least one prompt.",
    **dict.fromkeys(("queries", "data_1", "text_1"), "At least one text element must be given."),
    **dict.fromkeys(("documents", "items", "data_2", "text_2"), "At least one text_pair element must be given."),
}
"""Words for an empty list, by the field that holds it."""
_BY_TYPE: Final = (
    (MissingField, "", "Field required ('missing')."),
    (MalformedBody, "is not valid JSON", "JSON decode error ('json_invalid')."),
    (UnsupportedMediaType, "Content-Type", "Unsupported Media Type: Only 'application/json' is allowed."),
    (UnknownWord, "", "(literal_error)"),
)
"""Words by the type of an error, and a part of its message."""
_BY_FIELD: Final = {
    **dict.fromkeys(("max_tokens", "truncate_prompt_tokens"), "Please request a smaller truncation size."),
    **{name: f"{name} must be a non-negative integer." for name in ("max_tokens_per_query", "max_tokens_per_doc")},
}
"""Words for any other fault of a field."""


def with_vllm_words(error: WhimbrelError, text: str) -> str:
    """Return the text of an error with vLLM's words for it, if it has any."""
    field = None if error.location is None else error.location.field
    if error.message.startswith(("Unsupported task", "The JinaForRanking")):
        return error.message  # programs look for it at the start
    if isinstance(error, UnknownWord) and field == "task" and "'plugin'" in error.message:
        return f"No IOProcessor plugin installed. {text}"
    words = _words(error, field or "")
    return f"{text} {words}" if words else text


def _words(error: WhimbrelError, field: str) -> str:
    if isinstance(error, TooLong):
        limit = "That is more than this model's maximum context length."
        if error.model_limit is not None:
            limit = f"This model's maximum context length is {error.model_limit} tokens."
        return f"{limit} Please reduce the length of the input prompt."
    if isinstance(error, ModelNotFound):
        return "" if error.model is None else f"The model `{error.model}` does not exist."
    if isinstance(error, Empty):
        return _EMPTY.get(field, "")
    fixed = (words for kind, part, words in _BY_TYPE if isinstance(error, kind) and part in error.message)
    return next(fixed, _BY_FIELD.get(field, "") if isinstance(error, InvalidRequest) else "")


_Detail: Final = answer_type(
    "OpenAIErrorDetail", "The error itself.",
    message=str, type=str, param=described(str | None, "The place of the fault in the request."),
    code=described(str, "A stable word for programs."),
)  # fmt: skip
OpenAIError: Final = answer_type("OpenAIError", "An error of OpenAI's API and of Whimbrel's own routes.", error=_Detail)
DetailedError: Final = answer_type(
    "DetailedError", "An error of OpenAI's API, with its text where the clients of Jina and Voyage look for it.",
    error=_Detail, detail=str,
)  # fmt: skip
_ERROR_TYPES: Final = {429: "rate_limit_error", 503: "overloaded_error"}
OPENAI_TERMS: Final = ErrorTerms({"max_tokens": "truncate_prompt_tokens", "outputs": "model"})


def render_error(error: WhimbrelError, terms: ErrorTerms = OPENAI_TERMS) -> bytes:
    return msgspec.json.encode({"error": _detail(error, terms)})


def _detail(error: WhimbrelError, terms: ErrorTerms) -> dict[str, str | None]:
    text, param = terms.describe(error)
    kind = _ERROR_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    return {"message": text, "type": kind, "param": param, "code": error.code}


def render_detailed_error(error: WhimbrelError, terms: ErrorTerms = OPENAI_TERMS) -> bytes:
    text = with_vllm_words(error, terms.describe(error)[0])
    return msgspec.json.encode({"error": _detail(error, terms) | {"message": text}, "detail": text})


DETAILED: Final = partial(Route, render=render_detailed_error, error_type=DetailedError, placeholders=PLACEHOLDERS)
"""A route whose errors have their text in both places."""
