"""Files and batches of a server: the routes and the runner in this process, with an embedder that has no model."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asgi import Answer, call
from fake_embedder import FakeEmbedder
from whimbrel.errors import TooLarge
from whimbrel.server.app.app import App, create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.own_requests import LOWEST
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.server.batches import journal, runner, store
from whimbrel.server.batches.lines import LineAnswer
from whimbrel.server.batches.records import BatchRecord
from whimbrel.server.batches.run import Window
from whimbrel.server.keys import ApiKey

EMBEDDINGS = "/v1/embeddings"
FORM = "multipart/form-data; boundary=xyz"


def line(custom_id: str, url: str = EMBEDDINGS, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"input": "a"}})


def form(content: bytes | str, purpose: str | None = "batch", name: str = "in.jsonl", **fields: str) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    stated = {**({} if purpose is None else {"purpose": purpose}), **fields}
    parts = [
        f'--xyz\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode() for key, value in stated.items()
    ]
    file = f'--xyz\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode() + data
    return b"".join(parts) + file + b"\r\n--xyz--\r\n"


class Client:
    """Calls of an app, with the key of a client."""

    def __init__(self, app: App, served: ModelRegistry, embedder: FakeEmbedder, folder: Path, key: str = "") -> None:
        self.app = app
        self.served = served
        self.embedder = embedder
        self.folder = folder
        self.key = key

    def with_key(self, key: str) -> Client:
        return Client(self.app, self.served, self.embedder, self.folder, key)

    async def send(self, method: str, path: str, body: bytes | list[bytes] = b"", kind: str = "", **headers: str) -> Answer:
        headers |= {"content_type": kind} if kind else {}
        headers |= {"authorization": f"Bearer {self.key}"} if self.key else {}
        return await call(self.app, method, path, body=body, headers=headers)

    async def upload(self, content: bytes | str, **fields: Any) -> Any:
        answer = await self.send("POST", "/v1/files", form(content, **fields), FORM)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    async def post_batch(self, **body: Any) -> Answer:
        stated = {"endpoint": EMBEDDINGS, "completion_window": "24h"} | body
        return await self.send("POST", "/v1/batches", json.dumps(stated).encode(), "application/json")

    async def create(self, content: bytes | str, **body: Any) -> Any:
        answer = await self.post_batch(input_file_id=(await self.upload(content))["id"], **body)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    async def get(self, path: str) -> Any:
        return json.loads((await self.send("GET", path)).body)

    async def ended(self, batch: Any, *statuses: str) -> Any:
        for _ in range(400):
            seen = await self.get(f"/v1/batches/{batch['id']}")
            if seen["status"] in (statuses or ("completed", "failed", "expired", "cancelled")):
                return seen
            await asyncio.sleep(0.02)
        raise AssertionError(seen)

    async def lines(self, file_id: str) -> list[Any]:
        answer = await self.send("GET", f"/v1/files/{file_id}/content")
        assert answer.status == 200
        return [json.loads(each) for each in answer.body.splitlines()]


def run(folder: Path, steps: Callable[[Client], Awaitable[None]], *, starts: bool = True, **limits: Any) -> None:
    """Run steps against an app over a folder."""

    async def main() -> None:
        embedder = FakeEmbedder()
        served = ModelRegistry(embedder)
        app = create_app(served, guards=ServerLimits(batch_dir=str(folder), **limits))
        assert app.batches is not None
        app.batches.store.prepare()
        if starts:
            app.batches.start()
        try:
            await steps(Client(app, served, embedder, folder))
        finally:
            await app.batches.stop()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(runner, "_AGAIN_SECONDS", 0.01)


def error_of(answer: Answer) -> tuple[int, str, str | None]:
    error = json.loads(answer.body)["error"]
    return answer.status, error["message"], error["param"]


def test_J19_a_batch_from_its_file_to_its_answers(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        content = "\n".join([line("a"), line("b", input=7), "", line("c", input=["x", "y"], priority=-5)])
        batch = await client.create(content, metadata={"name": "first"})
        assert (batch["status"], batch["metadata"]) == ("validating", {"name": "first"})
        assert batch["expires_at"] - batch["created_at"] == 24 * 3600
        done = await client.ended(batch)
        assert (done["status"], done["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})
        good, bad = await client.lines(done["output_file_id"]), await client.lines(done["error_file_id"])
        assert [each["custom_id"] for each in good] == ["a", "c"]
        assert len(good[1]["response"]["body"]["data"]) == 2
        assert (bad[0]["custom_id"], bad[0]["response"]["status_code"], bad[0]["error"]) == ("b", 400, None)
        assert "input" in bad[0]["response"]["body"]["error"]["message"]
        assert [each["purpose"] for each in (await client.get("/v1/files"))["data"]].count("batch_output") == 2
        assert sorted(os.listdir(client.folder / "batches" / batch["id"])) == ["batch.json", "progress.json", "state.json"]

    run(tmp_path, steps)


def test_J21_lines_of_a_batch_have_the_last_priority(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        await client.ended(await client.create("\n".join([line("a"), line("b", input="x", priority=-5)])))
        assert [each.priority for each in client.embedder.schedulings] == [LOWEST, LOWEST]

    run(tmp_path, steps)


@pytest.mark.parametrize(
    ("content", "code", "number", "param"),
    [
        ("", "empty_file", None, None),
        ("\n \n", "empty_file", None, None),
        ("no json", "invalid_json_line", 1, None),
        (line("a") + "\n" + line("a"), "duplicate_custom_id", 2, "custom_id"),
        (line("a") + "\n\n" + line("b", "/v1/score"), "mismatched_endpoint", 3, "url"),
        (line("a").replace("POST", "GET"), "invalid_method", 1, "method"),
        ('{"custom_id": "a"}', "missing_required_parameter", 1, "method"),
        (line("a", input="x" * 3000), "request_too_large", 1, None),
        ("\n".join(line(str(number)) for number in range(50_001)), "too_many_requests", None, None),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_J20_a_file_with_a_fault_fails_before_a_line_runs(
    content: str, code: str, number: int | None, param: str | None, tmp_path: Path
) -> None:
    async def steps(client: Client) -> None:
        done = await client.ended(await client.create(content))
        assert (done["status"], done["output_file_id"], done["failed_at"] is not None) == ("failed", None, True)
        problem = done["errors"]["data"][0]
        assert (problem["code"], problem["line"], problem["param"]) == (code, number, param)
        assert problem["message"]
        assert not client.embedder.requests

    run(tmp_path, steps, max_body_bytes=2000)


def test_J20_what_no_batch_can_be_made_of_is_refused(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        file = (await client.upload(line("a")))["id"]
        for body, param in (
            ({"input_file_id": file, "endpoint": "/v1/nowhere"}, "endpoint"),
            ({"input_file_id": file, "endpoint": "/v1/batches"}, "endpoint"),
            ({"input_file_id": file, "completion_window": "1h"}, "completion_window"),
            ({"input_file_id": "file-" + 32 * "0"}, "file_id"),
            ({"input_file_id": "../" + file}, "file_id"),
            ({"input_file_id": file, "metadata": {str(number): "" for number in range(17)}}, "metadata"),
            ({"input_file_id": file, "metadata": {"a": "x" * 513}}, "metadata"),
            ({"input_file_id": file, "metadata": {"a": 1}}, "metadata"),
            ({"input_file_id": 7}, "input_file_id"),
            ({"input_file_id": file, "output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ):
            status, _, told = error_of(await client.post_batch(**body))
            assert status in (400, 404)
            assert told is not None
            assert told.startswith(param), (body, told)
        assert (await client.send("POST", "/v1/batches", b"{", "application/json")).status == 400
        assert (await client.send("POST", "/v1/batches", b"{}", "application/json")).status == 400
        assert (await client.send("POST", "/v1/batches", b"", "application/json")).status == 400
        assert (await client.send("POST", "/v1/batches", b"{}", "text/plain")).status == 415
        assert (await client.send("DELETE", "/v1/batches")).status == 405
        assert (await client.get("/v1/batches"))["data"] == []

    run(tmp_path, steps)


def test_J20_uploads_that_are_refused_leave_nothing(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        async def refused(body: bytes | list[bytes], kind: str = FORM, **headers: str) -> tuple[int, str]:
            answer = await client.send("POST", "/v1/files", body, kind, **headers)
            status, message, param = error_of(answer)
            return status, param or message

        assert await refused(form("a", purpose=None)) == (400, "purpose")
        assert await refused(form("a", purpose="fine-tune")) == (400, "purpose")
        assert await refused(form("a", purpose="batch_output")) == (400, "purpose")
        assert await refused(b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyz--') == (
            400,
            "file",
        )
        assert (await refused(form("a"), "application/json"))[0] == 415
        assert (await refused(form("a"), "multipart/form-data"))[0] == 415
        assert (await refused(form("a"), content_encoding="gzip"))[0] == 415
        assert (await refused(form("a")[:-9]))[0] == 400
        assert (await refused(b""))[0] == 400
        assert (await refused(form("x" * 1001)))[0] == 413
        assert (await refused([form("x" * 500_000)[i : i + 10_000] for i in range(0, 500_000, 10_000)]))[0] == 413
        assert (await refused(form("a", **{"expires_after[seconds]": "5"})))[1] == "expires_after[seconds]"
        assert (await refused(form("a", other="x" * 2000)))[0] == 413
        assert os.listdir(client.folder / "files") == []
        kept = await client.upload("x" * 1000, name="../../evil\\\\x.jsonl", **{"expires_after[seconds]": "3600"})
        assert (kept["filename"], kept["expires_at"] - kept["created_at"]) == ("evil\\x.jsonl", 3600)

    run(tmp_path, steps, max_file_bytes=1000)


def test_J20_a_folder_takes_only_so_much(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        first = await client.upload("x" * 600)
        status, message, _ = error_of(await client.send("POST", "/v1/files", form("y" * 600), FORM))
        assert (status, "all files have" in message) == (413, True)
        await client.upload("y" * 10)
        await client.upload("z" * 10)
        status, message, _ = error_of(await client.send("POST", "/v1/files", form("w"), FORM))
        assert (status, "3 files" in message) == (413, True)
        gone = await client.send("DELETE", f"/v1/files/{first['id']}")
        assert json.loads(gone.body) == {"id": first["id"], "object": "file", "deleted": True}
        await client.upload("w" * 600)

    run(tmp_path, steps, max_files_bytes=1000, max_files=3)


def test_H20_files_and_batches_belong_to_the_key_that_made_them(tmp_path: Path) -> None:
    keys = (ApiKey(name="one", digest=sha256(b"k1").digest()), ApiKey(name="two", digest=sha256(b"k2").digest()))

    async def steps(client: Client) -> None:
        one, two = client.with_key("k1"), client.with_key("k2")
        batch = await one.create(line("a"))
        done = await one.ended(batch)
        for path in (
            f"/v1/files/{done['output_file_id']}",
            f"/v1/files/{done['output_file_id']}/content",
            f"/v1/batches/{batch['id']}",
        ):
            assert (await one.send("GET", path)).status == 200
            assert (await two.send("GET", path)).status == 404
            assert (await client.send("GET", path)).status == 401
        assert (await two.send("DELETE", f"/v1/files/{done['output_file_id']}")).status == 404
        assert (await two.send("POST", f"/v1/batches/{batch['id']}/cancel")).status == 404
        assert (await two.post_batch(input_file_id=done["input_file_id"])).status == 404
        assert (await two.get("/v1/files"))["data"] == (await two.get("/v1/batches"))["data"] == []
        written = b"".join(file.read_bytes() for file in client.folder.rglob("*") if file.is_file())
        assert b"k1" not in written
        assert keys[0].digest.hex().encode() in written

    run(tmp_path, steps, keys=keys)


@pytest.mark.parametrize(
    "name", ["..", "../../etc/passwd", "file-", "file-" + 31 * "0" + "/", ".lock", "%2e%2e", "\0", "file-" + 32 * "G"]
)
def test_H20_no_id_leads_to_another_file(name: str, tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            assert (await client.send("GET", path)).status == 404
        assert (await client.send("DELETE", f"/v1/files/{name}")).status == 404

    run(tmp_path, steps, starts=False)


def test_H20_a_key_opens_what_is_below_the_routes_that_it_names(tmp_path: Path) -> None:
    keys = (
        ApiKey(name="one", digest=sha256(b"k1").digest(), routes=("/v1/files", "/v1/batches", EMBEDDINGS)),
        ApiKey(name="two", digest=sha256(b"k2").digest(), routes=("/v1/files", "/v1/batches")),
        ApiKey(name="three", digest=sha256(b"k3").digest(), routes=(EMBEDDINGS,)),
    )

    async def steps(client: Client) -> None:
        one, two, three = (client.with_key(f"k{number}") for number in (1, 2, 3))
        done = await one.ended(await one.create(line("a")))
        assert len(await one.lines(done["output_file_id"])) == 1
        file = (await two.upload(line("a")))["id"]
        assert (await two.post_batch(input_file_id=file)).status == 403
        for path in ("/v1/files", f"/v1/files/{file}", f"/v1/batches/{done['id']}"):
            assert (await three.send("GET", path)).status == 403

    run(tmp_path, steps, keys=keys)


def test_J22_a_cancelled_batch_ends_soon_and_keeps_its_answers(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        batch = await client.create("\n".join(line(str(number)) for number in range(100)))
        client.embedder.go.clear()
        await client.ended(batch, "in_progress")
        told = json.loads((await client.send("POST", f"/v1/batches/{batch['id']}/cancel")).body)
        assert (told["status"], told["cancelling_at"] is not None) == ("cancelling", True)
        done = await asyncio.wait_for(client.ended(batch), 2)
        counts = done["request_counts"]
        assert (done["status"], counts["total"], counts["completed"] + counts["failed"]) == ("cancelled", 100, 100)
        bad = await client.lines(done["error_file_id"])
        assert {each["error"]["code"] for each in bad} == {"batch_cancelled"}
        assert [each["custom_id"] for each in bad] == [str(number) for number in range(100 - len(bad), 100)]
        status, message, _ = error_of(await client.send("POST", f"/v1/batches/{batch['id']}/cancel"))
        assert (status, "cancelled" in message) == (400, True)

    run(tmp_path, steps)


def test_J22_a_batch_that_waits_for_its_turn_is_cancelled_as_soon(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        client.embedder.go.clear()
        first, second = [await client.create(line("a")) for _ in range(2)]
        await client.ended(first, "in_progress")
        assert (await client.get(f"/v1/batches/{second['id']}"))["status"] == "validating"
        await client.send("POST", f"/v1/batches/{second['id']}/cancel")
        assert (await asyncio.wait_for(client.ended(second), 2))["status"] == "cancelled"
        client.embedder.go.set()
        assert (await client.ended(first))["status"] == "completed"

    run(tmp_path, steps)


def test_records_that_cannot_be_read_hide_no_others(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        (client.folder / "files" / f"file-{32 * '0'}.json").write_text("{")
        broken = client.folder / "batches" / f"batch_{32 * '0'}"
        broken.mkdir()
        (broken / "batch.json").write_text("{")
        batch = await client.create(line("a"))
        assert (await client.ended(batch))["status"] == "completed"
        assert len((await client.get("/v1/files"))["data"]) == 2
        assert len((await client.get("/v1/batches"))["data"]) == 1

    run(tmp_path, steps)


def test_J16_batches_that_have_ended_take_no_turn_after_a_restart(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        assert client.app.batches is not None
        store = client.app.batches.store
        old = [await client.ended(await client.create(line("a"))) for _ in range(3)]
        left = store.batch_folder(old[0]["id"]) / "input.jsonl"  # of a process that was killed at the end of its batch
        left.write_text(line("a"))
        await client.app.batches.stop()
        batch = await client.create(line("a"))
        ended: set[str] = set()
        assert [record.id for record in store.unfinished(ended)] == [batch["id"]]
        assert ended == {each["id"] for each in old}
        store.sweep()
        assert not left.exists()
        client.app.batches.start()
        assert (await client.ended(batch))["status"] == "completed"

    run(tmp_path, steps)


def test_J20_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        left = [client.folder / "files" / ".new-1.part", client.folder / "files" / f"file-{32 * '1'}.jsonl"]
        for file in left:
            file.write_text("x")
        half = client.folder / "batches" / f".new-batch_{32 * '1'}"
        half.mkdir()
        (half / "input.jsonl").write_text("x")
        kept = await client.upload(line("a"))
        assert client.app.batches is not None
        upload = client.app.batches.store.begin_upload()
        client.app.batches.start()
        await client.ended(await client.create(line("a")))
        assert not any(file.exists() for file in (*left, half))
        assert upload.path.exists()
        upload.close()
        assert (await client.get(f"/v1/files/{kept['id']}"))["bytes"] == len(line("a"))

    run(tmp_path, steps, starts=False)


def test_J22_a_batch_whose_window_is_over_expires(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        client.embedder.go.clear()
        batch = await client.create("\n".join(line(str(number)) for number in range(40)))
        await client.ended(batch, "in_progress")
        assert client.app.batches is not None
        await client.app.batches.stop()
        file = client.folder / "batches" / batch["id"] / "batch.json"
        record = msgspec.json.decode(file.read_bytes(), type=BatchRecord)
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, expires_at=1)))
        client.app.batches.start()
        done = await client.ended(batch)
        assert (done["status"], done["expired_at"] is not None) == ("expired", True)
        assert done["request_counts"] == {"total": 40, "completed": 0, "failed": 40}
        assert {each["error"]["code"] for each in await client.lines(done["error_file_id"])} == {"batch_expired"}

    run(tmp_path, steps)


def test_J23_a_full_disk_fails_the_batch_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = journal.write_all

    def write_all(file: int, data: bytes) -> int:
        if b'"custom_id"' in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    async def steps(client: Client) -> None:
        monkeypatch.setattr(journal, "write_all", write_all)
        done = await client.ended(await client.create(line("a")))
        assert (done["status"], done["errors"]["data"][0]["code"]) == ("failed", "disk_full")
        assert "the disk is full" in done["errors"]["data"][0]["message"]
        monkeypatch.setattr(journal, "write_all", real)
        assert (await client.ended(await client.create(line("a"))))["status"] == "completed"

    run(tmp_path, steps)


def test_J23_an_upload_to_a_full_disk_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def steps(client: Client) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(store, "write_all", full)
            status, message, _ = error_of(await client.send("POST", "/v1/files", form("a"), FORM))
            assert (status, "No space left on device" in message) == (507, True)
        assert os.listdir(client.folder / "files") == []
        file = await client.upload(line("a"))
        with monkeypatch.context() as patch:
            patch.setattr(journal, "write_all", full)
            assert error_of(await client.post_batch(input_file_id=file["id"]))[0] == 507
        assert os.listdir(client.folder / "batches") == []

    run(tmp_path, steps)


def test_J23_answers_beyond_the_limit_of_all_files_fail_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(client: Client) -> None:
        monkeypatch.setattr("whimbrel.server.batches.run._CHECK_SECONDS", 0.0)
        monkeypatch.setattr("whimbrel.server.batches.run._COMMIT_SECONDS", 0.0)
        done = await client.ended(await client.create("\n".join(line(str(number)) for number in range(3000))))
        assert (done["status"], done["errors"]["data"][0]["code"]) == ("failed", "no_room")
        assert (await client.send("GET", "/v1/files")).status == 200

    run(tmp_path, steps, max_files_bytes=400_000)


def test_J24_a_batch_of_a_key_that_is_no_key_any_more_fails(tmp_path: Path) -> None:
    keys = (ApiKey(name="one", digest=sha256(b"k1").digest()), ApiKey(name="two", digest=sha256(b"k2").digest()))

    async def steps(client: Client) -> None:
        one = client.with_key("k1")
        client.embedder.go.clear()
        batch = await one.create("\n".join(line(str(number)) for number in range(100)))
        await one.ended(batch, "in_progress")
        client.app.renew_limits(ServerLimits(batch_dir=str(tmp_path), keys=keys[1:]))
        client.embedder.go.set()
        for _ in range(200):
            state = client.folder / "batches" / batch["id"] / "state.json"
            if json.loads(state.read_bytes())["status"] == "failed":
                break
            await asyncio.sleep(0.02)
        assert json.loads(state.read_bytes())["problems"][0]["code"] == "invalid_api_key"

    run(tmp_path, steps, keys=keys)


def test_J24_budgets_of_the_key_count_and_a_batch_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_LONGEST_PAUSE", 0.05)
    key = ApiKey(name="one", digest=sha256(b"k1").digest(), tokens_per_minute=6000, requests_in_flight=4)

    async def steps(client: Client) -> None:
        one = client.with_key("k1")
        begin = time.monotonic()
        batch = await one.create("\n".join(line(str(number), input=["a"] * 20) for number in range(51)))
        done = await one.ended(batch)
        assert time.monotonic() - begin >= 0.5  # 3,060 tokens; a hundred come back every second, and half is for others
        assert done["request_counts"] == {"total": 51, "completed": 51, "failed": 0}

    run(tmp_path, steps, keys=(key,))


def test_J21_a_batch_leaves_half_of_its_key_s_budgets_to_other_requests(tmp_path: Path) -> None:
    key = ApiKey(name="one", digest=sha256(b"k1").digest(), tokens_per_day=600, requests_per_minute=400)

    async def steps(client: Client) -> None:
        one = client.with_key("k1")
        batch = await one.create("\n".join(line(str(number)) for number in range(110)))
        for _ in range(1000):
            if (await one.get(f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] == 100:
                break
            await asyncio.sleep(0.02)
        for left in range(99, 0, -1):  # 3 tokens each
            answer = await one.send("POST", EMBEDDINGS, b'{"input": "a"}', "application/json")
            assert (answer.status, answer.headers["x-ratelimit-remaining-tokens"]) == (200, str(3 * left))
        assert len(client.embedder.requests) == 100 + 99  # no line ran meanwhile

    run(tmp_path, steps, keys=(key,))


def test_J21_of_lines_that_find_no_room_one_at_a_time_asks_again(tmp_path: Path) -> None:
    asked: list[str] = []

    async def ask(path: str, body: bytes, *, request_id: str, key: ApiKey | None = None) -> LineAnswer:
        asked.append(request_id)
        await asyncio.sleep(0)
        return LineAnswer(429, b"{}", retry_after=0.001) if 60 < len(asked) < 300 else LineAnswer(200, b"{}")

    async def steps(client: Client) -> None:
        assert client.app.batches is not None
        lines_run = runner.BatchRunner(client.app.batches.store, runner.Serving(ask, lambda _: None, Window, 1000))
        lines_run.start()
        try:
            done = await client.ended(await client.create("\n".join(line(str(number)) for number in range(150))))
        finally:
            await lines_run.stop()
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", 150)
        again = [each for each in set(asked) if asked.count(each) > 2]
        assert len(again) == 1

    run(tmp_path, steps, starts=False)


def test_J20_bytes_count_once_however_many_batches_have_them(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        file = (await client.upload("x" * 500))["id"]
        assert client.app.batches is not None
        used = client.app.batches.store.used
        for _ in range(3):
            assert (await client.post_batch(input_file_id=file)).status == 200
            assert used() == 500
        await client.send("DELETE", f"/v1/files/{file}")
        assert used() == 500
        assert error_of(await client.send("POST", "/v1/files", form("y" * 500), FORM))[0] == 413

    run(tmp_path, steps, starts=False, max_files_bytes=1000)


def test_J20_uploads_at_a_time_do_not_share_the_same_room(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        assert client.app.batches is not None
        store = client.app.batches.store
        first = store.begin_upload(600)
        for announced in (600, None):
            with pytest.raises(TooLarge, match="all files have"):
                store.begin_upload(announced)
        first.write(b"a")
        assert store.add_file(first, "", "a", 3600).bytes == store.used() == 1
        first.close()
        store.begin_upload(900).close()
        assert store.used() == 1

    run(tmp_path, steps, starts=False, max_files_bytes=1000)


def test_J23_a_folder_that_goes_away_is_said_and_used_again_when_it_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "batches"

    async def steps(client: Client) -> None:
        file = (await client.upload(line("a")))["id"]
        folder.rename(tmp_path / "away")
        status, message, _ = error_of(await client.send("GET", "/v1/files"))
        assert (status, "folder of batches: No such file" in message) == (507, True)
        assert error_of(await client.send("POST", "/v1/files", form("a"), FORM))[0] == 507
        assert error_of(await client.post_batch(input_file_id=file))[0] in (404, 507)
        assert (await client.send("POST", EMBEDDINGS, b'{"input": "a"}', "application/json")).status == 200
        (tmp_path / "away").rename(folder)
        batch = json.loads((await client.post_batch(input_file_id=file)).body)
        assert (await client.ended(batch))["status"] == "completed"

    run(folder, steps)


def test_J16_an_input_may_be_deleted_while_its_batch_runs(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        client.embedder.go.clear()
        batch = await client.create("\n".join(line(str(number)) for number in range(60)))
        await client.ended(batch, "in_progress")
        assert (await client.send("DELETE", f"/v1/files/{batch['input_file_id']}")).status == 200
        assert (await client.send("GET", f"/v1/files/{batch['input_file_id']}/content")).status == 404
        client.embedder.go.set()
        done = await client.ended(batch)
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", 60)

    run(tmp_path, steps)


def test_J16_lines_that_come_after_their_model_has_gone_have_the_error(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        client.embedder.go.clear()
        batch = await client.create("\n".join(line(str(number), input="a", model="fake") for number in range(60)))
        await client.ended(batch, "in_progress")
        while not client.embedder.requests:
            await asyncio.sleep(0.01)
        client.served.switch([])
        client.embedder.go.set()
        done = await client.ended(batch)
        counts = done["request_counts"]
        assert (done["status"], counts["completed"] + counts["failed"]) == ("completed", 60)
        assert counts["completed"] == len(client.embedder.requests)
        assert {each["response"]["status_code"] for each in await client.lines(done["error_file_id"])} == {404}

    run(tmp_path, steps)


def test_H20_names_of_files_are_kept_short_and_without_control_characters(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        kept = await client.upload("a", name="a\x00\tb\u202e.jsonl" + "x" * 500)
        assert kept["filename"].startswith("'a\\x00\\tb\\u202e.jsonl")
        assert len(kept["filename"]) < 300
        answer = await client.send("GET", f"/v1/files/{kept['id']}/content")
        assert "content-disposition" not in answer.headers
        assert answer.headers["content-type"] == "application/octet-stream"

    run(tmp_path, steps, starts=False)


def test_J19_lists_have_pages(tmp_path: Path) -> None:
    async def steps(client: Client) -> None:
        files = [(await client.upload(str(number)))["id"] for number in range(5)]
        listed = await client.get("/v1/files")
        assert [each["id"] for each in listed["data"]] == files[::-1]
        assert (listed["object"], listed["has_more"], listed["first_id"], listed["last_id"]) == (
            "list",
            False,
            files[-1],
            files[0],
        )

    run(tmp_path, steps, starts=False)


def test_without_a_folder_there_are_no_such_routes() -> None:
    app = create_app(ModelRegistry(FakeEmbedder()))
    assert app.batches is None
    assert asyncio.run(call(app, "GET", "/v1/files")).status == 404
    assert asyncio.run(call(app, "POST", "/v1/batches", body=b"{}")).status == 404
