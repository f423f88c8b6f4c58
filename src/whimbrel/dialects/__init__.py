"""Dialects: other servers' APIs as pure functions over bytes, one module each, joined in the table ROUTES.

A dialect knows Request, Result and the error tree; it knows nothing of HTTP servers, engines or tensors.
"""

from __future__ import annotations

from typing import Final

from whimbrel.dialects import cohere, jina, native, ollama, openai, rerank, tei, vllm, voyage
from whimbrel.dialects.common.route import JSON, MESSAGE_PACK, Answer, Page, Route, ServedModel

__all__ = ["JSON", "MESSAGE_PACK", "PAGES", "ROUTES", "Answer", "Page", "Route", "ServedModel"]

ROUTES: Final[tuple[Route, ...]] = (
    *openai.ROUTES,
    *native.ROUTES,
    *rerank.ROUTES,
    *tei.ROUTES,
    *ollama.ROUTES,
    *cohere.ROUTES,
    *voyage.ROUTES,
    *jina.ROUTES,
    *vllm.ROUTES,
)
"""Every POST route; all are served alike."""

PAGES: Final[tuple[Page, ...]] = (*ollama.PAGES, *vllm.PAGES)
"""Every GET route that belongs to a dialect."""
