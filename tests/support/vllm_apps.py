"""Apps over an engine, asked as vLLM's clients do."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import orjson

from asgi import call
from whimbrel import AsyncEngine, Engine
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.routing import AsyncEmbedder, ModelRegistry

TEXTS = ["The whimbrel is a wader.", "far away", ""]
QUERY, DOCUMENTS = "what is a whimbrel?", ["a sandwich", "The whimbrel is a wader.", "a sandwich"]
IMAGE = {"content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}


class Asker:
    """An app over an engine, asked from outside any event loop."""

    def __init__(self, engine: Engine, **guards: Any) -> None:
        self._embedder = cast(AsyncEmbedder, AsyncEngine(engine))
        self._guards = ServerLimits(**guards)

    def told(self, path: str, body: Any = None, **headers: str) -> Any:
        app = create_app(ModelRegistry(self._embedder), guards=self._guards)
        content = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        named = {"content_type": "application/json"} | headers
        return asyncio.run(call(app, "GET" if body is None else "POST", path, body=content, headers=named))

    def ask(self, path: str, body: Any = None) -> Any:
        told = self.told(path, body)
        assert told.status == 200, told.body
        return orjson.loads(told.body)


def column(answer: Any, name: str = "data") -> Any:
    return [np.array(each[name], np.float32) for each in answer["data"]]


def check(told: Any, status: int, kind: str) -> Any:
    error = orjson.loads(told.body)["error"]
    assert (told.status, error["type"], error["code"]) == (status, kind, status), told
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error
