"""Whatever an app does with a request, the ledger has one entry for it, and one end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from asgi import Answer, call
from whimbrel.dialects import Response as Made
from whimbrel.errors import (
    ComputeError,
    DeadlineExceeded,
    EngineCrash,
    InvalidRequest,
    ModelNotFound,
    OutOfMemory,
    Overloaded,
    TooLarge,
    Unauthorized,
    Unavailable,
    WhimbrelError,
)
from whimbrel.server.app.app import send_response
from whimbrel.server.app.request_context import RequestMiddleware, context_of, send_error
from whimbrel.server.app.routing import ROUTES_BY_PATH
from whimbrel.telemetry import trace
from whimbrel.telemetry.trace import RequestFinished, RequestStarted
from whimbrel.types.result import Result, Timings


class Heard:
    """The events of the requests of a test."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.finished: list[RequestFinished] = []

    @property
    def only(self) -> RequestFinished:
        assert len(self.finished) == 1
        assert self.received == [self.finished[0].route]
        return self.finished[0]


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    ends = [
        trace.subscribe(RequestStarted, lambda event: heard.received.append(event.route)),
        trace.subscribe(RequestFinished, heard.finished.append),
    ]
    yield heard
    for end in ends:
        end()


def template(path: str) -> str:
    return "/v1/models/{model}" if path.startswith("/v1/models/") else path if path == "/v1/embeddings" else ""


def run(app: Any, path: str = "/v1/embeddings", **options: Any) -> Answer:
    return asyncio.run(call(RequestMiddleware(app, template), path=path, **options))


def answering(status: int) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    return app


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, "ok"), (304, "ok"), (400, "invalid"), (401, "unauthorized"), (403, "forbidden"), (404, "not_found"), (405, "invalid"),
        (408, "timeout"), (413, "invalid"), (415, "invalid"), (429, "overloaded"), (431, "invalid"), (500, "error"), (503, "unavailable"),
        (504, "timeout"), (507, "error"),
    ],
)  # fmt: skip
def test_an_answer_s_status_is_its_outcome(status: int, outcome: str, heard: Heard) -> None:
    assert run(answering(status)).status == status
    assert (heard.only.status, heard.only.outcome) == (status, outcome)
    assert heard.only.error == ("" if outcome == "ok" else outcome)


ENDS = [
    (InvalidRequest("x"), "invalid", False), (TooLarge("x"), "invalid", False), (ModelNotFound("x"), "not_found", False),
    (Unauthorized("x"), "unauthorized", False), (Overloaded("x", retry_after=1), "overloaded", False),
    (Unavailable("x"), "unavailable", True), (DeadlineExceeded("x"), "timeout", True), (ComputeError("x"), "error", True),
    (EngineCrash("x"), "error", True), (OutOfMemory("x"), "error", True), (WhimbrelError("x"), "error", True),
]  # fmt: skip


