"""Bytes over a socket, as no client library would send them."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import orjson

PATH = "/v1/embeddings"


def head(method: str = "POST", path: str = PATH, *, host: str = "localhost", **headers: object) -> bytes:
    """A request's head; a header's name is written with _ for -. Without `content_type`, a POST says JSON."""
    named = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    if method == "POST" and "content_type" not in headers:
        named["content-type"] = "application/json"
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in named.items())]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"


def post(body: bytes | object, **headers: object) -> bytes:
    """A whole request to PATH."""
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    return head(content_length=len(content), **headers) + content


def hold(port: int, body: object, **headers: object) -> Connection:
    """Send a request but the last byte of its body, and return its connection once the server has counted it."""
    request = post(body, expect="100-continue", **headers)
    for _ in range(100):
        connection = Connection(port).send(request[: request.index(b"\r\n\r\n") + 4])
        if connection.answer().status == 100:
            return connection.send(request[request.index(b"\r\n\r\n") + 4 : -1])
        connection.close()  # an answered request may still be counted
    raise AssertionError("the request is never taken")


def chunked(body: bytes, size: int) -> bytes:
    """A body in chunks of `size` bytes."""
    chunks = (body[start : start + size] for start in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]


class Connection:
    """A client that sends what it is told, and reads one answer at a time."""

    def __init__(self, port: int, *, timeout: float = 60, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout)
        self.socket.connect(("127.0.0.1", port))
        self._read = b""

    def send(self, data: bytes) -> Self:
        self.socket.sendall(data)
        return self

    def answer(self, *, to_head: bool = False) -> Answer:
        """The next answer. Raises EOFError if the connection ends before it does."""
        lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        status = int(lines[0].split()[1])
        if headers.get("transfer-encoding") == "chunked" and not to_head:
            return Answer(status, headers, b"".join(iter(self._chunk, b"")))
        return Answer(status, headers, self._take(0 if to_head or status < 200 else int(headers.get("content-length", 0))))

    def is_closed(self) -> bool:
        """Wait for the end of the connection; False if something else comes, or nothing within the timeout."""
        try:
            return self._read == b"" and self.socket.recv(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chunk(self) -> bytes:
        """The next chunk of a body; the last is empty."""
        chunk = self._take(int(self._until(b"\r\n"), 16))
        self._until(b"\r\n")
        return chunk

    def _take(self, size: int) -> bytes:
        while len(self._read) < size:
            self._more()
        taken, self._read = self._read[:size], self._read[size:]
        return taken

    def _until(self, end: bytes) -> bytes:
        while end not in self._read:
            self._more()
        found, _, self._read = self._read.partition(end)
        return found

    def _more(self) -> None:
        piece = self.socket.recv(65536)
        if not piece:
            raise EOFError(f"the connection ended after {self._read[:200]!r}")
        self._read += piece


def ask(port: int, *parts: bytes, timeout: float = 60) -> Answer:
    """The answer to a request, however much of it could be sent."""
    with Connection(port, timeout=timeout) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                connection.send(part)
        return connection.answer()
