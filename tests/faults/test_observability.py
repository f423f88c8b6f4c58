"""H3, H4 and K of the catalogue: what a server tells of itself is complete, bounded, safe to read, and there in time."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import numpy as np
import orjson
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from asgi import call
from serving import Server
from texts import TEXTS
from waiting import wait_for
from whimbrel import Client, Engine
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import AsyncEmbedder, ModelRegistry
from whimbrel.telemetry import logs
from whimbrel.telemetry.logs import LogOptions

KEY = "s3cret-key-of-the-tests"
OTHER_KEY = "an0ther-key-of-nobody"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PATH = "/v1/embeddings"
GOLDEN = "A whimbrel is a wader."
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NUM_WORKERS = 2

Requests = dict[tuple[str, str, str], float]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two workers, a key, and a line in the log per request."""
    with Server("--workers", str(NUM_WORKERS), "--access-log", "--log-format", "json", WHIMBREL_API_KEY=KEY) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


@pytest.fixture
def client(server: Server, engine: Engine) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client
        assert wait_for(lambda: client.get("/health/ready").status_code == 200)
        with Client(server.url, api_key=KEY) as whimbrel:
            assert np.array_equal(whimbrel.embed(GOLDEN), engine.embed(GOLDEN))


def post(client: httpx2.Client, body: Any, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    return client.post(PATH, content=content, headers={"content-type": "application/json", **headers})


def page(client: httpx2.Client, accept: str = "") -> str:
    answer = client.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    return answer.text


def requests_of(client: httpx2.Client) -> tuple[Counter[str], Counter[str], Counter[tuple[str, str, str]]]:
    """Return counts of requests: received and in flight by route; ended by route, outcome and status."""
    received, in_flight, ended = Counter[str](), Counter[str](), Counter[tuple[str, str, str]]()
    for family in parse_text(page(client)):
        for sample in family.samples:
            labels, number = sample.labels, int(sample.value)
            if sample.name == "whimbrel_requests_received_total":
                received[labels["route"]] += number
            elif sample.name == "whimbrel_requests_in_flight":
                in_flight[labels["route"]] += number
            elif sample.name == "whimbrel_requests_total":
                ended[labels["route"], labels["outcome"], labels["status"]] += number
    return received, in_flight, ended


def value(client: httpx2.Client, name: str) -> float:
    return sum(sample.value for family in parse_text(page(client)) for sample in family.samples if sample.name == name)


def settled(client: httpx2.Client) -> bool:
    """True if nothing but the question itself is in flight."""
    return +requests_of(client)[1] == {"/metrics": 1}


def lines_of(server: Server) -> list[dict[str, Any]]:
    """The log since the server was ready."""
    return [json.loads(line) for line in server.log.split("\n{", 1)[-1].join(["{", ""]).splitlines()]


def line_of(server: Server, request_id: str) -> dict[str, Any]:
    assert wait_for(lambda: request_id in server.log)
    return next(line for line in lines_of(server) if line.get("request_id") == request_id)


def raw(server: Server, request: bytes, *, read: bool = True) -> bytes:
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=30)) as connection:
        connection.sendall(request)
        return connection.recv(65536) if read else b""


def head(method: str = "POST", path: str = PATH, length: int | None = 0, **headers: str) -> bytes:
    named = {"Host": "127.0.0.1", "Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    if length is not None:
        named["Content-Length"] = str(length)
    return "\r\n".join([f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in named.items()), "", ""]).encode(
        "latin-1"
    )


# K3


