"""Words of vLLM's errors that its tests and other programs look for, beside the place and the fix that our errors name.

Source: vLLM 0.32, renderers/params.py, entrypoints/pooling/base/serving.py and scoring/io_processor.py.
"""

from __future__ import annotations

from typing import Final

from whimbrel.dialects.common.bodies import UnknownWord
from whimbrel.errors import InvalidRequest, TooLong, WhimbrelError

_LIMITS: Final = ("max_tokens_per_query", "max_tokens_per_doc")


def with_vllm_words(error: WhimbrelError, text: str) -> str:
    """Return the text of an error with vLLM's words for it, if it has any."""
    field = None if error.location is None else error.location.field
    if error.message.startswith(("Unsupported task", "The JinaForRanking")):
        return error.message  # programs look for it at the start
    if isinstance(error, UnknownWord) and field == "task" and "'plugin'" in error.message:
        return f"No IOProcessor plugin installed. {text}"
    words = _words(error)
    return f"{text} {words}" if words else text


def _words(error: WhimbrelError) -> str:
    field = None if error.location is None else error.location.field
    if isinstance(error, TooLong):
        return "That is more than this model's maximum context length. Please reduce the length of the input prompt."
    if isinstance(error, UnknownWord):
        return "(literal_error)"
    if isinstance(error, InvalidRequest) and field in ("max_tokens", "truncate_prompt_tokens"):
        return "Please request a smaller truncation size."
    if isinstance(error, InvalidRequest) and field in _LIMITS:
        return f"{field} must be a non-negative integer."
    return ""
