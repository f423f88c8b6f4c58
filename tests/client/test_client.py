"""The client against scripted servers."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from whimbrel import AsyncClient, Client, errors
from whimbrel.client import client_verbs
from whimbrel.client.base import DEFAULT_URL
from whimbrel.client.endpoints import Endpoints
from whimbrel.client.task import Task

ROW = base64.b64encode(np.ones(3, np.float32).tobytes()).decode()
Answer = tuple[int, dict[str, str], bytes]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Callable[[str, bytes], Answer]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status, headers, answer = type(self).script(self.path, body)
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(answer))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None: ...


class Scripted(http.server.ThreadingHTTPServer):
    """Server whose responses come from a script, (path, body) -> response."""

    request_queue_size = 100  # else connections at the same time wait for a second

    def __init__(self) -> None:
        self.handler = type("Script", (Handler,), {})
        super().__init__(("127.0.0.1", 0), self.handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that left."""

    def says(self, script: Callable[[str, bytes], Answer]) -> None:
        self.handler.script = staticmethod(script)

    def answers(self, *answers: Answer) -> list[float]:
        """Answer with the responses in turn, then with the last one. Returns the times of the requests."""
        times: list[float] = []

        def script(path: str, body: bytes) -> Answer:
            times.append(time.monotonic())
            return answers[min(len(times), len(answers)) - 1]

        self.says(script)
        return times


@pytest.fixture
def servers() -> Iterator[list[Scripted]]:
    with Scripted() as first, Scripted() as second:
        yield [first, second]
        first.shutdown()
        second.shutdown()


@pytest.fixture
def server(servers: list[Scripted]) -> Scripted:
    return servers[0]


def rows(*indexes: int, row: str = ROW) -> bytes:
    return json.dumps({"data": [{"index": i, "embedding": row} for i in indexes]}).encode()


def numbered(path: str, body: bytes) -> Answer:
    """Answer in the native dialect. The vector of a text that is a number is that number."""
    vectors = np.array([[float(text)] for text in json.loads(body)["input"]], np.float32)
    return 200, about(shape=list(vectors.shape), end=vectors.nbytes), vectors.tobytes()


def about(**changes: Any) -> dict[str, str]:
    """Return the metadata header of one array."""
    block = {"name": "dense", "dtype": "float32", "endianness": "little", "start": 0} | changes
    return {"metadata": json.dumps({"arrays": [block]})}


@pytest.mark.parametrize("verb", [client_verbs.score, client_verbs.rerank, client_verbs.explain])
def test_an_adapter_is_asked_of_pairs_too(verb: Callable[..., Task[Any]]) -> None:
    task = verb(client_verbs.Target("whimbrel", None), "a", ["b"], adapter="law")
    assert json.loads(task.write(task.items))["adapter"] == "law"


def test_rows_come_in_the_order_of_the_texts(server: Scripted) -> None:
    server.answers((200, {}, rows(1, 0)))
    with Client(server.url, dialect="openai") as client:
        assert client.embed(["a", "b"]).shape == (2, 3)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"<html>", b'{"data": []}', rows(0), rows(0, 0), rows(5, 9), rows(0, 1, 2), rows(0, 1, row=""), rows(0, 1, row="AA"),
     rows(0, 1)[:-3], b'{"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}]}'],
)  # fmt: skip
@pytest.mark.parametrize("dialect", ["openai", "whimbrel"])
def test_answers_that_do_not_fit_are_errors(body: bytes, dialect: Any, server: Scripted) -> None:
    server.answers((200, {}, body))
    with Client(server.url, dialect=dialect) as client, pytest.raises(errors.WhimbrelError, match="cannot be read"):
        client.embed(["a", "b"])


LATE = [
    {"name": "multi_vector.offsets", "dtype": "int64", "endianness": "little", "shape": [3], "start": 0, "end": 24},
    {"name": "multi_vector.rows", "dtype": "float32", "endianness": "little", "shape": [2, 3], "start": 24, "end": 48},
]


@pytest.mark.parametrize(
    "headers",
    [{}, {"metadata": ""}, {"metadata": "{}"}, about(shape=[2, 3]), about(shape=[2, 3], end=20), about(shape=[2, 3], end=28), about(shape=[3, 2], end=24),
     about(shape=[2, -1], end=24), about(shape=[2, 3], end=24, start=4), about(shape=[2, 3], start=-24, end=0), about(shape=[2, 3], end=24, dtype="complex64"),
     about(shape=[2, 3], start=1000, end=1024)],
)  # fmt: skip
def test_bytes_that_do_not_fit_are_errors(headers: dict[str, str], server: Scripted) -> None:
    body = np.ones((2, 3), np.float32).tobytes()
    server.answers((200, about(shape=[2, 3], end=24), body))
    with Client(server.url) as client:
        vectors = client.embed(["a", "b"])
        assert vectors.tolist() == [[1, 1, 1]] * 2
        assert vectors.base is not None  # a view of the response's bytes
        for answer in ((200, headers, body), (200, about(shape=[2, 3], end=24), body[:-1])):
            server.answers(answer)
            with pytest.raises(errors.WhimbrelError, match="cannot be read"):
                client.embed(["a", "b"])


