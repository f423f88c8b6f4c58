"""The client against servers that answer anything."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from whimbrel import Client, errors

ROW = base64.b64encode(np.ones(3, np.float32).tobytes()).decode()


class Handler(http.server.BaseHTTPRequestHandler):
    answer: tuple[int, dict[str, str], bytes]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        status, headers, body = type(self).answer
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def rows(*indexes: int, row: str = ROW) -> bytes:
    return json.dumps({"data": [{"index": i, "embedding": row} for i in indexes]}).encode()


def test_rows_come_in_the_order_of_the_texts(url: str) -> None:
    Handler.answer = (200, {}, rows(1, 0))
    with Client(url) as client:
        assert client.embed(["a", "b"]).shape == (2, 3)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"<html>", b'{"data": []}', rows(0), rows(0, 0), rows(5, 9), rows(0, 1, 2), rows(0, 1, row=""), rows(0, 1, row="AA"),
     rows(0, 1)[:-3], b'{"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0]}]}'],
)  # fmt: skip
def test_answers_that_do_not_fit_are_errors(body: bytes, url: str) -> None:
    Handler.answer = (200, {}, body)
    with Client(url) as client, pytest.raises(errors.WhimbrelError, match="cannot be read"):
        client.embed(["a", "b"])


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind"),
    [
        (429, {"retry-after": "7"}, b"<html>", errors.Overloaded),
        (429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, b"{}", errors.Overloaded),
        (429, {"retry-after": "-3"}, b'{"error": {"message": "busy"}}', errors.Overloaded),
        (503, {}, b"<html>", errors.Unavailable),
        (401, {}, b'{"error": {"message": "no", "type": "x", "code": "invalid_api_key"}}', errors.Unauthorized),
        (401, {}, b'{"error": "no"}', errors.Unauthorized),
        (404, {}, b'{"error": {"message": "no", "code": "model_not_found"}}', errors.ModelNotFound),
        (400, {}, b'{"error": {"message": "no", "code": 400}}', errors.InvalidRequest),
        (500, {}, b"oops", errors.WhimbrelError),
        (200, {"content-encoding": "gzip"}, b"no gzip", errors.Unavailable),
    ],
)  # fmt: skip
def test_errors_are_whimbrel_s(
    status: int, headers: dict[str, str], body: bytes, kind: type[errors.WhimbrelError], url: str
) -> None:
    Handler.answer = (status, headers, body)
    with Client(url) as client, pytest.raises(kind) as caught:
        client.embed("a")
    if isinstance(caught.value, errors.Overloaded):
        assert caught.value.retry_after == (7 if headers["retry-after"] == "7" else 1)


@pytest.mark.parametrize("texts", [None, 5, b"abc", ["a", 3], ["\ud800"]])
def test_what_is_no_text_is_not_sent(texts: Any, url: str) -> None:
    with Client(url) as client, pytest.raises(errors.InvalidRequest):
        client.embed(texts)


def test_a_closed_client(url: str) -> None:
    client = Client(url)
    client.close()
    with pytest.raises(errors.Unavailable):
        client.embed("a")