@pytest.mark.parametrize(("error", "outcome", "is_ours"), ENDS, ids=lambda value: type(value).__name__)
def test_K3_an_error_has_one_outcome_in_all_dialects(error: WhimbrelError, outcome: str, is_ours: bool, heard: Heard) -> None:
    """Whatever status a dialect gives it; and it is logged in all of them or in none."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send_error(error, scope, send)

    statuses = {run(app, path, method="POST").status for path in ROUTES_BY_PATH}
    assert {(each.outcome, each.error) for each in heard.finished} == {(outcome, error.code)}
    assert {each.is_server_error for each in heard.finished} == {is_ours}
    assert len(statuses) > 1 or type(error) in (Unauthorized, Unavailable, DeadlineExceeded, WhimbrelError)


@pytest.mark.parametrize(
    ("path", "fails"),
    [
        ("/health", 0),
        ("/health/ready", 0),
        ("/ping", 0),
        ("/", 0),
        ("/v2/health/ready", 0),
        ("/v2/models/{model}/ready", 0),
        ("/v1/embeddings", 1),
    ],
)
def test_G7_a_probe_that_learns_that_the_server_is_not_ready_is_no_failure(path: str, fails: int, heard: Heard) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send_error(Unavailable("loading."), scope, send)

    asyncio.run(call(RequestMiddleware(app, str), path=path))
    asyncio.run(call(RequestMiddleware(answering(500), str), path=path))
    assert [each.outcome for each in heard.finished] == ["unavailable", "error"]
    assert sum(each.is_server_error for each in heard.finished) == fails + 1


def test_what_handlers_note_is_in_the_record_and_in_the_headers(heard: Heard) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        notes = context_of(scope)
        assert scope["state"]["request_id"] == notes.request_id
        with trace.Timer("read", into=notes.stages):
            pass
        notes.model, notes.num_texts = "m", 2
        notes.note_result(Result(None, 7, 1, Timings(0.1, 0.2, 0.3, 0.6)))  # pyright: ignore[reportArgumentType]
        await answering(200)(scope, receive, send)

    answer = run(app, headers={"X-Request-Id": "abc"})
    record = heard.only
    assert (record.request_id, record.model, record.num_texts, record.num_tokens, record.num_truncated) == ("abc", "m", 2, 7, 1)
    assert list(record.stages) == ["read", "tokenize", "queue", "compute"]
    assert record.client == "10.0.0.1"
    assert record.seconds > 0
    assert answer.headers["x-request-id"] == "abc"
    assert (answer.headers["x-whimbrel-tokens"], answer.headers["x-whimbrel-truncated"]) == ("7", "1")
    names = [part.split(";")[0] for part in answer.headers["server-timing"].split(", ")]
    assert names == ["read", "tokenize", "queue", "compute", "total"]
    assert "tokenize;dur=100.00" in answer.headers["server-timing"]


@pytest.mark.parametrize(("path", "route"), [
    ("/v1/embeddings", "/v1/embeddings"), ("/v1/models/a/b", "/v1/models/{model}"), ("/nope", "other"), ("/v1/embeddings/", "other"),
    ("/v1/models", "other"), ("", "other"),
])  # fmt: skip
def test_the_route_is_a_template(path: str, route: str, heard: Heard) -> None:
    run(answering(401), path)
    assert heard.only.route == route


@pytest.mark.parametrize(("method", "counted"), [("GET", "GET"), ("QUERY", "other"), ("get", "other"), ("X" * 9999, "other")])
def test_the_method_is_one_of_http_s(method: str, counted: str, heard: Heard) -> None:
    run(answering(405), method=method)
    assert heard.only.method == counted


def test_a_long_path_is_cut(heard: Heard) -> None:
    run(answering(404), "/" + "x" * 99999)
    assert len(heard.only.path) == 256


@pytest.mark.parametrize("given", ["", "a b", "a\tb", "x" * 129, "\xff", "a;b", '"', "a,b"])
def test_K6_an_id_that_is_none_is_replaced(given: str, heard: Heard) -> None:
    made = run(answering(200), headers={"x-request-id": given}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)
    assert heard.only.request_id == made


VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        (VALID, True), (VALID[:-2] + "00", True), ("cc" + VALID[2:] + "-what-comes", True), ("", False), ("x", False),
        (VALID.upper(), False), ("ff" + VALID[2:], False), (VALID + "-more", False), (VALID[:-1], False), (VALID + "0", False),
        ("00-" + "0" * 32 + VALID[35:], False), (VALID[:36] + "0" * 16 + "-01", False), (VALID * 99, False), (VALID + "\n", False),
    ],
)  # fmt: skip
def test_K6_only_a_valid_traceparent_is_taken(given: str, valid: bool, heard: Heard) -> None:
    run(answering(200), headers={"traceparent": given})
    assert heard.only.traceparent == (given if valid else "")


# Ends that are no answers


@pytest.mark.parametrize("num_pieces", [0, 1, 2])
def test_an_answer_that_cannot_be_made(num_pieces: int, heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    """The error has a status of its own as long as no piece of the answer is made."""

    def pieces() -> Iterator[bytes]:
        yield from [b"a"] * num_pieces
        raise ValueError("on purpose")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send_response(Made(pieces()), scope, send)

    answer = run(app)
    assert (answer.status, heard.only.status) == ((500, 500) if num_pieces == 0 else (200, 200))
    assert (heard.only.outcome, heard.only.error) == ("error", "internal_error")
    assert "ValueError" in caplog.text


def test_a_bug_before_the_answer_is_answered(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("secret text")

    answer = run(app)
    assert answer.status == 500
    assert b"KeyError" in answer.body
    assert b"secret text" not in answer.body
    assert "x-request-id" in answer.headers
    assert (heard.only.status, heard.only.outcome, heard.only.error) == (500, "error", "internal_error")
    assert "Traceback" in caplog.text


def test_a_bug_amid_the_answer_ends_it(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise KeyError

    assert run(app).body == b"half"
    assert (heard.only.status, heard.only.outcome, heard.only.error) == (200, "error", "internal_error")
    assert "Traceback" in caplog.text


def test_no_answer_at_all_is_a_bug(heard: Heard) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    assert run(app).status == 500
    assert (heard.only.status, heard.only.outcome) == (500, "error")


def test_an_answer_that_is_cut_off_has_no_taker(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    run(app)
    assert (heard.only.status, heard.only.outcome) == (200, "client_gone")
    assert not caplog.text


@pytest.mark.parametrize("answers", [True, False])
def test_K3_a_client_that_leaves_before_its_answer(answers: bool, heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        if answers:
            await answering(400)(scope, receive, send)

    left = asyncio.Event()
    left.set()
    run(app, leaves=left)
    assert (heard.only.status, heard.only.outcome) == (400 if answers else 499, "client_gone")
    assert not caplog.text


def test_K3_a_client_that_leaves_after_its_answer_was_answered(heard: Heard) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await answering(200)(scope, receive, send)
        await receive()

    left = asyncio.Event()
    left.set()
    run(app, leaves=left)
    assert (heard.only.status, heard.only.outcome) == (200, "ok")


def test_clearing_up_after_the_answer_takes_none_of_its_time(heard: Heard) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answering(200)(scope, receive, send)
        await asyncio.sleep(0.5)

    run(app)
    assert heard.only.seconds < 0.5


def test_K3_a_client_that_takes_nothing_is_gone(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    run(answering(200), deaf=True)
    assert heard.only.outcome == "client_gone"
    assert not caplog.text


def test_a_server_that_stops_loses_its_requests(heard: Heard) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.ensure_future(call(RequestMiddleware(app, template)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert (heard.only.status, heard.only.outcome) == (0, "lost")