def test_K3_every_request_ends_in_exactly_one_outcome(server: Server, client: httpx2.Client) -> None:
    """Good, bad, refused and leaving clients at once, on both workers."""
    assert wait_for(lambda: settled(client))
    received, _, ended = requests_of(client)
    long = orjson.dumps({"input": [text * 3 for text in TEXTS[20:400]]})
    sent, expected = Counter[str](), Counter[tuple[str, str, str]]()
    kinds: list[tuple[tuple[str, str, str], Any]] = [
        ((PATH, "ok", "200"), lambda c: post(c, {"input": TEXTS[:5]})),
        ((PATH, "invalid", "400"), lambda c: post(c, b"{")),
        ((PATH, "invalid", "413"), lambda c: post(c, {"input": ["a"] * 2049})),
        ((PATH, "invalid", "415"), lambda c: post(c, {"input": "a"}, **{"content-type": "text/plain"})),
        ((PATH, "invalid", "405"), lambda c: c.put(PATH)),
        ((PATH, "not_found", "404"), lambda c: post(c, {"input": "a", "model": "x"})),
        ((PATH, "unauthorized", "401"), lambda c: post(c, {"input": "a"}, authorization="Bearer no")),
        ((PATH, "timeout", "504"), lambda c: post(c, {"input": "a"}, **{"x-request-timeout": "0"})),
        ((PATH, "client_gone", "*"), lambda c: raw(server, head(length=len(long)) + long[:1000], read=False)),
        ((PATH, "client_gone", "*"), lambda c: raw(server, head(length=len(long)) + long, read=False)),
        (("other", "not_found", "404"), lambda c: c.get("/nope")),
        (("other", "unauthorized", "401"), lambda c: c.get("/nope", headers={"authorization": ""})),
        (("/health/live", "ok", "200"), lambda c: c.head("/health/live")),
        (("/info", "invalid", "405"), lambda c: c.request("QUERY", "/info")),
        (("/v1/models/{model}", "not_found", "404"), lambda c: c.get("/v1/models/x/y")),
        (("/docs", "ok", "200"), lambda c: c.get("/docs")),
    ]
    work = random.Random(1).sample([*kinds, *kinds], 2 * len(kinds))
    lock = threading.Lock()

    def run(mine: Any) -> None:
        for key, do in mine:
            with httpx2.Client(base_url=server.url, timeout=120, headers={"authorization": f"Bearer {KEY}"}) as own:
                do(own)
            with lock:
                sent[key[0]] += 1
                expected[key] += 1

    threads = [threading.Thread(target=run, args=[work[first::4]]) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(sent.values()) == len(work)
    assert wait_for(lambda: settled(client))

    received_now, in_flight, ended_now = requests_of(client)
    by_route = Counter[str]()
    for (route, _, _), number in ended_now.items():
        by_route[route] += number
    assert by_route + in_flight == received_now

    del received["/metrics"], received_now["/metrics"]
    assert received_now - received == sent
    fresh = Counter[tuple[str, str, str]]()
    for (route, outcome, status), number in (ended_now - ended).items():
        fresh[route, outcome, "*" if outcome == "client_gone" else status] += number
    del fresh["/metrics", "ok", "200"]
    assert fresh == expected


def test_K3_requests_of_a_killed_worker_are_lost_and_counted(server: Server, client: httpx2.Client) -> None:
    assert wait_for(lambda: settled(client))
    before, restarts = requests_of(client)[2], value(client, "whimbrel_worker_restarts_total")
    waiting = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    for connection in waiting:
        connection.sendall(head(length=100) + b"{")
    assert wait_for(lambda: requests_of(client)[1][PATH] == 8)
    killed = server.children("worker")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        with suppress(httpx2.HTTPError):
            return len(set(server.children("worker")) - set(killed)) == NUM_WORKERS and settled(client)
        return False

    assert wait_for(back)
    for connection in waiting:
        connection.close()
    wait_for(
        lambda: (requests_of(client)[2] - before)[PATH, "lost", "0"] == 8
    )  # each is counted by the next life of its worker
    received, in_flight, after = requests_of(client)
    lost = after - before
    assert lost[PATH, "lost", "0"] == 8
    by_route = Counter[str]()
    for (route, _, _), number in after.items():
        by_route[route] += number
    assert by_route + in_flight == received
    assert value(client, "whimbrel_worker_restarts_total") == restarts + NUM_WORKERS


def test_counters_go_on_when_an_engine_is_killed(server: Server, client: httpx2.Client) -> None:
    post(client, {"input": ["a", "b"]})
    before = value(client, "whimbrel_stage_seconds_count")
    restarts = value(client, "whimbrel_engine_restarts_total")
    (pid,) = server.children("engine")
    os.kill(pid, signal.SIGKILL)
    assert post(client, {"input": ["a", "b"]}).status_code == 200
    assert value(client, "whimbrel_stage_seconds_count") > before
    assert value(client, "whimbrel_engine_restarts_total") == restarts + 1
    assert wait_for(lambda: value(client, "whimbrel_engines_up") == 1)


# K2, K4


def series(client: httpx2.Client) -> set[str]:
    return {line.rsplit(" ", 1)[0] for line in page(client).splitlines() if not line.startswith("#")}


def some_requests(client: httpx2.Client, word: Any) -> None:
    """One of each kind that could make a series, with a word that the server has not seen."""
    post(client, {"input": "a", "model": word()})
    post(client, {"input": "a"}, **{"x-request-id": word(), "traceparent": word(), "user-agent": word()})
    post(client, {"input": "a"}, authorization=f"Bearer {word()}")
    client.get(f"/{word()}")
    client.get(f"/v1/models/{word()}/{word()}")
    client.get(f"{PATH}/{word()}?{word()}={word()}")
    client.request(word().upper(), PATH)
    client.request(word().upper(), f"/{word()}")


def test_K2_labels_stay_bounded(client: httpx2.Client) -> None:
    letters = random.Random(2)
    words: list[str] = []

    def word() -> str:
        words.append("".join(letters.choices("abcdefghijklmnop", k=12)))
        return words[-1]

    some_requests(client, word)
    page(client)
    before = series(client)
    for _ in range(40):
        some_requests(client, word)
    after = series(client)
    assert after == before
    assert len(words) > 400
    assert not any(each in line.lower() for each in words for line in after)


@pytest.mark.extended
def test_K4_metrics_are_valid_and_quick_under_load(server: Server, client: httpx2.Client) -> None:
    stop = threading.Event()

    def load() -> None:
        with httpx2.Client(base_url=server.url, timeout=120, headers={"authorization": f"Bearer {KEY}"}) as own:
            while not stop.is_set():
                post(own, {"input": TEXTS[20:300]})

    post(client, {"input": "a"})  # so that every metric has something to say
    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        milliseconds: list[float] = []
        for _ in range(20):
            answer = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
            assert answer.headers["content-type"].startswith("application/openmetrics-text")
            families = {family.name: family for family in parse_openmetrics(answer.text)}
            assert answer.text.endswith("# EOF\n")
            assert families["whimbrel_requests"].type == "counter"
            assert families["whimbrel_stage_seconds"].type == "histogram"
            milliseconds.append(float(answer.headers["server-timing"].split("total;dur=")[1]))
        assert {family.name for family in parse_text(page(client))} == set(families)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert min(milliseconds) < 50, milliseconds


# K6


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("GET", "/health/live", {}, 200), ("GET", "/metrics", {}, 200), ("GET", "/nope", {}, 404), ("PUT", PATH, {}, 405),
        ("GET", "/info", {"headers": {"authorization": "Bearer no"}}, 401), ("POST", PATH, {"content": b"x"}, 400),
        ("POST", PATH, {"json": {"input": []}}, 400), ("POST", PATH, {"json": {"input": "a"}}, 200),
        ("POST", PATH, {"json": {"input": ["a"] * 2049}}, 413),
    ],
)  # fmt: skip
def test_K6_every_answer_has_the_request_s_id(
    method: str, path: str, options: Any, status: int, server: Server, client: httpx2.Client
) -> None:
    for given, taken in ((f"{status}{path}-1.2:3+5=6_7", True), ("a b", False), ("x" * 129, False), (None, False)):
        headers = {**options.get("headers", {}), **({"x-request-id": given} if given else {})}
        answer = client.request(method, path, **{**options, "headers": headers})
        assert answer.status_code == status
        (request_id,) = answer.headers.get_list("x-request-id")
        assert request_id == given if taken else re.fullmatch("[0-9a-f]{32}", request_id)
        assert "total;dur=" in answer.headers["server-timing"]
        assert line_of(server, request_id)["status"] == status


