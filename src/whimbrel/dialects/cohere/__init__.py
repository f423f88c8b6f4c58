"""Cohere's API: /v1/embed, /v2/embed, /v1/rerank and /v2/rerank."""

from __future__ import annotations

from typing import Final

from whimbrel.dialects.cohere import embed, rerank
from whimbrel.dialects.common.route import Route

__all__ = ["ROUTES"]

ROUTES: Final[tuple[Route, ...]] = (*embed.ROUTES, *rerank.ROUTES)
