"""Paths as clients build them: with doubled or trailing slashes, and below Azure's prefixes."""

from __future__ import annotations

import re
from typing import Final

from starlette.types import Scope

from whimbrel.server.app.routing import ROUTES_BY_PATH

DEPLOYMENT: Final = "whimbrel.deployment"
_DEPLOYMENT: Final = re.compile(r"/openai/deployments/(.+)/embeddings")
"""Azure's path of embeddings, which names the model."""
_AZURE: Final = "/openai/v1/"
_SLASHES: Final = re.compile(r"/{2,}")


def canonical(scope: Scope) -> Scope:
    """Return the scope of a request with the path that its route has here.

    Slashes are merged, and the last one is dropped. `/openai/v1/...` is `/v1/...`. `/openai/deployments/NAME/embeddings` is
    `/v1/embeddings` of the model NAME, which the scope then names under DEPLOYMENT.
    """
    path: str = scope["path"]
    if path in ROUTES_BY_PATH:
        return scope
    plain = _SLASHES.sub("/", path).rstrip("/") or "/"
    if deployment := _DEPLOYMENT.fullmatch(plain):
        return {**scope, "path": "/v1/embeddings", DEPLOYMENT: deployment[1]}
    if plain.startswith(_AZURE):
        plain = plain.removeprefix("/openai")
    return scope if plain == path else {**scope, "path": plain}