def test_K6_traceparent_is_heeded_if_it_is_one(server: Server, client: httpx2.Client) -> None:
    for number, (given, taken) in enumerate(
        [(TRACEPARENT, True), ("00-x", False), (TRACEPARENT.replace("0af7", "0AF7"), False)]
    ):
        request_id = f"traceparent-{number}"
        assert post(client, {"input": "a"}, traceparent=given, **{"x-request-id": request_id}).status_code == 200
        assert line_of(server, request_id).get("trace_id") == (TRACEPARENT.split("-")[1] if taken else None)


def test_the_headers_say_what_an_answer_took(client: httpx2.Client) -> None:
    answer = post(client, {"input": ["a", "word " * 300], "truncate": True})
    parts = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert list(parts) == ["receive", "read", "tokenize", "queue", "compute", "write", "total"]
    one_after_another = [float(part) for name, part in parts.items() if name not in ("compute", "total")]
    assert 0 < sum(one_after_another) <= float(parts["total"]) + 1
    assert float(parts["compute"]) > 0
    assert (answer.headers["x-whimbrel-tokens"], answer.headers["x-whimbrel-truncated"]) == (str(3 + 256), "1")


# H3, H4


def test_H3_keys_are_nowhere(server: Server, client: httpx2.Client) -> None:
    """Right and wrong ones, in all the places where a client may put them by mistake."""
    answers = [
        client.get("/info"),
        client.get("/metrics"),
        client.get("/docs"),
        client.get("/openapi.json"),
        client.get("/info", headers={"authorization": f"Bearer {OTHER_KEY}"}),
        client.get("/info", headers={"authorization": KEY}),
        post(client, {"input": []}),
    ]
    for answer in answers:
        assert KEY not in answer.text + str(answer.headers)
        assert OTHER_KEY not in answer.text + str(answer.headers)
    for headers in ({"x-api-key": KEY}, {"x-request-id": KEY}, {"traceparent": KEY}, {"user-agent": KEY}, {"cookie": KEY}):
        post(client, {"input": "a"}, **headers)
    client.get(f"/nope/{KEY}?key={KEY}")
    post(client, {"input": "a", "model": KEY})
    raw(server, head("GET", "/info", Authorization=f"Basic {base64.b64encode(KEY.encode()).decode()}"))
    assert client.get("/nope", headers={"x-request-id": "the-last-one"}).status_code == 404
    assert wait_for(lambda: "the-last-one" in server.log)
    assert KEY not in server.log
    assert OTHER_KEY not in server.log
    assert "/nope/***" in server.log
    for pid in (server.process.pid, *server.children()):
        for name in ("cmdline", "comm"):
            assert KEY.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.extended
