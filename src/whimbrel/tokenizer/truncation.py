"""Length limits and truncation of texts, in characters and in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from whimbrel.errors import Hint, InvalidRequest, Location, TooLarge, TooLong
from whimbrel.types.arrays import Int32Array
from whimbrel.types.request import Request, Truncate

MAX_CHARACTERS: Final = 2**20
"""Characters of one text, prompt included. Tokenization takes up to some 400 bytes per character. Texts go to the backend in
slices of at most this size, so it bounds the memory of any request."""
MAX_CHARACTERS_PER_TOKEN: Final = 32
"""Characters that a request may have for each token that it may have."""


Index: TypeAlias = "tuple[int, int | None]"
"""The item of a request that a text is, and its part."""


def location_of(text: int, indices: Sequence[Index] | None) -> Location:
    """Return the location of a text in the request. Without `indices` it is the item of the same number."""
    return Location("input", text) if indices is None else Location("input", *indices[text])


def check_characters(sizes: Sequence[int], limit: int, indices: Sequence[Index] | None = None) -> None:
    """Raise TooLarge if texts of these sizes exceed the limit, in characters. Errors locate them by `indices`."""
    if (total := sum(sizes)) > limit:
        raise TooLarge(
            f"the texts have {total:,} characters, prompts included; the limit is {limit:,}. Send fewer texts at once.",
            param="input",
        )
    for index, size in enumerate(sizes):
        if size > MAX_CHARACTERS:
            raise TooLarge(
                f"the text has {size:,} characters, its prompt included; the limit is {MAX_CHARACTERS:,}. Split it.",
                location=location_of(index, indices),
            )


@dataclass(frozen=True, slots=True)
class TruncationLimit:
    """The length limit of a request's texts and the side that is truncated."""

    max_length: int
    """Tokens per text, special tokens included."""
    truncate: Truncate

    def exceeded(self, num_tokens: int, kind: str, index: int) -> bool:
        """Return whether a text or a pair must be truncated. Raises TooLong if the request forbids that."""
        if num_tokens > self.max_length and self.truncate == "never":
            raise TooLong(
                f"the {kind} has {num_tokens:,} tokens; the limit is {self.max_length:,}.", item=index, hint=Hint.TRUNCATE
            )
        return num_tokens > self.max_length

    def cut(self, ids: Int32Array, size: int) -> Int32Array:
        """Return the first `size` ids, or the last if the left side is truncated."""
        return ids[ids.size - size :] if self.truncate == "left" else ids[:size]


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """The range of limits that a request may set, in tokens."""

    minimum: int
    default: int
    """Limit of a request that sets none."""
    maximum: int

    def limit(self, request: Request, truncate: Truncate) -> TruncationLimit:
        """Return the limit of a request. `truncate` is the checkpoint's default. Raises InvalidRequest."""
        max_tokens = self.default if request.max_tokens is None else request.max_tokens
        if not self.minimum <= max_tokens <= self.maximum:
            raise InvalidRequest(
                f"{max_tokens:,} tokens per text; this model takes {self.minimum} to {self.maximum:,}.", param="max_tokens"
            )
        return TruncationLimit(max_tokens, request.truncate or truncate)
