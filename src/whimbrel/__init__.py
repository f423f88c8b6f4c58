"""Whimbrel: dense, sparse and multi-vector embeddings, rerank scores and classes at the speed of the hardware.

`import whimbrel` is light: names are imported on first use, and only `Engine` and `AsyncEngine` need PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from whimbrel.client import AsyncClient, Client
    from whimbrel.engine.async_engine import AsyncEngine
    from whimbrel.engine.engine import Engine
    from whimbrel.errors import WhimbrelError

_HOME = {
    "AsyncClient": "whimbrel.client",
    "AsyncEngine": "whimbrel.engine.async_engine",
    "Client": "whimbrel.client",
    "Engine": "whimbrel.engine.engine",
    "WhimbrelError": "whimbrel.errors",
}

__all__ = ["AsyncClient", "AsyncEngine", "Client", "Engine", "WhimbrelError", "__version__"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'whimbrel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