@pytest.mark.parametrize("offsets", [[0, 1, 3], [0, 2, 1], [1, 1, 2], [0, -1, 2]])
def test_offsets_that_do_not_fit_are_errors(offsets: list[int], server: Scripted) -> None:
    rows = np.ones((2, 3), np.float32).tobytes()
    headers = {"metadata": json.dumps({"arrays": LATE})}
    with Client(server.url) as client:
        server.answers((200, headers, np.array([0, 1, 2]).tobytes() + rows))
        assert [len(each) for each in client.multi_vector(["a", "b"])] == [1, 1]
        server.answers((200, headers, np.array(offsets).tobytes() + rows))
        with pytest.raises(errors.WhimbrelError, match="cannot be read"):
            client.multi_vector(["a", "b"])


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind"),
    [
        (429, {"retry-after": "7"}, b"<html>", errors.Overloaded),
        (429, {"retry-after": "soon"}, b"{}", errors.Overloaded),
        (429, {"retry-after": "-3"}, b'{"error": {"message": "busy"}}', errors.Overloaded),
        (503, {}, b"<html>", errors.Unavailable),
        (502, {}, b"", errors.Unavailable),
        (401, {}, b'{"error": {"message": "no", "type": "x", "code": "invalid_api_key"}}', errors.Unauthorized),
        (401, {}, b'{"error": "no"}', errors.Unauthorized),
        (404, {}, b'{"error": {"message": "no", "code": "model_not_found"}}', errors.ModelNotFound),
        (404, {}, b'{"detail": "Not Found"}', errors.NotFound),
        (400, {}, b'{"error": {"message": "no", "code": 400}}', errors.InvalidRequest),
        (422, {}, b'{"detail": [{"loc": ["body"], "msg": "no"}]}', errors.InvalidRequest),
        (400, {}, b'{"error": {"message": "input: too long", "code": "context_length_exceeded"}}', errors.TooLong),
        (500, {}, b"oops", errors.WhimbrelError),
        (500, {}, b'{"error": {"message": "NaN", "code": "non_finite"}}', errors.NonFinite),
        (200, {"content-encoding": "gzip"}, b"no gzip", errors.Unavailable),
    ],
)  # fmt: skip
def test_errors_are_whimbrel_s(
    status: int, headers: dict[str, str], body: bytes, kind: type[errors.WhimbrelError], server: Scripted
) -> None:
    server.answers((status, headers, body))
    with Client(server.url, max_retries=0) as client, pytest.raises(kind) as caught:
        client.embed("a")
    if isinstance(caught.value, errors.Overloaded):
        assert caught.value.retry_after == (7 if headers["retry-after"] == "7" else 1)


@pytest.mark.parametrize("texts", [None, 5, b"abc", ["a", 3], ["\ud800"], {"a": 1}])
@pytest.mark.parametrize("dialect", ["openai", "whimbrel", "tei", "cohere"])
def test_what_is_no_text_is_not_sent(texts: Any, dialect: Any, server: Scripted) -> None:
    with Client(server.url, dialect=dialect) as client, pytest.raises(errors.InvalidRequest):
        client.embed(texts)


def test_a_closed_client(server: Scripted) -> None:
    client = Client(server.url)
    client.close()
    for texts in ("a", ["a"] * 1000):
        with pytest.raises(errors.Unavailable, match="is closed"):
            client.embed(texts)


@pytest.mark.parametrize("kind", ["whimbrel", "openai", "tei", "cohere"])
def test_the_model_is_named_in_every_dialect(kind: Any, server: Scripted) -> None:
    """Whimbrel's own /embed takes it too; TEI has one model, and ignores it."""
    bodies: list[Any] = []
    server.says(lambda path, body: bodies.append(json.loads(body)) or (400, {}, b""))
    for model in ("m", None):
        with Client(server.url, dialect=kind, model=model) as client:
            for ask in (client.embed, lambda texts: client.rerank("q", texts)):
                with pytest.raises(errors.InvalidRequest):
                    ask(["a"])  # pyright: ignore
    names = [body.get("model") for body in bodies]
    assert names == (["m", None] if kind == "openai" else ["m", "m", None, None])


