"""Real HTTP servers for load generators, that answer, stall, refuse or hang up as a test says."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

OK = {
    "object": "list",
    "model": "fake",
    "usage": {"prompt_tokens": 7, "total_tokens": 7},
    "data": [{"index": 0, "embedding": [1.0, 0.0]}],
}


def answer(status: int = 200, body: bytes = json.dumps(OK).encode(), *headers: str, length: bool = True) -> bytes:
    """Return a response as bytes."""
    lines = [f"HTTP/1.1 {status} Words", "content-type: application/json", *headers]
    if length:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Fake:
    """A server on a free port. `respond` gets the number of the request, from 0, and its socket; None hangs up."""

    respond: Callable[[int, socket.socket], bytes | None]
    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    connections: int = 0
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def fake_server(
    respond: Callable[[int, socket.socket], bytes | None], *, health: Callable[[], bytes] = lambda: answer(404, b"{}")
) -> Iterator[Fake]:
    """Serve POSTs by `respond`, a model at /v1/models, and /health."""
    fake = Fake(respond)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with fake.lock:
                fake.connections += 1
            while (request := self.rfile.readline()) and self._one(request):
                pass

        def _one(self, request: bytes) -> bool:
            headers = {}
            while line := self.rfile.readline().strip():
                name, _, value = line.partition(b":")
                headers[name.strip().lower()] = value.strip()
            body = self.rfile.read(int(headers.get(b"content-length", 0)))
            if request.startswith(b"GET /v1/models"):
                self.connection.sendall(answer(200, b'{"data": [{"id": "fake"}]}'))
                return True
            if request.startswith(b"GET /health"):
                self.connection.sendall(health())
                return True
            if b"tokenize" in request or request.startswith(b"GET"):
                self.connection.sendall(answer(404, b"{}"))
                return True
            with fake.lock:
                number = len(fake.bodies)
                fake.bodies.append(json.loads(body))
                fake.running += 1
                fake.most_running = max(fake.most_running, fake.running)
            try:
                response = fake.respond(number, self.connection)
            finally:
                with fake.lock:
                    fake.running -= 1
            if response is None:
                return False
            self.connection.sendall(response)
            return b"connection: close" not in response

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 512

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that has left is no error."""

    with Server(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


def always(response: bytes | None, seconds: float = 0.0) -> Callable[[int, socket.socket], bytes | None]:
    """Return the same response to every request, after some time."""

    def respond(number: int, connection: socket.socket) -> bytes | None:
        time.sleep(seconds)
        return response

    return respond
