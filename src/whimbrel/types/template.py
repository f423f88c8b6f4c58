"""What a reranker that is a language model is given to read: fixed text with places for query, document and instruction. Pure.

A template is written in Python's format strings, whose only fields are {query}, {document} and {instruction}. What is put into
these places is data: `split` cuts a template at its control tokens, so that they are made of the template alone, and a control
token that somebody writes into a document is so many characters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from string import Formatter


@dataclass(frozen=True, slots=True)
class Template:
    """How a pair becomes one text, or several that are tokenised on their own and put one after another."""

    texts: tuple[str, ...]
    texts_with_instruction: tuple[str, ...] | None = None
    """The same where there is an instruction; None: the model takes none."""
    add_special_tokens: bool = False
    """Whether the tokenizer's own special tokens stand around it all."""
    strip_inputs: bool = False
    """Whether white space around query and document is taken off."""
    body_length: int | None = None
    """Tokens of query, document and what stands between them, that the fixed tokens before and after are not counted in; None:
    there is but the limit of the model."""
    query_share: float = 1.0
    """How much of that the query may take."""
    max_characters: tuple[int, int] | None = None
    """Of a query and of a document."""

    def form(self, instruction: str | None) -> tuple[str, ...] | None:
        """The texts for a request with or without an instruction; None: there are none."""
        return self.texts if instruction is None else self.texts_with_instruction

    def parts(self, query: str, document: str) -> tuple[str, str]:
        """Query and document as they are put into it."""
        if self.max_characters is not None:
            query, document = query[: self.max_characters[0]], document[: self.max_characters[1]]
        if self.strip_inputs:
            query, document = query.strip(), document.strip()
        return query, document

    def truncates_chars(self, query: str, document: str) -> bool:
        """Whether `parts` leaves out characters at an end."""
        most = self.max_characters
        return most is not None and (len(query) > most[0] or len(document) > most[1])


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a template: a control token, or text."""

    text: str
    """A format string, or the token."""
    is_control: bool = False

    @property
    def fixed(self) -> str:
        """What it says by itself."""
        return self.text if self.is_control else fill(self.text)

    @property
    def fields(self) -> tuple[str, ...]:
        """What has a place in it."""
        return () if self.is_control else fields(self.text)


def fields(text: str) -> tuple[str, ...]:
    """The fields of a format string."""
    return tuple(name for _, name, _, _ in Formatter().parse(text) if name is not None)


def escape(text: str) -> str:
    """Fixed text as a part of a format string."""
    return text.replace("{", "{{").replace("}", "}}")


def fill(text: str, *, query: str = "", document: str = "", instruction: str = "") -> str:
    """A format string with everything in its place."""
    return text.format(query=query, document=document, instruction=instruction)


def split(text: str, controls: Collection[str]) -> list[Segment]:
    """A format string, cut before and after each of the tokens `controls` that it has."""
    if not controls:
        return [Segment(text)]
    longest_first = sorted(map(escape, controls), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    segments = [Segment(fill(piece), True) if i % 2 else Segment(piece) for i, piece in enumerate(pieces)]
    return [segment for segment in segments if segment.text]


def from_examples(rendered: str, marks: dict[str, str]) -> str:
    """The format string of a text in which each field is stood for by a mark."""
    text = escape(rendered)
    for field, mark in marks.items():
        text = text.replace(mark, f"{{{field}}}")
    return text


def common_end(first: Sequence[int], second: Sequence[int]) -> int:
    """How many of the last numbers are the same."""
    pairs = zip(reversed(first), reversed(second), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
