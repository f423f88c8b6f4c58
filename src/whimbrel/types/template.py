"""Prompt templates of language models: rerankers, and chats around one text. Pure.

A template is a Python format string with the fields {query}, {document} and {instruction}. Values of fields are data: `split`
cuts a template at its control tokens, so only the template itself can produce them. A control token in a document is tokenized
as plain characters.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from string import Formatter


@dataclass(frozen=True, slots=True)
class Template:
    """Template of a pair: one text, or several that are tokenized separately and concatenated."""

    texts: tuple[str, ...]
    texts_with_instruction: tuple[str, ...] | None = None
    """Texts for a request with an instruction; None: the model takes no instruction."""
    add_special_tokens: bool = False
    """Add the tokenizer's special tokens around the whole."""
    strip_inputs: bool = False
    """Strip white space from query and document."""
    body_length: int | None = None
    """Limit in tokens of query, document and the text between them; None: only the limit of the model applies."""
    query_share: float = 1.0
    """Share of the limit that the query may take."""
    max_characters: tuple[int, int] | None = None
    """Limits in characters of a query and of a document."""

    def parts(self, query: str, document: str) -> tuple[str, str]:
        """Return query and document, truncated to `max_characters` and stripped."""
        if self.max_characters is not None:
            query, document = query[: self.max_characters[0]], document[: self.max_characters[1]]
        if self.strip_inputs:
            query, document = query.strip(), document.strip()
        return query, document


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """Chat template around one text. Control tokens in a text are control tokens, as in Sentence Transformers."""

    plain: tuple[str, str]
    """Format strings of what stands before and after a text without a prompt."""
    prompted: tuple[str, str] | None = None
    """Format strings with the field {instruction}, which is the prompt; None: the model takes no prompt."""
    strip_text: bool = False
    strip_prompt: bool = False

    def around(self, prompt: str) -> tuple[str, str]:
        """Return what stands before and after a text with this prompt, which may be empty."""
        if not prompt:
            return fill(self.plain[0]), fill(self.plain[1])
        assert self.prompted is not None  # the caller refuses a prompt
        prompt = prompt.strip() if self.strip_prompt else prompt
        return fill(self.prompted[0], instruction=prompt), fill(self.prompted[1], instruction=prompt)

    def put(self, text: str, around: tuple[str, str]) -> str:
        return f"{around[0]}{text.strip() if self.strip_text else text}{around[1]}"

    def wrap(self, text: str, prompt: str) -> str:
        return self.put(text, self.around(prompt))


@dataclass(frozen=True, slots=True)
class ListTemplate:
    """Prompt of a listwise reranker: one text with a query and many documents, each of which ends with a marker token.

    The parts are format strings with the fields {query}, {count}, {instruction}, {index} and {document}. The hidden states of
    the markers become the vectors of the documents and of the query.
    """

    opening: str
    instruction: str
    """Part after the opening of a request with an instruction."""
    document: str
    closing: str
    document_marker: str
    query_marker: str
    max_query_tokens: int
    max_document_tokens: int
    """Limits of a query and of a document before the template; a request may set others."""
    max_documents: int
    """Number of documents in one prompt; longer lists run in several."""

    def parts(self, *, instructed: bool) -> tuple[str, ...]:
        """Return the parts before, for each document, and after all of them."""
        return self.opening + (self.instruction if instructed else ""), self.document, self.closing

    def clean(self, text: str) -> str:
        """Remove the markers from a text, as the model's own code does."""
        return text.replace(self.query_marker, "").replace(self.document_marker, "")


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment of a template: a control token, or text."""

    text: str
    """Format string, or the token."""
    is_control: bool = False

    @property
    def fixed(self) -> str:
        """Text without any values of fields."""
        return self.text if self.is_control else fill(self.text)

    @property
    def fields(self) -> tuple[str, ...]:
        return () if self.is_control else fields(self.text)


def fields(text: str) -> tuple[str, ...]:
    """Return the names of a format string's fields."""
    return tuple(name for _, name, _, _ in Formatter().parse(text) if name is not None)


def escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def fill(text: str, *, query: str = "", document: str = "", instruction: str = "") -> str:
    return text.format(query=query, document=document, instruction=instruction)


def split(text: str, controls: Collection[str]) -> list[Segment]:
    """Split a format string before and after each of the tokens `controls`."""
    if not controls:
        return [Segment(text)]
    longest_first = sorted(map(escape, controls), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    segments = [Segment(fill(piece), True) if i % 2 else Segment(piece) for i, piece in enumerate(pieces)]
    return [segment for segment in segments if segment.text]


def from_examples(rendered: str, marks: dict[str, str]) -> str:
    """Return the format string of a text in which `marks` (field -> mark) stand for the fields."""
    text = escape(rendered)
    for field, mark in marks.items():
        text = text.replace(mark, f"{{{field}}}")
    return text
