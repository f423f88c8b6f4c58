"""The routes for pooling models of vLLM's server."""

from __future__ import annotations

from typing import Final

from whimbrel.dialects.common.route import Page, Route
from whimbrel.dialects.vllm import pooling, tokens

__all__ = ["PAGES", "ROUTES"]

ROUTES: Final[tuple[Route, ...]] = (*pooling.ROUTES, *tokens.ROUTES)
PAGES: Final[tuple[Page, ...]] = pooling.PAGES
