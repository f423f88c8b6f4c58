"""Whimbrel: inference of embedding models, rerankers and classifiers, as a library, a server and a client.

- `Engine` and `AsyncEngine` run a model in this process. They need PyTorch: `pip install "whimbrel[serve]"`.
- `Client` and `AsyncClient` have the same verbs over HTTP. They need neither PyTorch nor a web framework.
- `WhimbrelError` is the base class of all errors, which are in `whimbrel.errors`. A verb that cuts texts without being asked to
  warns with `TruncationWarning`.
- `whimbrel serve` on the command line starts a server, and `whimbrel --help` lists all commands.

The verbs are `embed`, `sparse`, `multi_vector`, `muvera`, `encode`, `score`, `rerank`, `explain`, `classify` and
`token_classify`. Names are imported on first use, so `import whimbrel` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from whimbrel.client import AsyncClient, Client
    from whimbrel.engine.engine import AsyncEngine, Engine
    from whimbrel.errors import TruncationWarning, WhimbrelError

_MODULES = {
    "AsyncClient": "whimbrel.client",
    "AsyncEngine": "whimbrel.engine.engine",
    "Client": "whimbrel.client",
    "Engine": "whimbrel.engine.engine",
    "TruncationWarning": "whimbrel.errors",
    "WhimbrelError": "whimbrel.errors",
}

__all__ = ["AsyncClient", "AsyncEngine", "Client", "Engine", "TruncationWarning", "WhimbrelError", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'whimbrel' has no attribute {name!r}")
    if name in ("AsyncEngine", "Engine"):
        from importlib.util import find_spec

        missing = [package for package in ("torch", "tokenizers", "safetensors") if find_spec(package) is None]
        if missing:
            from whimbrel.errors import SetupError

            hint = "pip install 'whimbrel[serve]'"
            raise SetupError(f"{name} needs {', '.join(missing)}: {hint}.", hint=hint)
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
