"""The load generator against real sockets: what it counts, and what a server cannot hide from it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from bench_servers import OK, always, answer, fake_server
from whimbrel.errors import SetupError, WhimbrelError
from whimbrel_bench.answers import ROW_MARK
from whimbrel_bench.backends import Sample
from whimbrel_bench.connection import Connection
from whimbrel_bench.load import Driver, Job, Report
from whimbrel_bench.results import Result
from whimbrel_bench.target import Load, Target, TargetOptions

INF = float("inf")


def run(url: str, count: int, load: Load, **options: object) -> Result:
    """Load a server with `count` requests of one text."""
    target = Target(url, TargetOptions(**options))  # pyright: ignore[reportArgumentType]
    target.connect()
    return target.run([Sample((f"text {i}",)) for i in range(count)], load)


@pytest.mark.parametrize("processes", [1, 3])
def test_every_request_is_sent_once_and_counted(processes: int) -> None:
    with fake_server(always(answer())) as fake:
        result = run(fake.url, 50, Load(concurrency=6, processes=processes))
    assert sorted(body["input"] for body in fake.bodies) == sorted(f"text {i}" for i in range(50))
    assert (result.completed, result.failed, result.total_input, result.total_input_sequences) == (50, 0, 350, 50)
    assert fake.most_running <= 6
    assert fake.connections <= 6 + 1 + processes  # they are used again; one asked for the model
    assert result.client.processes == processes
    assert result.counted_by == "server"
    assert {body["model"] for body in fake.bodies} == {"fake"}


def test_concurrency_is_reached_and_not_exceeded() -> None:
    with fake_server(always(answer(), 0.05)) as fake:
        result = run(fake.url, 30, Load(concurrency=5))
    assert fake.most_running == 5
    assert result.duration >= 30 / 5 * 0.05
    with fake_server(always(answer(), 1.5)) as fake:
        run(fake.url, 30, Load())
    assert fake.most_running == 30, "without a limit all are sent at once"


def test_an_open_loop_sends_at_its_rate_whatever_the_server_does() -> None:
    with fake_server(always(answer(), 0.2)) as fake:
        result = run(fake.url, 40, Load(rate=80.0))
    assert result.completed == 40
    assert 0.5 <= result.duration < 6.0  # 40 / 80 s, then the last answer; a closed loop of one would take 8 s
    assert fake.most_running > 5


def test_a_stall_shows_in_the_open_loop_and_a_closed_loop_hides_it() -> None:
    """The server stops for 0.6 s once. All requests that were due meanwhile have waited, and only the open loop says so."""

    def stalling() -> object:
        gate = threading.Lock()

        def respond(number: int, connection: socket.socket) -> bytes:
            with gate:  # one at a time
                time.sleep(0.6 if number == 50 else 0.0005)
            return answer()

        return respond

    with fake_server(stalling()) as fake:  # pyright: ignore[reportArgumentType]
        closed = run(fake.url, 200, Load(concurrency=1))
    with fake_server(stalling()) as fake:  # pyright: ignore[reportArgumentType]
        opened = run(fake.url, 200, Load(rate=100.0))
    with fake_server(stalling()) as fake:  # pyright: ignore[reportArgumentType]
        limited = run(fake.url, 200, Load(rate=100.0, concurrency=1))
    assert np.percentile(closed.latencies, 98) < np.percentile(opened.latencies, 90)
    assert np.percentile(opened.latencies, 90) > 0.3
    assert np.percentile(limited.latencies, 90) > 0.3, "the wait for a place in the client counts"
    assert max(limited.queue_times) > 0.3


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (answer(500, b'{"error": "it broke"}'), 'HTTP 500: {"error": "it broke"}'),
        (answer(503, b"busy"), "HTTP 503: busy"),
        (None, "the server closed the connection before an answer"),
        (answer(200, b'{"data": [') + b"", "HTTP 200 with a body that is no JSON"),
        (b"SMTP ready\r\n", "the answer is not HTTP/1.1"),
    ],
    ids=["500", "503", "closed", "half a body", "other protocol"],
)
def test_failures_are_counted_and_explained(response: bytes | None, reason: str) -> None:
    def respond(number: int, connection: socket.socket) -> bytes | None:
        return response if number % 2 else answer()

    with fake_server(respond) as fake:
        result = run(fake.url, 20, Load(concurrency=1))
    assert result.completed + result.failed == 20
    assert result.failed >= 5
    assert all(each.startswith(reason) for each in result.errors if each)
    assert result.latencies.size == result.completed
    assert result.total_input == 7 * result.completed


def test_a_connection_that_is_cut_in_the_middle_of_an_answer() -> None:
    def respond(number: int, connection: socket.socket) -> None:
        connection.sendall(answer()[:-10])

    with fake_server(respond) as fake:  # pyright: ignore[reportArgumentType]
        result = run(fake.url, 5, Load(concurrency=2))
    assert set(result.errors) == {"the server closed the connection in the middle of the answer"}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (
            html := b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 4\r\n\r\n<p/>",
            "HTTP 200 with text/html, where",
        ),
        (answer(200, b'{"data": [garbage}'), "HTTP 200 with a body that is no JSON"),
        (answer(200, b"<" + b"x" * 3000 + b"}"), "HTTP 200 with a body that is no JSON"),
        (answer(200, b'{"error": "no"}'), "HTTP 200 with 0 rows for 1 text"),
        (answer(200, json.dumps(OK | {"data": OK["data"] * 3}).encode()), "HTTP 200 with 3 rows for 1 text"),
        (answer(500, b"\x1b[2J\x00\xff"), "HTTP 500: \ufffd[2J\ufffd\ufffd"),
    ],
    ids=["HTML", "garbage", "long garbage", "an error", "other number", "signs for terminals"],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_answers_unlike_the_first_have_failed(response: bytes, reason: str, processes: int) -> None:
    def respond(number: int, connection: socket.socket) -> bytes:
        return response if number % 2 else answer()

    with fake_server(respond) as fake:
        target = Target(fake.url, TargetOptions())
        samples = [Sample((f"text {i}",)) for i in range(8)]
        target.warm_up(samples, Load())
        result = target.run(samples, Load(concurrency=2, processes=processes))
    assert (result.completed, result.failed) == (4, 4)
    assert {each.startswith(reason) for each in result.errors if each} == {True}


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (html, "the first answer is text/html: <p/>"),
        (answer(200, b""), "the first answer is no JSON .*: an empty body"),
        (answer(200, b'{"data": [garbage}'), "the first answer is no JSON"),
        (answer(200, b'{"embeddings": [[1.0]]}'), "has no vectors or scores: "),
        (answer(200, b"[[1.0]]"), "has no vectors or scores: "),
        (answer(200, b'{"data": []}'), "has 0 rows for 2 texts"),
    ],
    ids=["HTML", "empty", "garbage", "Ollama", "TEI", "other number"],
)
def test_a_first_answer_that_is_none_ends_the_run(response: bytes, words: str) -> None:
    with fake_server(always(response)) as fake, pytest.raises(SetupError, match=words) as error:
        Target(fake.url, TargetOptions()).warm_up([Sample(("a", "b"))], Load())
    assert "--backend" in (error.value.hint or "")


def test_a_reranker_may_cut_its_answer() -> None:
    body = b'{"results": [{"index": 1, "relevance_score": 0.5}]}'
    with fake_server(always(answer(200, body))) as fake:
        sample = Sample(("a", "b"), "q")
        with pytest.raises(SetupError, match="has 1 row for 2 texts"):
            Target(fake.url, TargetOptions(backend="rerank")).warm_up([sample], Load())
        target = Target(fake.url, TargetOptions(backend="rerank", extra_body={"top_n": 1}))
        target.warm_up([sample], Load())
        assert target.run([sample] * 3, Load(concurrency=1)).completed == 3


def test_rows_are_counted_across_pieces_of_a_body() -> None:
    """A mark that is cut in two counts once, and so does one within a text."""
    rows = b'{"index": 0, "text": "\\"index\\": 7"}, {"index": 1}, {"index": 2}'
    body = b'{"data": [' + rows + b"]}"
    for size in (1, 2, 3, 7, 8, 50, 1000):
        connection = Connection(row_mark=ROW_MARK)
        for start in range(0, len(body), size):
            connection.on_body(body[start : start + size])
        assert connection._answer.num_rows == 3  # pyright: ignore[reportPrivateUsage]


def test_a_server_that_never_answers_is_given_up() -> None:
    with fake_server(always(answer(), 5.0)) as fake:
        result = run(fake.url, 4, Load(concurrency=4), timeout=0.5)
    assert result.failed == 4
    assert set(result.errors) == {"no answer within 0.5 s"}
    assert result.duration < 4.9  # the server's answer would come then


def test_a_server_that_dies_during_the_run() -> None:
    with fake_server(always(answer())) as fake:
        target = Target(fake.url, TargetOptions())
        target.connect()
    result = target.run([Sample(("a",))] * 10, Load(concurrency=2))
    assert result.completed == 0
    assert result.failed == 10
    assert all("refused" in reason for reason in result.errors)
    assert result.milliseconds()["p99_e2el_ms"] == 0.0


def test_an_idle_connection_that_the_server_closed_is_no_failure() -> None:
    """Servers close idle connections. The client's next request goes on a new one, as those of HTTP libraries."""
    with fake_server(always(answer(200, b"{}", "connection: close"))) as fake:
        assert run(fake.url, 10, Load(concurrency=1)).failed == 0
    assert fake.connections >= 10

    def respond(number: int, connection: socket.socket) -> bytes | None:
        return None if number == 1 else answer()  # the second request meets a connection that is closed just then

    with fake_server(respond) as fake:
        result = run(fake.url, 3, Load(rate=0.7, burstiness=INF))
    assert (result.completed, result.failed, result.num_resent) == (3, 0, 1)
    with fake_server(respond) as fake:
        result = run(fake.url, 3, Load(concurrency=1))
    assert (result.completed, result.failed, result.num_resent) == (2, 1, 0), "a connection in use is another matter"


