"""Texts as callers give them: pairs, and the end that is cut from a long text."""

from __future__ import annotations

from typing import Literal, TypeAlias

Truncate: TypeAlias = Literal["right", "left", "never"]
"""End that is cut from a text above the limit; with "never" such a text is an error."""

Pair: TypeAlias = tuple[str, str]
"""A query and a document, or any two texts that are scored together."""
