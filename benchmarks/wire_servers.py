"""The servers of wire.py: each serves ready arrays, in a process of its own.

- whimbrel: a worker of `whimbrel serve`, over an embedder that computes nothing.
- fastapi: FastAPI on uvicorn, with one worker, httptools and uvloop. The body is a pydantic model with the fields of OpenAI's
  API. /json goes through .tolist() and the framework's own JSON, /orjson prints the array, /raw gives its bytes.
"""

import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, Final, Literal

import numpy as np
import orjson

from whimbrel.types.arrays import Float32Array
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Result, Timings
from whimbrel.types.scheduling import Scheduling

DIMENSION: Final = 1024


@contextmanager
def running(serve: Callable[[socket.socket], None]) -> Generator[str]:
    """Run a server in a process, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        process = get_context("spawn").Process(target=serve, args=(listener,), daemon=True)
        process.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.kill()


@cache
def vectors(count: int) -> Float32Array:
    """Return unit vectors, made once."""
    array = np.random.default_rng(0).standard_normal((count, DIMENSION), np.float32)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


async def embed(request: Request, _: Scheduling) -> Result:
    """Return the vectors at once."""
    array = vectors(len(request.texts))
    return Result(Outputs(array), num_tokens=len(array), num_truncated=0, timings=Timings())


def serve_whimbrel(listener: socket.socket) -> None:
    """Serve the arrays with Whimbrel."""
    import uvloop

    from whimbrel.engine.malloc import tune_glibc_malloc
    from whimbrel.server.app.app import create_app
    from whimbrel.server.app.limits import DEFAULTS
    from whimbrel.server.app.routing import ModelRegistry, render_error
    from whimbrel.server.http.listener import Server

    tune_glibc_malloc()  # as a worker does
    plan = SimpleNamespace(served_name="ready", aliases=(), adapters={}, max_length=512)
    card = SimpleNamespace(outputs={"dense": None})
    embedder: Any = SimpleNamespace(card=card, plan=plan, ready=True, status="ready", queued_tokens=0, run=embed)

    async def serve() -> None:
        await Server(create_app(ModelRegistry(embedder)), listener.fileno(), DEFAULTS, render_error).serve()

    uvloop.run(serve())


def serve_fastapi(listener: socket.socket) -> None:
    """Serve the arrays as the article does."""
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse, Response
    from pydantic import BaseModel

    class Body(BaseModel):
        input: str | list[str] | list[int] | list[list[int]]
        model: str | None = None
        encoding_format: Literal["float", "base64", "bytes_only"] = "float"
        dimensions: int | None = None
        user: str | None = None

    app = FastAPI()

    async def as_json(body: Any) -> Any:
        return JSONResponse(vectors(len(body.input)).tolist())

    async def as_orjson(body: Any) -> Any:
        content = orjson.dumps(vectors(len(body.input)), option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(content, media_type="application/json")

    async def as_raw(body: Any) -> Any:
        return Response(vectors(len(body.input)).tobytes(), media_type="application/octet-stream")

    for path, handler in (("/json", as_json), ("/orjson", as_orjson), ("/raw", as_raw)):
        handler.__annotations__["body"] = Body
        app.post(path, response_model=None)(handler)
    uvicorn.Server(uvicorn.Config(app, log_level="error", http="httptools", loop="uvloop")).run(sockets=[listener])
