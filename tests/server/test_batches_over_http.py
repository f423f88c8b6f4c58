"""Files and batches over HTTP, with OpenAI's client as it is and a process without a model, which is killed at any moment."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from fake_embedder import FakeServer
from raw_http import Connection
from waiting import wait_for

EMBEDDINGS = "/v1/embeddings"


def content_of(count: int) -> bytes:
    """Return requests of which every tenth is wrong."""
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": EMBEDDINGS, "body": {"input": "text" if number % 10 else 7}}
        for number in range(count)
    ]
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def client_of(server: FakeServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=5)


def create(client: openai.OpenAI, content: bytes) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=EMBEDDINGS, completion_window="24h")


def ended(client: openai.OpenAI, batch: Any, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while (seen := client.batches.retrieve(batch.id)).status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)
    return seen


def completed(client: openai.OpenAI, batch: Any) -> int:
    return client.batches.retrieve(batch.id).request_counts.completed


def ids(client: openai.OpenAI, file_id: str) -> list[str]:
    return [json.loads(line)["custom_id"] for line in client.files.content(file_id).text.splitlines()]


def test_J16_a_process_that_is_killed_many_times_loses_and_doubles_no_line(tmp_path: Path) -> None:
    batch: Any = None
    before = 0
    for kill in range(4):
        with FakeServer(seconds=0.02, batch_dir=str(tmp_path)) as server, client_of(server) as client:
            if batch is None:
                batch = create(client, content_of(1200))
            if kill < 3:
                assert wait_for(lambda: completed(client, batch) > before, 30)  # noqa: B023
                server.process.kill()
                before = json.loads((tmp_path / "batches" / batch.id / "progress.json").read_bytes())["completed"]
                continue
            assert client.batches.retrieve(batch.id).status in ("in_progress", "finalizing")
            done = ended(client, batch)
            counts = done.request_counts
            assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 1200, 1080, 120)
            assert ids(client, done.output_file_id) == [f"r{number}" for number in range(1200) if number % 10]
            assert ids(client, done.error_file_id) == [f"r{number}" for number in range(0, 1200, 10)]


def test_J22_a_batch_is_cancelled_within_two_seconds(tmp_path: Path) -> None:
    with FakeServer(seconds=0.02, batch_dir=str(tmp_path)) as server, client_of(server) as client:
        batch = create(client, content_of(6000))
        assert wait_for(lambda: completed(client, batch) > 0, 30)
        begin = time.monotonic()
        assert client.batches.cancel(batch.id).status == "cancelling"
        done = ended(client, batch, 10)
        assert time.monotonic() - begin < 4
        assert done.status == "cancelled"
        assert done.request_counts.completed + done.request_counts.failed == done.request_counts.total == 6000


def test_J20_an_upload_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=xyz\r\n"
        b'Content-Length: 1000000\r\n\r\n--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )

    def has_part() -> bool:
        return any(name.endswith(".part") for name in os.listdir(tmp_path / "files"))

    with FakeServer(batch_dir=str(tmp_path)) as server:
        with Connection(server.port) as connection:
            connection.send(head + b"x" * 400_000)
            assert wait_for(has_part, 10)
        assert wait_for(lambda: not has_part(), 10)
        with Connection(server.port) as connection:
            connection.send(head + b"x" * 400_000)
            assert wait_for(has_part, 10)
            server.process.kill()
            server.process.wait()
    assert has_part()
    with FakeServer(batch_dir=str(tmp_path)):
        assert wait_for(lambda: not has_part(), 20)
    assert os.listdir(tmp_path / "files") == []


def test_J20_a_large_file_goes_to_the_disk(tmp_path: Path) -> None:
    with FakeServer(batch_dir=str(tmp_path)) as server, client_of(server) as client:
        content = b"x" * 60_000_000  # above max_body_bytes
        file = client.files.create(file=("large.jsonl", content), purpose="batch")
        assert file.bytes == len(content)
        assert client.files.content(file.id).read() == content
        resident = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
        assert int(resident) * os.sysconf("SC_PAGE_SIZE") < 400_000_000
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(file.id)


def test_J19_lists_have_pages(tmp_path: Path) -> None:
    with FakeServer(batch_dir=str(tmp_path)) as server, client_of(server) as client:
        files = [client.files.create(file=(f"{number}.jsonl", b"x"), purpose="batch").id for number in range(5)]
        assert [each.id for each in client.files.list(limit=2)] == files[::-1]
        assert [each.id for each in client.files.list(limit=2, order="asc")] == files
        assert [each.id for each in client.files.list(purpose="batch_output")] == []
        batches = [create(client, content_of(1)).id for _ in range(3)]
        assert [each.id for each in client.batches.list(limit=2)] == batches[::-1]
        base = f"http://127.0.0.1:{server.port}/v1"
        page = client.batches.list(limit=2, after=batches[2])
        assert ([each.id for each in page.data], page.has_more) == (batches[1::-1], False)
        assert [each.id for each in client.files.list(limit=1, order="asc", after=files[0]).data] == [files[1]]
        for query in ("limit=0", "limit=x", "limit=101", "after=batch_x", "after=../x"):
            assert httpx2.get(f"{base}/batches?{query}").status_code == 400
        for query in ("order=up", "limit=10001", "limit=-1"):
            assert httpx2.get(f"{base}/files?{query}").status_code == 400
        for name in ("..%2f..%2fetc%2fpasswd", "%2e%2e", ".lock", "file-0"):
            assert httpx2.get(f"{base}/files/{name}/content").status_code in (400, 404)
