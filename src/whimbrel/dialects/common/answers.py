"""Types of JSON answers, which the API's description tells, and their counts of tokens.

Answers themselves are made as dicts, whose numbers are printed from arrays.
"""

from typing import Annotated, Any, Final, Literal, cast

import msgspec

from whimbrel.types.result import Result


def answer_type(name: str, about: str, /, **fields: Any) -> Any:
    """Return the type of an answer or of a part of it. A field is given by its type, or by its type and default."""
    columns: list[Any] = [
        (field, *(cast(tuple[Any, ...], kind) if isinstance(kind, tuple) else (kind,))) for field, kind in fields.items()
    ]
    return msgspec.defstruct(name, columns, namespace={"__doc__": about}, kw_only=True)


def word(text: str) -> tuple[Any, str]:
    """Return the type and default of a field that always has the same text."""
    return cast(Any, Literal)[text], text


def described(kind: Any, about: str, *default: object) -> tuple[Any, ...]:
    """Return the type of a field with a sentence about it, and its default if there is one."""
    return cast(Any, Annotated)[kind, msgspec.Meta(description=about)], *default


BEST_FIRST: Final = "best first by the scores before activation; of equal ones the first document comes first."
COUNTS: Final = {"prompt_tokens": int, "total_tokens": int}
Usage: Final = answer_type("Usage", "Tokens of all texts after truncation, special tokens included.", **COUNTS)
VLLMUsage: Final = answer_type(
    "VLLMUsage", "Tokens of all texts after truncation, special tokens included; no text is written (vLLM).",
    **COUNTS, completion_tokens=(Literal[0], 0), prompt_tokens_details=(None, None),
)  # fmt: skip


def usage(result: Result) -> dict[str, int]:
    return {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens}


def vllm_usage(result: Result) -> dict[str, int | None]:
    return {**usage(result), "completion_tokens": 0, "prompt_tokens_details": None}