def test_a_log_that_nobody_reads_holds_up_nobody(leaves: bool) -> None:
    command = [sys.executable, "-m", "whimbrel", "serve", "--port", "0", "--access-log"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(re.findall(r"URL +(\S+)", line)[0] for line in process.stderr if "URL" in line)
        if leaves:
            process.stderr.close()
        with httpx2.Client(base_url=url, timeout=30) as client:
            assert wait_for(lambda: client.get("/health/ready").status_code == 200)
            for _ in range(1500):  # some 200 KiB of log
                assert client.get("/v1/models").status_code == 200
        process.terminate()
        assert process.wait(30) == 0


def test_H4_log_lines_cannot_be_forged(server: Server, client: httpx2.Client) -> None:
    forged = '{"time": "2026-01-01", "level": "info", "message": "forged"}'
    encoded = "%0d%0a" + forged.replace(" ", "%20").replace('"', "%22") + "%1b%5b31m%00%7f%c2%9b%e2%80%a8"
    raw(server, head("GET", f"/{encoded}"))
    raw(server, head("POST", f"{PATH}%0a{encoded}"))
    raw(server, head("GET", f"/v1/models/{encoded}"))
    raw(server, head("GET", "/nope", **{"X-Request-Id": f"a\x1b[31m{forged}"}))
    raw(server, head("GET", "/nope", traceparent=f"{TRACEPARENT}\x1b[31m"))
    post(client, {"input": "a", "model": f"\r\n{forged}\x1b"})
    assert client.get("/nope", headers={"x-request-id": "after-the-forgeries"}).status_code == 404
    assert wait_for(lambda: "after-the-forgeries" in server.log)
    log = server.log[server.log.index("\n{") + 1 :]
    assert all(character == "\n" or 32 <= ord(character) < 127 for character in log)
    lines = [json.loads(line) for line in log.splitlines()]
    assert not any(line["message"] == "forged" for line in lines)
    assert sum("forged" in line.get("path", "") for line in lines) >= 2


# K7


class Failing:
    """An embedder with a bug."""

    plan = SimpleNamespace(served_name="m", aliases=(), adapters={}, revision="", max_length=9, max_batch_tokens=512)
    card = SimpleNamespace(outputs={"dense": None})
    ready = True
    status = "ready"
    queued_tokens = 0

    async def run(self, request: Any, scheduling: Any) -> Any:
        raise ZeroDivisionError(f"scripted, with {request.texts[0]}")


@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_K7_a_storm_of_errors_is_a_few_lines(log_format: Any) -> None:
    app = create_app(ModelRegistry(cast(AsyncEmbedder, Failing())))
    stream = io.StringIO()
    end = logs.configure(LogOptions(log_format), stream=stream)

    async def storm() -> set[int]:
        post = {"method": "POST", "headers": {"content-type": "application/json"}, "body": b'{"input":"a"}'}
        return {(await call(app, path=PATH, **post)).status for _ in range(1239)}

    try:
        assert asyncio.run(storm()) == {500}
    finally:
        end()
    page = asyncio.run(call(app, path="/metrics")).body.decode()
    log = stream.getvalue()
    assert 'whimbrel_requests_total{model="m",outcome="error",route="/v1/embeddings",status="500"} 1239.0' in page
    assert log.count("ZeroDivisionError: scripted") == 5  # tracebacks of the bug itself
    assert log.count("and 1,234 more in 10 s: %s %s failed") == 1
    assert log.count("and 1,234 more in 10 s: answered 500 (internal_error)") == 1
    assert len([line for line in log.splitlines() if not line.startswith("    ")]) == 12


def test_the_log_costs_nothing_where_nobody_asks_for_it() -> None:
    """Without --access-log, a request that succeeds makes no record."""
    made: list[Any] = []
    end = logs.configure(LogOptions(), stream=io.StringIO())
    app = create_app(ModelRegistry(cast(AsyncEmbedder, Failing())))
    factory = logging.getLogRecordFactory()
    logging.setLogRecordFactory(lambda *args, **kwargs: made.append(args) or factory(*args, **kwargs))
    try:
        assert asyncio.run(call(app, path="/health/live")).status == 200
        assert made == []
    finally:
        logging.setLogRecordFactory(factory)
        end()


# Spans


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans as an OpenTelemetry collector does."""

    bodies: list[bytes] = []  # noqa: RUF012

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_K6_spans_reach_a_collector_and_hold_no_key() -> None:
    import gzip

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    with Server("--otel", WHIMBREL_API_KEY=KEY, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_SERVICE_NAME="search") as server:
        headers = {"authorization": f"Bearer {KEY}", "traceparent": TRACEPARENT, "x-request-id": "spanned"}
        with httpx2.Client(base_url=server.url, timeout=60, headers=headers) as client:
            assert post(client, {"input": "a secret text"}).status_code == 200
        assert server.stop() == 0  # which sends what was not sent yet
    collector.shutdown()
    collector.server_close()
    bodies = [gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body for body in Collector.bodies]
    found = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    spans = {
        span.name: span
        for each in found
        for group in each.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    }
    assert set(spans) == {"POST /v1/embeddings", "receive", "read", "tokenize", "queue", "compute", "write"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACEPARENT.split("-")[1]}
    assert spans["POST /v1/embeddings"].parent_span_id.hex() == TRACEPARENT.split("-")[2]
    assert all(span.parent_span_id == spans["POST /v1/embeddings"].span_id for name, span in spans.items() if " " not in name)
    everything = b"".join(bodies)
    assert b"spanned" in everything
    assert b"search" in everything
    assert KEY.encode() not in everything
    assert b"secret text" not in everything


def test_F11_a_full_disk_refuses_a_server_and_cannot_kill_one(tmp_path: Path) -> None:
    """All the room that metrics will ever need is taken at the start: a write into a mapped file on a full disk is SIGBUS."""
    program = """
import os, sys
from pathlib import Path
from whimbrel.telemetry import metrics
from whimbrel.errors import SetupError
path = Path(sys.argv[1])
metrics.use_directory(path, "worker-0")
files = list(path.glob("*.db"))
assert files and all(file.stat().st_blocks * 512 >= file.stat().st_size > 0 for file in files)
def full(*_):
    raise OSError(28, "No space left on device")
os.posix_fallocate = full
try:
    metrics.use_directory(path, "worker-1")
except SetupError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True)
    assert "No space left" in done.stdout
