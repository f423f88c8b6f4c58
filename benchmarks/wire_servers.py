"""The servers of wire.py, each a process of its own that serves ready arrays on a free port and prints it.

    python benchmarks/wire_servers.py whimbrel|whimbrel-2|fastapi|fastapi-plain|tcp

- whimbrel: a worker of `whimbrel serve`, over an embedder that computes nothing; whimbrel-2: two of them on one socket.
- fastapi: FastAPI on uvicorn, with one worker, httptools and uvloop; fastapi-plain: with h11 and asyncio, which is what
  installing the two brings. The body is a pydantic model with the fields of OpenAI's API. /json goes through .tolist() and the
  framework's own JSON, /orjson prints the array, /raw gives its bytes. POST /v1/embeddings is /raw.
- tcp: sends the bytes of a response again and again to whoever connects.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final, Literal

import numpy as np
import orjson

from whimbrel.types.arrays import Float32Array
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Result, Timings

DIMENSION: Final = 1024
ROWS: Final = 256
_PR_SET_PDEATHSIG: Final = 1


@cache
def vectors(count: int) -> Float32Array:
    """Unit vectors, made once."""
    array = np.random.default_rng(0).standard_normal((count, DIMENSION), np.float32)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


class ReadyEmbedder:
    """Answers at once with what it has."""

    def __init__(self) -> None:
        self.card: Any = SimpleNamespace(outputs={"dense": None})
        self.plan: Any = SimpleNamespace(served_name="ready", aliases=(), adapters={}, max_length=512)
        self.ready = True
        self.status = "ready"
        self.queued_tokens = 0

    async def run(self, request: Request) -> Result:
        """The vectors."""
        array = vectors(len(request.texts))
        return Result(Outputs(array), num_tokens=len(array), num_truncated=0, timings=Timings())


def serve_whimbrel(listener: socket.socket) -> None:
    """Ours."""
    import uvloop

    from whimbrel.engine.malloc import tune_glibc_malloc
    from whimbrel.server.app.app import create_app
    from whimbrel.server.app.limits import DEFAULTS
    from whimbrel.server.app.routing import ModelRegistry, render_error
    from whimbrel.server.http.listener import Server

    tune_glibc_malloc()  # as a worker does

    async def serve() -> None:
        embedder: Any = ReadyEmbedder()
        await Server(create_app(ModelRegistry(embedder)), listener.fileno(), DEFAULTS, render_error).serve()

    uvloop.run(serve())


def serve_two(listener: socket.socket) -> None:
    """Two of ours, as `whimbrel serve --workers 2` has them. The other dies with this one (Linux)."""
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    serve_whimbrel(listener)


def serve_fastapi(listener: socket.socket, http: Any = "httptools", loop: Any = "uvloop") -> None:
    """The article's."""
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

    for path, handler in (("/json", as_json), ("/orjson", as_orjson), ("/raw", as_raw), ("/v1/embeddings", as_raw)):
        handler.__annotations__["body"] = Body
        app.post(path, response_model=None)(handler)
    uvicorn.Server(uvicorn.Config(app, log_level="error", http=http, loop=loop)).run(sockets=[listener])


def serve_tcp(listener: socket.socket) -> None:
    """A bare stream."""
    data = vectors(ROWS).tobytes()

    def stream(connection: socket.socket) -> None:
        try:
            while True:
                connection.sendall(data)
        except OSError:
            connection.close()

    while True:
        threading.Thread(target=stream, args=(listener.accept()[0],), daemon=True).start()


def main() -> None:
    """Serve until killed."""
    kinds = {
        "whimbrel": serve_whimbrel,
        "whimbrel-2": serve_two,
        "fastapi": serve_fastapi,
        "fastapi-plain": partial(serve_fastapi, http="h11", loop="asyncio"),
        "tcp": serve_tcp,
    }
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)
    kinds[sys.argv[1]](listener)


if __name__ == "__main__":
    main()