def test_bodies_without_a_length_and_in_chunks() -> None:
    body = b'{"usage": {"prompt_tokens": 3}, "data": []}'
    chunked = answer(200, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), "transfer-encoding: chunked", length=False)
    with fake_server(always(chunked)) as fake:
        assert run(fake.url, 6, Load(concurrency=2)).total_input == 18
    with fake_server(always(answer(200, body, "connection: close", length=False))) as fake:
        assert run(fake.url, 6, Load(concurrency=2)).total_input == 18


def test_usage_is_found_at_either_end_and_in_headers() -> None:
    far = b'{"data": [' + b"0, " * 5000 + b'0], "usage": {"prompt_tokens": 11}}'
    text = b'{"usage": {"prompt_tokens": 5}, "results": [{"text": "\\"prompt_tokens\\": 99"}]}'
    for response, backend, tokens in (
        (answer(200, far), "openai-embeddings", 11),
        (answer(200, text), "rerank", 5),
        (answer(200, b"[[1.0]]", "x-compute-tokens: 13"), "tei", 13),
        (answer(200, b'{"embeddings": [], "prompt_eval_count": 17}'), "ollama", 17),
        (answer(200, b"{}", "x-whimbrel-tokens: 19"), "pooling", 19),
    ):
        with fake_server(always(response)) as fake:
            target = Target(fake.url, TargetOptions(backend=backend))
            sample = Sample(("a",), "q" if backend == "rerank" else None)
            assert target.run([sample] * 2, Load(concurrency=1)).total_input == 2 * tokens


