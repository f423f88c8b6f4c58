"""Keys of a real server: budgets over several workers, workers that die, and the clients that people have."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

import fault_injection
from raw_http import Answer, ask, head, hold, post
from serving import Server
from settings_file import write_settings
from waiting import wait_for
from whimbrel import AsyncClient, Client, errors

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXT = {"input": "a"}
"""A request of three tokens."""
KEYS: dict[str, dict[str, object]] = {
    "open": {},
    "hundred": {"tokens_per_day": 300},
    "second": {"requests_per_minute": 60},
    "two": {"requests_in_flight": 2},
    "rerank-only": {"routes": ["/v1/rerank"]},
    "tiny": {"tokens_per_minute": 47},
    **{f"team-{number}": {"requests_per_minute": 600, "tokens_per_day": 10**9} for number in range(10_000)},
}


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, audit_log: Path) -> Iterator[Server]:
    """Two workers, and ten thousand keys."""
    file = write_settings(tmp_path_factory.mktemp("keys") / "whimbrel.toml", keys=KEYS)
    environment = {
        "WHIMBREL_RUNNER": "fault_injection:FaultyRunner",
        "PYTHONPATH": os.pathsep.join((str(Path(fault_injection.__file__).parent), os.environ.get("PYTHONPATH", ""))),
    }
    with Server("--config", str(file), "--workers", "2", "--set", f"audit_log={audit_log}", **environment) as server:
        yield server
        log = server.log
    assert "s3cret" not in log
    assert "Traceback" not in log


def send(server: Server, key: str, body: object = TEXT) -> Answer:
    return ask(server.port, post(body, authorization=f"Bearer {key}-s3cret"))


def use_up(server: Server, key: str) -> Answer:
    """Send requests until one is refused, and return the refusal."""
    for _ in range(500):
        if (told := send(server, key)).status == 429:
            return told
    raise AssertionError("the budget has no end")


def test_E13_of_more_requests_than_the_budget_exactly_the_budget_passes(server: Server) -> None:
    with ThreadPoolExecutor(16) as pool:
        statuses = Counter(pool.map(lambda _: send(server, "hundred").status, range(160)))
    assert statuses == {200: 100, 429: 60}


def test_H2_one_of_ten_thousand_keys(server: Server) -> None:
    assert send(server, "team-0").headers["x-ratelimit-limit-requests"] == "600"
    assert send(server, "team-9999").status == 200
    assert send(server, "team-10000").status == 401


def test_E14_requests_in_flight_of_workers_that_are_killed_come_back(server: Server) -> None:
    with ExitStack() as connections:
        for _ in range(2):
            connections.enter_context(hold(server.port, TEXT, authorization="Bearer two-s3cret"))
        assert send(server, "two").status == 429
        for pid in (workers := server.children("worker")):
            os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: len(now := server.children("worker")) == 2 and not {*now} & {*workers})

    def answers() -> bool:
        with suppress(OSError):
            return send(server, "two").status == 200
        return False

    assert wait_for(answers)
    with ThreadPoolExecutor(2) as pool:
        assert [each.status for each in pool.map(lambda _: send(server, "two"), range(2))] == [200, 200]


def test_openai_s_client_waits_and_asks_again(server: Server) -> None:
    openai = pytest.importorskip("openai")
    told = use_up(server, "second")
    assert (told.headers["retry-after"], told.error["code"]) == ("1", "rate_limit_exceeded")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="second-s3cret", max_retries=2) as client:
        raw = client.embeddings.with_raw_response.create(model=MODEL, input="a")
        assert len(raw.parse().data) == 1
        assert raw.headers["x-ratelimit-limit-requests"] == "60"
        use_up(server, "second")
        with pytest.raises(openai.RateLimitError) as refused:
            client.with_options(max_retries=0).embeddings.create(model=MODEL, input="a")
        assert refused.value.code == "rate_limit_exceeded"
        assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="rerank-only-s3cret") as client:
        with pytest.raises(openai.PermissionDeniedError) as denied:
            client.embeddings.create(model=MODEL, input="a")
        assert denied.value.code == "permission_denied"


def test_a_client_does_not_ask_again_where_the_wait_is_long(server: Server) -> None:
    openai = pytest.importorskip("openai")
    use_up(server, "hundred")
    sent: list[object] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [sent.append]})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="hundred-s3cret", http_client=http) as client:
        with pytest.raises(openai.RateLimitError):
            client.embeddings.create(model=MODEL, input="a")
        assert len(sent) == 1
    with Client(server.url, api_key="hundred-s3cret") as ours, pytest.raises(errors.RateLimited, match="tokens a day"):
        ours.embed("a")


def test_cohere_s_client_waits_and_asks_again(server: Server) -> None:
    cohere = pytest.importorskip("cohere")
    use_up(server, "second")
    with cohere.ClientV2("second-s3cret", base_url=server.url) as client:
        told = client.embed(model=MODEL, texts=["a"], input_type="search_query", embedding_types=["float"])
    assert len(told.embeddings.float_) == 1


def test_our_clients_wait_ask_again_and_send_less(server: Server) -> None:
    use_up(server, "second")
    with Client(server.url, api_key="second-s3cret") as client:
        assert client.embed("a").shape == (384,)
        use_up(server, "second")
        hasty = Client(server.url, api_key="second-s3cret", max_retries=0)
        with hasty, pytest.raises(errors.RateLimited, match="may use 60 requests a minute"):
            any(hasty.embed("a") is None for _ in range(100))  # one comes back every second

    async def embed() -> tuple[int, ...]:
        async with AsyncClient(server.url, api_key="second-s3cret") as client:
            return (await client.embed("a")).shape

    use_up(server, "second")
    assert asyncio.run(embed()) == (384,)
    with Client(server.url, api_key="rerank-only-s3cret") as client, pytest.raises(errors.PermissionDenied):
        client.embed("a")
    with Client(server.url, api_key="tiny-s3cret") as client:  # 48 tokens in halves of 24: the second waits for one to come
        assert client.embed(["a"] * 16).shape == (16, 384)


def test_usage_is_in_the_metrics_and_the_audit_log_by_name(server: Server, audit_log: Path) -> None:
    send(server, "open", {"input": ["a"] * 7})
    send(server, "hundred")
    page = ask(server.port, head("GET", "/metrics", authorization="Bearer open-s3cret")).body.decode()
    assert re.search(rf'whimbrel_key_tokens_total{{key="hundred",model="{MODEL}"}} 30\d', page)
    assert 'outcome="rate_limited"' in page
    assert "s3cret" not in page
    assert wait_for(lambda: any(line["texts"] == 7 for line in lines_of(audit_log)))
    lines = lines_of(audit_log)
    line = next(line for line in lines if line["texts"] == 7)
    assert (line["key"], line["route"], line["status"], line["tokens"]) == ("open", "/v1/embeddings", 200, 21)
    assert sum(line["tokens"] for line in lines if line["key"] == "hundred") in range(300, 310, 3)
    assert "s3cret" not in audit_log.read_text()
    assert not [line for line in lines if line["route"].startswith("/health")]


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in file.read_bytes().splitlines()]
