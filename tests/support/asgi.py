"""An ASGI server reduced to one function: one request, one answer, and a client that may leave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """The messages of an app: `pieces` are their bodies. The status of no answer is 0."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    pieces: list[bytes] = field(default_factory=list[bytes])

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


async def call(
    app: Any,
    method: str = "GET",
    path: str = "/",
    *,
    body: bytes | list[bytes] = b"",
    headers: dict[str, str] | None = None,
    leaves: asyncio.Event | None = None,
    deaf: bool = False,
) -> Answer:
    """Send a request to an app, and return its answer. Names of headers are written with _ for -.

    The client leaves when `leaves` is set; if it is `deaf`, sending to it fails.
    """
    chunks = [body] if isinstance(body, bytes) else body
    named = {"host": "localhost", "content_length": str(sum(map(len, chunks)))} | (headers or {})
    last = len(chunks) - 1
    waiting = [{"type": "http.request", "body": chunk, "more_body": i < last} for i, chunk in enumerate(chunks)]
    answer = Answer()

    async def receive() -> Any:
        if waiting:
            return waiting.pop(0)
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if deaf:
            raise OSError("nobody listens")
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            answer.pieces.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "client": ("10.0.0.1", 1234),
        "headers": [(name.replace("_", "-").lower().encode(), value.encode("latin-1")) for name, value in named.items()],
    }
    await app(scope, receive, send)
    return answer