def test_without_usage_the_client_counts_and_says_so() -> None:
    with fake_server(always(answer(200, b"{}"))) as fake:
        target = Target(fake.url, TargetOptions())
        result = target.run([Sample(("a", "b"), num_tokens=21)] * 2, Load(concurrency=1))
    assert (result.total_input, result.counted_by, result.total_input_sequences) == (42, "client", 4)


def test_new_connections_and_durations() -> None:
    with fake_server(always(answer())) as fake:
        result = run(fake.url, 6, Load(concurrency=2, new_connections=True))
    assert result.failed == 0
    assert fake.connections >= 6
    with fake_server(always(answer(), 0.02)) as fake:
        result = run(fake.url, 2, Load(concurrency=2, duration=0.5))
    assert 2 < result.completed <= 60, "the requests are repeated until the time is over"


def test_answers_are_kept_and_must_stay_the_same() -> None:
    """A benchmark compares the first answer to each request with the engine's, and needs no others."""

    def respond(number: int, connection: socket.socket) -> bytes:
        vector = [1.0, float(number >= 6)]
        return answer(200, json.dumps({"id": number} | OK | {"data": [{"index": 0, "embedding": vector}]}).encode())

    samples = [Sample(("a",)), Sample(("b",))]
    with fake_server(respond) as fake:
        target = Target(fake.url, TargetOptions())
        kept = target.run(samples, Load(concurrency=2, keep_bodies=True, processes=2))
        assert {index: [row.tolist() for row in rows] for index, rows in target.rows(kept).items()} == {
            0: [[1.0, 0.0]], 1: [[1.0, 0.0]],
        }  # fmt: skip
        changed = target.run(samples, Load(concurrency=1, keep_bodies=True, duration=0.3, processes=1))
        with pytest.raises(SetupError, match="answers request 0 differently"):
            target.rows(changed)
        same = target.run(samples, Load(concurrency=1, keep_bodies=True, duration=0.2, processes=1))
        assert set(target.rows(same)) == {0, 1}, "another id is the same answer"
        assert target.rows(target.run(samples, Load(concurrency=1))) == {}


