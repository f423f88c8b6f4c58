"""Files and batches of a real server: OpenAI's client as it is, keys, and kills of workers, engines and the server."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from serving import Server
from settings_file import key_of, write_settings
from waiting import wait_for

EMBEDDINGS = "/v1/embeddings"
WORDS = "the quick brown fox jumps over a lazy dog while many texts wait for their turn".split()


def line(custom_id: str, url: str = EMBEDDINGS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def many(count: int) -> list[dict[str, Any]]:
    """Return requests that take a while, of which every tenth is wrong."""
    texts = [" ".join(WORDS[(number + k) % len(WORDS)] for k in range(60)) for number in range(8)]
    return [line(f"r{number}", input=[f"{number} {text}" for text in texts] if number % 10 else 7) for number in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("settings") / "whimbrel.toml"
    return write_settings(file, keys={"one": {}, "two": {}, "narrow": {"routes": ["/v1/files", "/v1/batches", "/v1/rerank"]}})


def start(settings: Path, folder: Path) -> Server:
    return Server("--config", str(settings), "--workers", "2", "--set", f"batch_dir={folder}")


@pytest.fixture(scope="module")
def server(settings: Path, folder: Path) -> Iterator[Server]:
    with start(settings, folder) as server:
        yield server
        log = server.log
    assert "Traceback" not in log


def client_of(server: Server, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key_of(key), max_retries=8)


def create(client: openai.OpenAI, content: bytes, endpoint: str = EMBEDDINGS) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    given: Any = endpoint
    return client.batches.create(input_file_id=file.id, endpoint=given, completion_window="24h")


def ended(client: openai.OpenAI, batch: Any, seconds: float = 300) -> Any:
    deadline = time.monotonic() + seconds
    while (seen := client.batches.retrieve(batch.id)).status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < deadline, seen
        counts = seen.request_counts
        assert counts is not None
        assert counts.completed + counts.failed <= max(counts.total, 0)
        time.sleep(0.1)
    return seen


def wait_until(client: openai.OpenAI, batch: Any, *, more_than: int) -> None:
    """Wait until more than this number of requests of a batch is done."""
    batch_id = batch.id
    assert wait_for(lambda: getattr(client.batches.retrieve(batch_id).request_counts, "completed", 0) > more_than, 30)


def answers(client: openai.OpenAI, file_id: str) -> bytes:
    return client.files.content(file_id).read()


def without_ids(data: bytes) -> list[bytes]:
    """Return lines without the ids and times that each batch and each answer has of its own."""
    return re.sub(rb'"(id|request_id)":"[\w-]+"|"created":\d+', b"", data).splitlines()


def test_J19_openai_s_client_runs_a_batch(server: Server) -> None:
    with client_of(server) as client:
        lines = [line("a", input="first"), line("b", input=["second", "third"]), line("c", input="x", model="other")]
        batch = create(client, jsonl(lines))
        assert client.batches.list(limit=1).data[0].id == batch.id
        done = ended(client, batch)
        assert done.status == "completed"
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (3, 2, 1)
        found = {
            each["custom_id"]: each["response"] for each in map(json.loads, answers(client, done.output_file_id).splitlines())
        }
        vectors = [each["embedding"] for name in "ab" for each in found[name]["body"]["data"]]
        told = client.embeddings.create(
            model="sentence-transformers/all-MiniLM-L6-v2", input=["first", "second", "third"], encoding_format="float"
        )
        assert vectors == [each.embedding for each in told.data]
        assert found["a"]["status_code"] == 200
        (wrong,) = map(json.loads, answers(client, done.error_file_id).splitlines())
        assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("c", 404)
        assert {each.id for each in client.files.list(purpose="batch_output")} == {done.output_file_id, done.error_file_id}
        assert [each.id for each in client.files.list(limit=1, order="asc")] == [
            each.id for each in client.files.list(order="asc")
        ]
        assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
        assert client.files.delete(done.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(done.input_file_id)


def test_J19_scores_and_ranks(server: Server) -> None:
    with client_of(server) as client:
        for endpoint, body in (
            ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
            ("/rerank", {"query": "a", "documents": ["b", "c"]}),
        ):
            done = ended(client, create(client, jsonl([line("x", endpoint, **body)]), endpoint))
            answer = json.loads(answers(client, done.output_file_id))["response"]["body"]
            told = httpx2.post(
                f"{server.url}{endpoint}", json=body, headers={"authorization": f"Bearer {key_of('one')}"}
            ).json()
            assert answer.get("data", answer.get("results")) == told.get("data", told.get("results"))


def test_J16_workers_and_engines_that_are_killed_cost_no_line(server: Server) -> None:
    with client_of(server) as client:
        content = jsonl(many(120))
        whole = ended(client, create(client, content))
        batch = create(client, content)
        for kind in ("worker", "engine", "worker"):
            time.sleep(0.7)
            for pid in server.children(kind):
                os.kill(pid, signal.SIGKILL)
            assert wait_for(lambda kind=kind: len(server.children(kind)) == (2 if kind == "worker" else 1), 120)
        done = ended(client, batch)
        assert (done.request_counts.completed, done.request_counts.failed) == (108, 12)
        for name in ("output_file_id", "error_file_id"):
            assert without_ids(answers(client, getattr(done, name))) == without_ids(answers(client, getattr(whole, name)))


def test_J16_a_server_that_is_killed_goes_on_where_it_was(settings: Path, tmp_path: Path) -> None:
    ids: list[str] = []
    batch: Any = None
    for kills in range(3):
        with start(settings, tmp_path / "own") as server, client_of(server) as client:
            if batch is None:
                batch = create(client, jsonl(many(120)))
            if kills < 2:
                wait_until(client, batch, more_than=10 * kills)
                server.stop(signal.SIGKILL)
                continue
            done = ended(client, batch)
            assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 108, 12)
            for file_id in (done.output_file_id, done.error_file_id):
                ids += [json.loads(each)["custom_id"] for each in answers(client, file_id).splitlines()]
            assert server.stop() == 0
    good = [f"r{number}" for number in range(120) if number % 10]
    assert ids == [*good, *(f"r{number}" for number in range(0, 120, 10))]


def test_H20_what_is_another_key_s_is_not_there(server: Server) -> None:
    with client_of(server) as one, client_of(server, "two") as two, client_of(server, "narrow") as narrow:
        batch = create(one, jsonl([line("a", input="x")]))
        for call in (
            lambda: two.batches.retrieve(batch.id),
            lambda: two.batches.cancel(batch.id),
            lambda: two.files.content(batch.input_file_id),
            lambda: two.files.delete(batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        with pytest.raises(openai.PermissionDeniedError, match="may not use /v1/embeddings"):
            create(narrow, jsonl([line("a", input="x")]))
        assert ended(one, batch).status == "completed"
