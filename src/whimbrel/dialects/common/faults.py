"""Faults of request bodies that an API tells apart."""

from __future__ import annotations

from whimbrel.errors import InvalidRequest


class MalformedBody(InvalidRequest):
    """The body is empty or is not valid JSON."""


class MissingField(InvalidRequest):
    """A field that the body must have is not there."""


class Empty(InvalidRequest):
    """A list of inputs is empty."""


class UnknownWord(InvalidRequest):
    """A field has a value that is none of the words it takes."""