class Wire(asyncio.Transport):
    """A transport whose server answers at once, and in the same moment accepts the connections that wait."""

    def __init__(self, connection: Connection, accepted: asyncio.Event) -> None:
        super().__init__()
        self.connection = connection
        self.accepted = accepted

    def write(self, data: bytes | bytearray | memoryview) -> None:
        asyncio.get_running_loop().call_soon(self.answer)

    def answer(self) -> None:
        self.accepted.set()
        self.connection.data_received(answer())

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


def test_an_answer_just_before_a_new_connection_takes_no_room_from_the_next_request() -> None:
    """The closed loop sends another request when the connection is made, but the task that made it has not ended."""

    async def main() -> Report:
        accepted = asyncio.Event()
        made: list[Connection] = []

        async def create_connection(make: Callable[[], Connection], *_: object, **__: object) -> tuple[None, Connection]:
            made.append(connection := make())
            connection.connection_made(Wire(connection, accepted))
            if len(made) == 2:
                await accepted.wait()
            return None, connection

        asyncio.get_running_loop().create_connection = create_connection  # pyright: ignore[reportAttributeAccessIssue]
        return await Driver(Job("", 0, [b"?"] * 3, concurrency=2, new_connections=True)).run(time.monotonic())

    assert [each.status for each in asyncio.run(asyncio.wait_for(main(), 5)).outcomes] == [200] * 3


def test_what_breaks_a_reader_of_answers_does_not_keep_the_run_from_its_end() -> None:
    """A request counts as ended after its answer was read, so a reader must raise nothing."""
    digits = "9" * 5000
    for number in (
        answer(200, b"{}", f"x-whimbrel-tokens: {digits}"),
        answer(200, b"{}", f'metadata: "prompt_tokens":{digits}'),
    ):
        with fake_server(always(number)) as fake:
            result = run(fake.url, 2, Load(concurrency=1))
        assert (result.completed, result.counted_by) == (2, "client")


def test_warm_ups_are_not_counted_and_must_succeed() -> None:
    with fake_server(always(answer())) as fake:
        target = Target(fake.url, TargetOptions())
        target.warm_up([Sample(("a",))], Load(num_warmups=5))
        assert len(fake.bodies) == 6  # the first asks whether the server answers at all
    with fake_server(always(answer(404, b"no route"))) as fake, pytest.raises(SetupError, match="404: no route"):
        Target(fake.url, TargetOptions()).warm_up([Sample(("a",))], Load())

    def respond(number: int, connection: socket.socket) -> bytes:
        return answer(500 if number else 200)

    with fake_server(respond) as fake, pytest.raises(WhimbrelError, match="4 of 4 warm-up requests failed: HTTP 500"):
        Target(fake.url, TargetOptions()).warm_up([Sample(("a",))], Load(num_warmups=4))


def test_a_server_that_accepts_and_says_nothing_is_given_up_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(SetupError, match="cannot reach"):
        Target(f"http://127.0.0.1:{silent.getsockname()[1]}", TargetOptions(timeout=0.3)).connect()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoint": "/a b"}, "is no path"),
        ({"headers": {"a b": "c"}}, "no name of a header"),
        ({"headers": {"a": "b\r\nc: d"}}, "characters that HTTP does not take"),
        ({"api_key": "schl\xfcssel"}, "characters that HTTP does not take"),
    ],
    ids=str,
)
def test_what_no_request_can_carry_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(SetupError, match=words) as error:
        Target("http://127.0.0.1:9", TargetOptions(**options))  # pyright: ignore[reportArgumentType]
    assert "schl" not in error.value.message
    assert Target("http://127.0.0.1:9", TargetOptions(endpoint="v2/embed")).path == "/v2/embed"


def test_extra_body_and_headers() -> None:
    with fake_server(always(answer())) as fake:
        run(fake.url, 1, Load(), extra_body={"encoding_format": "base64", "truncate_prompt_tokens": None})
    assert fake.bodies == [{"model": OK["model"], "input": "text 0", "encoding_format": "base64"}]


def test_a_server_that_is_loading_is_waited_for() -> None:
    """Servers listen before their model is loaded, and say so at /health."""
    begin = time.monotonic()

    def health() -> bytes:
        return answer(503 if time.monotonic() - begin < 0.8 else 200, b"{}")

    with fake_server(always(answer()), health=health) as fake:
        with pytest.raises(SetupError, match=r"not ready yet \(503\)"):
            Target(fake.url, TargetOptions()).connect()
        Target(fake.url, TargetOptions(ready_seconds=30.0)).connect()
    assert time.monotonic() - begin >= 0.8


def test_a_duration_without_a_concurrency_is_refused() -> None:
    with pytest.raises(ValueError, match="a duration needs a concurrency"):
        Job("127.0.0.1", 1, [b""], duration=1.0)
