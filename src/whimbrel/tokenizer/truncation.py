"""How long a text may be, in characters and in tokens, and which end of a longer one is cut. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from whimbrel.errors import Hint, InvalidRequest, Location, TooLarge, TooLong
from whimbrel.types.arrays import Int32Array
from whimbrel.types.request import Request, Truncate

MAX_CHARACTERS: Final = 2**20
"""Of one text, prompt included. While it is tokenised a text takes up to some 400 bytes per character; texts are handed over
in slices of as many characters, so this bounds the memory of any request."""
MAX_CHARACTERS_PER_TOKEN: Final = 32
"""A request may have so many times the characters that it may have tokens."""


Index: TypeAlias = "tuple[int, int | None]"
"""The item of a request, and the part of it, that a text is."""


def location_of(text: int, indices: Sequence[Index] | None) -> Location:
    """Return the place of a text in the request; without `indices` it is the item of the same number."""
    return Location("input", text) if indices is None else Location("input", *indices[text])


def check_characters(sizes: Sequence[int], most: int, indices: Sequence[Index] | None = None) -> None:
    """Raise TooLarge if one text has too many characters, or all together more than `most`."""
    if (total := sum(sizes)) > most:
        raise TooLarge(
            f"the texts have {total:,} characters, prompts included; the limit is {most:,}. Send fewer texts at once.",
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
    """What the texts of a request are held to."""

    max_length: int
    """In tokens, special tokens included."""
    truncate: Truncate

    def exceeded(self, num_tokens: int, what: str, index: int) -> bool:
        """Whether a text, or a pair, is to be cut. Raises TooLong if it may not be."""
        if num_tokens > self.max_length and self.truncate == "never":
            raise TooLong(
                f"the {what} has {num_tokens:,} tokens; the limit is {self.max_length:,}.", item=index, hint=Hint.TRUNCATE
            )
        return num_tokens > self.max_length

    def cut(self, ids: Int32Array, size: int) -> Int32Array:
        """The first `size` of them, or the last, if it is the left end that is cut."""
        return ids[ids.size - size :] if self.truncate == "left" else ids[:size]


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """Which limits may be asked for, in tokens."""

    minimum: int
    default: int
    """That of a request that asks for none."""
    maximum: int

    def limit(self, request: Request, truncate: Truncate) -> TruncationLimit:
        """That of a request; `truncate` is the checkpoint's. Raises InvalidRequest."""
        wanted = self.default if request.max_tokens is None else request.max_tokens
        if not self.minimum <= wanted <= self.maximum:
            raise InvalidRequest(
                f"{wanted:,} tokens per text; this model takes {self.minimum} to {self.maximum:,}.", param="max_tokens"
            )
        return TruncationLimit(wanted, request.truncate or truncate)
