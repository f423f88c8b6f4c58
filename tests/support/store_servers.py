"""Servers in the place of stores: OpenSearch, of which no package has the real one, and a Qdrant that is away at times.

They check what they are sent and keep it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Answer = tuple[int, Any]


class FakeStore:
    """State of a server. `faults` has answers to give in place of the next ones; None closes the connection."""

    def __init__(self) -> None:
        self.url = ""
        self.faults: list[Answer | None] = []
        self.made: dict[str, Any] = {}
        self.rows: dict[str, Any] = {}
        self.seen: list[str] = []
        self.headers: list[dict[str, str]] = []

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        raise NotImplementedError


class FakeOpenSearch(FakeStore):
    """An index. A document whose `tags` is t9 is refused, as is one whose vector has another width."""

    def __init__(self, index: str = "birds") -> None:
        super().__init__()
        self._index = index
        self.busy = 0
        """Items of `_bulk` that are to be told that the queue is full."""

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        name = f"/{self._index}"
        if (method, path) == ("HEAD", name):
            return (200 if self.made else 404), None
        if (method, path) == ("PUT", name):
            self.made = json.loads(body)
            assert self.made["settings"] == {"index.knn": True}
            return 200, {"acknowledged": True}
        if (method, path) == ("GET", f"{name}/_mapping"):
            return 200, {self._index: {"mappings": self.made["mappings"]}}
        if (method, path) == ("POST", f"{name}/_refresh"):
            return 200, {}
        assert (method, path) == ("POST", f"{name}/_bulk"), (method, path)
        assert body.endswith(b"\n")
        lines = body[:-1].split(b"\n")
        assert len(lines) % 2 == 0
        items = [self._take(action, document) for action, document in zip(lines[::2], lines[1::2], strict=True)]
        return 200, {"took": 1, "errors": any(item["index"]["status"] >= 300 for item in items), "items": items}

    def _take(self, action: bytes, document: bytes) -> Any:
        said = json.loads(action)
        assert list(said) == ["index"]
        assert list(said["index"]) == ["_id"]
        key, row = said["index"]["_id"], json.loads(document, parse_constant=_no_constant)
        properties = self.made["mappings"]["properties"]
        assert set(row) <= set(properties)
        if self.busy:
            self.busy -= 1
            return {"index": {"_id": key, "status": 429, "error": {"type": "rejected_execution", "reason": "queue is full"}}}
        if row.get("tags") == "t9":
            error = {"type": "mapper_parsing_exception", "reason": "failed to parse", "caused_by": {"reason": "unwanted"}}
            return {"index": {"_id": key, "status": 400, "error": error}}
        for name, kind in properties.items():
            if kind["type"] == "knn_vector":
                assert len(row[name]) == kind["dimension"]
            if kind["type"] == "rank_features":
                assert all(weight > 0 and "." not in entry for entry, weight in row[name].items())
        status = 200 if key in self.rows else 201
        self.rows[key] = row
        return {"index": {"_id": key, "status": status}}


class FakeQdrant(FakeStore):
    """A collection that keeps its points."""

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        path = path.partition("?")[0]
        if path.endswith("/exists"):
            return 200, _result({"exists": bool(self.made)})
        if method == "PUT" and path.endswith("/points"):
            batch = json.loads(body)["batch"]
            for place, key in enumerate(batch["ids"]):
                vectors = {name: rows[place] for name, rows in batch["vectors"].items()}
                self.rows[str(key)] = {"vectors": vectors, "payload": batch["payloads"][place]}
            return 200, _result({"operation_id": 1, "status": "completed"})
        if method == "PUT":
            self.made = json.loads(body)
            return 200, _result(True)
        raise AssertionError((method, path))


def _result(result: Any) -> Any:
    return {"result": result, "status": "ok", "time": 0.0}


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@contextmanager
def serving(store: FakeStore, password: str = "") -> Iterator[FakeStore]:
    """Serve a store at a port of its own; with a password only who has it: HTTP's basic scheme, or Qdrant's header."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            store.seen.append(f"{self.command} {self.path}")
            allowed = (f"Basic {base64.b64encode(password.encode()).decode()}", None)
            if password and self.headers.get("Authorization") not in allowed[:1] and self.headers.get("api-key") != password:
                self.reply(401, {"error": "who are you?"})
            elif store.faults:
                fault = store.faults.pop(0)
                if fault is None:
                    self.close_connection = True
                else:
                    self.reply(*fault)
            else:
                self.reply(*store.answer(self.command, self.path, body))

        do_GET = do_PUT = do_POST = do_HEAD = handle_any

        def reply(self, status: int, value: Any) -> None:
            data = b"" if value is None else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        store.url = f"http://127.0.0.1:{server.server_port}"
        yield store
        server.shutdown()
        thread.join()
