"""The routes for pooling models of vLLM's server."""

from __future__ import annotations

from typing import Final

from whimbrel.dialects.common.route import GetRoute, Route
from whimbrel.dialects.vllm import pooling, tokens

__all__ = ["GET_ROUTES", "ROUTES"]

ROUTES: Final[tuple[Route, ...]] = (*pooling.ROUTES, *tokens.ROUTES)
GET_ROUTES: Final[tuple[GetRoute, ...]] = pooling.GET_ROUTES
