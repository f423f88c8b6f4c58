"""An ASGI server reduced to one function: one request, one answer, and a client that may leave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def ask(
    app: Any,
    path: str = "/",
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    leaves: asyncio.Event | None = None,
    deaf: bool = False,
) -> Answer:
    """What `app` answers. The client leaves when `leaves` is set; if it is `deaf`, sending to it fails."""
    sent: list[Any] = []
    bodies = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        if (message := next(bodies, None)) is not None:
            return message
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if deaf:
            raise OSError("nobody listens")
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "root_path": "",
        "headers": [
            (name.lower().encode(), value.encode("latin-1")) for name, value in {"host": "127.0.0.1", **(headers or {})}.items()
        ],
        "client": ("10.0.0.1", 1234),
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
    start = next((message for message in sent if message["type"] == "http.response.start"), None)
    return Answer(
        status=start["status"] if start else 0,
        headers={name.decode(): value.decode() for name, value in start["headers"]} if start else {},
        body=b"".join(message.get("body", b"") for message in sent),
    )


@dataclass
class Told:
    """What an app sent: `pieces` are the bodies of its messages."""

    status: int
    headers: dict[str, str]
    pieces: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


async def call(
    app: Any, method: str = "GET", path: str = "/", *, body: bytes | list[bytes] = b"", headers: dict[str, str] | None = None
) -> Told:
    """Ask an ASGI app, as a client that keeps its connection. Names of headers are written with _ for -."""
    chunks = [body] if isinstance(body, bytes) else body
    named = {"host": "localhost", "content_length": str(sum(map(len, chunks)))} | (headers or {})
    waiting = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks] + [{"type": "http.request"}]
    told = Told(0, {}, [])

    async def receive() -> Any:
        return waiting.pop(0) if waiting else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            told.status = message["status"]
            told.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            told.pieces.append(message.get("body", b""))

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", "8000"),
        "client": ("127.0.0.1", "50000"),
        "headers": [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in named.items()],
    }
    await app(scope, receive, send)
    return told
