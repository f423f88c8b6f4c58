"""A server that sends any answer, byte for byte, and requests of a client to it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from whimbrel import Client

Script = Callable[[int, str, list[str]], bytes | list[bytes] | None]
"""Function of the number of earlier requests, the path and the texts. It returns the bytes to send, in pieces with pauses if it
is a list; None: the connection is reset."""


class ScriptedServer:
    """A server that sends what its script says, byte for byte."""

    def __init__(self, script: Script, *, keep: bool = True, pause: float = 0.0) -> None:
        self.script, self.keep, self.pause = script, keep, pause
        self.num_requests = self.num_connections = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            try:
                while (line := file.readline()) and self._answer(connection, file, line.split()[1].decode()):
                    pass
            except (OSError, ValueError):  # the client has left
                return

    def _answer(self, connection: socket.socket, file: Any, path: str) -> bool:
        headers = dict(line.lower().split(b": ") for line in iter(file.readline, b"\r\n"))
        content = file.read(int(headers.get(b"content-length", b"0")))
        body = json.loads(content) if content else {"input": []}
        with self._lock:
            number, self.num_requests = self.num_requests, self.num_requests + 1
        time.sleep(self.pause)
        sent = self.script(number, path, next(body[name] for name in ("input", "inputs", "texts", "documents") if name in body))
        if sent is None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        for piece in [sent] if isinstance(sent, bytes) else sent:
            connection.sendall(piece)
            time.sleep(0.05 if isinstance(sent, list) else 0)
        return self.keep


def http(status: int = 200, body: bytes = b"", **headers: str) -> bytes:
    """An answer; names of headers are written with _ for -."""
    named = {"content_length": str(len(body))} | headers
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items()]
    return f"HTTP/1.1 {status} X\r\n{''.join(lines)}\r\n".encode() + body


def array(vectors: Any, **changes: Any) -> bytes:
    block = {
        "name": "dense",
        "dtype": "float32",
        "endianness": "little",
        "start": 0,
        "end": vectors.nbytes,
        "shape": vectors.shape,
    }
    return http(body=vectors.tobytes(), metadata=json.dumps({"arrays": [block | changes]}))


def good(texts: list[str]) -> bytes:
    """The vector of a text that is a number is that number."""
    return array(np.array([[float(text)] for text in texts], np.float32))


def numbered(number: int, path: str, texts: list[str]) -> bytes:
    return good(texts)


def ask(client: Any, texts: Any) -> Any:
    """Embed, with either client, and close it."""
    if isinstance(client, Client):
        with client:
            return client.embed(texts)

    async def wait() -> Any:
        async with client:
            return await client.embed(texts)

    return asyncio.run(wait())
