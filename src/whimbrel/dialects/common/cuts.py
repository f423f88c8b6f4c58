"""Truncation of texts, in the words of several APIs."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from whimbrel.errors import InvalidRequest
from whimbrel.types.request import Truncate, read_truncate

Truncation: TypeAlias = bool | Literal["right", "left", "never"] | None
TruncationSide: TypeAlias = Annotated[
    Literal["right", "left"] | None, Meta(description="The end at which texts are cut (vLLM).")
]
CUTS: Final[dict[object, Truncate]] = {"END": "right", "START": "left", "NONE": "never"}
"""Cohere's and NVIDIA's words for truncation."""


def parse_truncation(
    truncate: Truncation, side: Literal["right", "left"] | None, limit: int | None, *, default: bool
) -> tuple[Truncate | None, int | None]:
    """Return (truncate, max_tokens) of a Request. Texts are truncated by default if `default`. Raises InvalidRequest."""
    cuts = truncate if truncate is not None else default or limit is not None
    end = read_truncate(cuts)
    if end in ("right", "left") and side not in (None, end):
        raise InvalidRequest(f"is {side!r}, and truncate is {end!r}; give one of them.", param="truncation_side")
    return end or side, None if limit == -1 else limit