@pytest.mark.parametrize("kind", ["whimbrel", "openai", "tei", "cohere"])
def test_other_dialects_say_what_they_cannot(kind: Any, server: Scripted) -> None:
    with Client(server.url, dialect=kind) as client:
        if kind != "whimbrel":
            for verb in (client.classify, client.token_classify):
                with pytest.raises(errors.InvalidRequest, match=f"the dialect {kind} has no"):
                    verb(["a"])
            with pytest.raises(errors.InvalidRequest, match="has no such option"):
                client.embed(["a"], split_long=True)
        if kind in ("openai", "cohere"):
            with pytest.raises(errors.InvalidRequest, match=r"^normalize: .*has no such option"):
                client.embed(["a"], normalize=False)
        if kind == "tei":
            with pytest.raises(errors.InvalidRequest, match=r"^normalize: .*has no such option"):
                client.multi_vector(["a"], normalize=False)
        with pytest.raises(errors.InvalidRequest, match="is no option of this verb"):
            client.embed(["a"], dimension=3)  # pyright: ignore
        if kind in ("openai", "cohere"):
            with pytest.raises(errors.InvalidRequest, match=f"the dialect {kind} has no 'sparse'"):
                client.sparse(["a"])
    with pytest.raises(errors.InvalidRequest, match="it takes whimbrel, openai, tei, cohere"):
        Client(dialect="grpc")  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "says"),
    [({"base_url": "localhost:8000"}, "base_url"), ({"base_url": []}, "base_url"), ({"timeout": -1}, "timeout"), ({"timeout": "5"}, "timeout"),
     ({"max_in_flight": 0}, "max_in_flight"), ({"max_items": 0}, "max_items"), ({"max_retries": -1}, "max_retries"),
     ({"timeout": float("nan")}, "timeout")],
)  # fmt: skip
def test_settings_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"^{says}: "):
        Client(**options)


# Long lists


def test_a_long_list_goes_in_several_requests(server: Scripted) -> None:
    sizes: list[int] = []
    running, most, lock = 0, 0, threading.Lock()

    def script(path: str, body: bytes) -> Answer:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            sizes.append(len(json.loads(body)["input"]))
        time.sleep(0.1)
        with lock:
            running -= 1
        return numbered(path, body)

    server.says(script)
    texts = [str(number) for number in range(1005)]
    with Client(server.url, max_items=100, max_in_flight=3) as client:
        vectors = client.embed(texts)
        assert np.array_equal(vectors[:, 0], np.arange(1005))
        assert sorted(sizes) == [5] + [100] * 10
        assert most == 3
        sizes.clear()
        client.embed(["1" + " " * 150_000, "2" + " " * 150_000, "3"])
        assert sorted(sizes) == [1, 2]

    async def same() -> None:
        async with AsyncClient(server.url, max_items=100, max_in_flight=3) as client:
            assert np.array_equal(await client.embed(texts), vectors)

    most = 0
    asyncio.run(same())
    assert most == 3


def test_what_is_too_large_for_the_server_is_halved(server: Scripted) -> None:
    def script(path: str, body: bytes) -> Answer:
        count = len(json.loads(body)["input"])
        return (413, {}, b'{"error": {"message": "too many"}}') if count > 3 else numbered(path, body)

    server.says(script)
    with Client(server.url) as client:
        assert np.array_equal(client.embed([str(i) for i in range(20)])[:, 0], np.arange(20))
        server.answers((413, {}, b""))
        with pytest.raises(errors.TooLarge):
            client.embed(["1", "2"])
        with pytest.raises(errors.TooLarge):
            client.embed(["1", "2"], late_chunking=True)


def test_parts_of_one_document_stay_together(server: Scripted) -> None:
    server.says(numbered)
    with Client(server.url, max_items=2) as client:
        assert len(client.embed(["1", "2", "3"], late_chunking=True)) == 3
        times = server.answers((400, {}, b"{}"))
        with pytest.raises(errors.InvalidRequest):
            client.embed(["1", "2", "3"], late_chunking=True)
        assert len(times) == 1


def test_errors_over_a_part_name_the_caller_s_text(server: Scripted) -> None:
    def script(path: str, body: bytes) -> Answer:
        texts = json.loads(body)["input"]
        if "bad" in texts:
            param = f"input[{texts.index('bad')}]"
            detail = {"message": f"{param}: it is bad", "param": param, "code": "invalid_value"}
            return 400, {}, json.dumps({"error": detail}).encode()
        return numbered(path, body)

    server.says(script)
    texts = ["1"] * 57 + ["bad"] + ["1"] * 20
    with Client(server.url, max_items=10) as client, pytest.raises(errors.InvalidRequest) as caught:
        client.embed(texts)
    assert caught.value.param == "input[57]"
    assert str(caught.value) == "input[57]: it is bad"


# Retries


