"""Words of vLLM's errors that its tests and other programs look for, beside the place and the fix that our errors name.

Source: vLLM 0.32, renderers/params.py, entrypoints/pooling/base/serving.py, entrypoints/pooling/scoring/utils.py,
entrypoints/serve/engine/serving.py and entrypoints/serve/exception_handling; pydantic for the types of errors.
"""

from __future__ import annotations

from typing import Final

from whimbrel.dialects.common.bodies import Empty, MalformedBody, MissingField, UnknownWord
from whimbrel.errors import InvalidRequest, ModelNotFound, TooLong, UnsupportedMediaType, WhimbrelError

_LIMITS: Final = ("max_tokens_per_query", "max_tokens_per_doc")
_EMPTY: Final = {
    "input": "You must pass at least one prompt.",
    **dict.fromkeys(("queries", "data_1", "text_1"), "At least one text element must be given."),
    **dict.fromkeys(("documents", "items", "data_2", "text_2"), "At least one text_pair element must be given."),
}
"""Words for an empty list, by the field that holds it."""


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
    match error:
        case TooLong(model_limit=None):
            return "That is more than this model's maximum context length. Please reduce the length of the input prompt."
        case TooLong(model_limit=limit):
            return f"This model's maximum context length is {limit} tokens. Please reduce the length of the input prompt."
        case ModelNotFound(model=str(name)):
            return f"The model `{name}` does not exist."
        case Empty():
            return _EMPTY.get(field, "")
        case MissingField():
            return "Field required ('missing')."
        case MalformedBody() if "is not valid JSON" in error.message:
            return "JSON decode error ('json_invalid')."
        case UnsupportedMediaType() if error.message.startswith("Content-Type"):
            return "Unsupported Media Type: Only 'application/json' is allowed."
        case UnknownWord():
            return "(literal_error)"
        case InvalidRequest() if field in ("max_tokens", "truncate_prompt_tokens"):
            return "Please request a smaller truncation size."
        case InvalidRequest() if field in _LIMITS:
            return f"{field} must be a non-negative integer."
        case _:
            return ""
