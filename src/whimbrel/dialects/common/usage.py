"""Counts of tokens in answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from whimbrel.types.result import Result


class Usage(msgspec.Struct):
    """Tokens of all texts after truncation, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class VLLMUsage(Usage):
    """Tokens of all texts after truncation, special tokens included; no text is written (vLLM)."""

    completion_tokens: Literal[0] = 0
    prompt_tokens_details: None = None


def usage(result: Result) -> dict[str, int]:
    """Return Usage."""
    return {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens}


def vllm_usage(result: Result) -> dict[str, int | None]:
    """Return VLLMUsage."""
    return {**usage(result), "completion_tokens": 0, "prompt_tokens_details": None}