def test_a_refusal_is_tried_again_when_the_server_says(server: Scripted) -> None:
    good = numbered("", b'{"input": ["1"]}')
    times = server.answers((429, {"retry-after": "1"}, b""), (503, {}, b""), good)
    with Client(server.url) as client:
        assert client.embed("1").tolist() == [1]
    assert len(times) == 3
    assert 0.9 < times[1] - times[0] < 3


@pytest.mark.parametrize(
    ("answer", "tries"),
    [((500, {"x-should-retry": "false"}, b""), 1), ((400, {}, b""), 1), ((500, {}, b""), 2), ((504, {}, b'{"error": {"code": "deadline_exceeded"}}'), 1),
     ((429, {"retry-after": "3600"}, b""), 1), ((409, {"x-should-retry": "true"}, b""), 2), ((507, {}, b""), 1)],
)  # fmt: skip
def test_what_is_tried_again(answer: Answer, tries: int, server: Scripted) -> None:
    times = server.answers(answer)
    with Client(server.url, max_retries=1) as client, pytest.raises(errors.WhimbrelError):
        client.embed("1")
    assert len(times) == tries


def test_another_server_is_asked_at_once(servers: list[Scripted]) -> None:
    first, second = servers
    second.says(numbered)
    for bad in ((503, {"retry-after": "30"}, b""), (429, {"retry-after": "30"}, b"")):
        times = first.answers(bad)
        started = time.monotonic()
        with Client([first.url, second.url]) as client:
            for _ in range(3):
                assert client.embed("1").tolist() == [1]
        assert len(times) == 1
        assert time.monotonic() - started < 5
    with Client(["http://127.0.0.1:1", second.url]) as client:
        assert client.embed("1").tolist() == [1]


def test_the_least_busy_server_is_asked() -> None:
    now = 0.0
    servers = Endpoints(["http://a", "http://b/"], lambda: now)
    with servers.acquire() as first, servers.acquire() as second, servers.acquire() as third:
        assert [first, second, third] == ["http://a", "http://b", "http://a"]
    assert servers.mark_failed("http://a", 1)
    with servers.acquire() as url:
        assert url == "http://b"
    assert not servers.mark_failed("http://b", 20)
    with servers.acquire() as url:
        assert url == "http://a"  # the one with the shortest cooldown
    now = 6.0
    assert servers.mark_failed("http://b", 0)
    servers.mark_up("http://b")
    with servers.acquire() as first, servers.acquire() as second:
        assert [first, second] == ["http://a", "http://b"]


def test_a_server_that_does_not_answer_in_time(server: Scripted) -> None:
    server.says(lambda path, body: time.sleep(0.5) or numbered(path, body))
    with Client(server.url, timeout=0.1, max_retries=0) as client, pytest.raises(errors.Unavailable, match="no answer from"):
        client.embed("1")


def test_the_bar_goes_to_stderr(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    server.says(numbered)
    with Client(server.url, max_items=2, progress=True) as client:
        client.embed(["1"] * 5)
    told = capsys.readouterr()
    assert "5/5" in told.err
    assert told.out == ""
    with Client(server.url, max_items=2) as client:
        client.embed(["1"] * 5)
    assert capsys.readouterr().err == ""


def test_cancelling_leaves_nothing_behind(server: Scripted) -> None:
    server.says(lambda path, body: time.sleep(0.05) or numbered(path, body))

    async def leave() -> int:
        async with AsyncClient(server.url, max_items=1, max_in_flight=2) as client:
            task = asyncio.ensure_future(client.embed(["1"] * 50))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0)
            return len(asyncio.all_tasks())

    assert asyncio.run(leave()) == 1


@pytest.mark.parametrize(("urls", "secure"), [("http://a", False), ("HTTPS://a", True), (["http://a", "https://b"], True)])
def test_certificates_are_checked_wherever_there_are_any(urls: Any, secure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("httpx2.Client", lambda **options: seen.append(options["verify"]))
    Client(urls)
    assert seen == [secure]


def test_the_default_is_this_machine() -> None:
    assert DEFAULT_URL == "http://127.0.0.1:8000"


def test_a_retry_says_how_long_the_caller_has_waited(server: Scripted) -> None:
    """So that it keeps its place in the queue."""
    told: list[tuple[str | None, str | None]] = []

    class Telling(Handler):
        def do_POST(self) -> None:
            told.append((self.headers["x-stainless-retry-count"], self.headers["x-stainless-read-timeout"]))
            super().do_POST()

    server.RequestHandlerClass = server.handler = type("Script", (Telling,), {})
    refused: Answer = (429, {"retry-after": "0"}, b"{}")
    server.answers(refused, refused, (200, {}, b"{"))
    with Client(server.url, timeout=90) as client, pytest.raises(errors.WhimbrelError):
        client.embed("a")
    assert told == [(None, None), ("1", "90"), ("2", "90")]
