"""Whimbrel's own API: several outputs of one pass, classes and entities."""

from __future__ import annotations

from typing import Final

from whimbrel.dialects.common.route import Route
from whimbrel.dialects.native import classify, embed

__all__ = ["ROUTES"]

ROUTES: Final[tuple[Route, ...]] = (*embed.ROUTES, *classify.ROUTES)
