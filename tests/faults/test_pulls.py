"""Ollama's ways to keep and to fetch models, with an operator's key, on a server with a hub on this machine (G11, G19)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx
import httpx2
import ollama
import pytest

from checkpoints.variants import write_variant
from fake_hub import FakeHub, Repository
from serving import Server
from settings_file import key_of, write_settings
from waiting import wait_for
from whimbrel.errors import SetupError
from whimbrel.server.processes.download_process import fetch_model

SECONDS = 120
"""Patience of clients: this machine may be busy."""
ROUTES = ["/api/embed", "/api/embeddings"]
LARGE = "notes.json"
"""A file that is fetched in many pieces, and not read."""


def files_of(folder: Path) -> dict[str, bytes]:
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(tmp_path_factory.mktemp("variants") / "a")


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[FakeHub]:
    files = files_of(folder) | {LARGE: Random(1).randbytes(3_000_000)}
    names = ("org/curlew", "org/twice", "org/left", "org/late")
    repositories = {name: Repository({"main": files}) for name in names}
    repositories["org/gguf"] = Repository({"main": {"config.json": b"{}", "q4.gguf": b"g" * 9000}})
    with FakeHub(repositories) as hub:
        yield hub


@pytest.fixture(scope="module")
def server(folder: Path, hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of m, which stays, and k, which is loaded by its first request; with an operator's key and a client's."""
    tmp = tmp_path_factory.mktemp("server")
    models = {"m": {"source": str(folder)}, "k": {"source": str(folder), "keep": "1h"}}
    keys: dict[str, Mapping[str, Any]] = {"operator": {"admin": True, "routes": ROUTES}, "client": {}}
    file = write_settings(tmp / "whimbrel.toml", models=models, keys=keys, defaults={"dtype": "float32"})
    hub_variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp / "hub"), "HF_HOME": str(tmp), "HF_HUB_OFFLINE": "0"}
    with Server("--config", str(file), **hub_variables) as server:
        yield server


def client_of(server: Server, key: str) -> ollama.Client:
    return ollama.Client(host=server.url, headers={"Authorization": f"Bearer {key_of(key)}"}, timeout=SECONDS)


@pytest.fixture
def operator(server: Server) -> Iterator[ollama.Client]:
    with client_of(server, "operator") as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[ollama.Client]:
    with client_of(server, "client") as client:
        yield client


def http(server: Server, key: str = "operator") -> httpx2.Client:
    return httpx2.Client(base_url=server.url, timeout=SECONDS, headers={"authorization": f"Bearer {key_of(key)}"})


def loaded(client: ollama.Client) -> dict[str, Any]:
    return {(model.name or "").removesuffix(":latest"): model for model in client.ps().models}


def state(server: Server, name: str) -> str:
    with http(server) as client:
        return next(each["status"]["value"] for each in client.get("/models").json()["data"] if each["id"] == name)


def test_G11_keep_alive_of_an_operator_goes_before_keep(operator: ollama.Client, client: ollama.Client, server: Server) -> None:
    """GET /api/ps tells it, also while a model loads. That of another key changes nothing."""
    assert loaded(client).keys() == {"m"}
    assert loaded(client)["m"].expires_at.year == 2318
    assert loaded(client)["m"].size > 1e6
    assert (state(server, "m"), state(server, "k")) == ("loaded", "unloaded")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(client.embed, "k", ["a wader"], keep_alive=0)
        assert wait_for(lambda: state(server, "k") == "loading")
        assert "k" not in loaded(client) or answer.done()
        assert len(answer.result(SECONDS).embeddings) == 1
    time.sleep(1.5)  # in which an operator's keep_alive would have unloaded it
    assert_expires(client, 3600)
    assert loaded(client)["k"].size > 1e6
    assert loaded(client)["k"].context_length == loaded(client)["m"].context_length
    for stated, seconds in (("10m", 600), (90, 90), ("1h30m", 5400)):
        operator.embed("k", "a", keep_alive=stated)
        assert wait_for(lambda: expires(client, seconds))  # noqa: B023
    operator.embeddings("k", "a", keep_alive=-1)
    assert wait_for(lambda: loaded(client)["k"].expires_at.year == 2318)
    operator.embed("k", "a", keep_alive=0)
    assert wait_for(lambda: state(server, "k") == "unloaded")
    assert loaded(client).keys() == {"m"}
    operator.embed("k", [], keep_alive="5m")
    assert wait_for(lambda: state(server, "k") == "loaded")
    assert_expires(client, 300)
    operator.embed("k", "", keep_alive=0)
    assert wait_for(lambda: state(server, "k") == "unloaded")
    client.embed("k", "a")
    assert_expires(client, 3600)  # its own time again
    operator.embed("m", "", keep_alive=0)  # stays
    operator.embed("k", "", keep_alive=0)
    assert wait_for(lambda: state(server, "k") == "unloaded")
    assert loaded(client).keys() == {"m"}


def expires(client: ollama.Client, seconds: float) -> bool:
    left = loaded(client)["k"].expires_at - datetime.now(UTC)
    return seconds - 20 < left.total_seconds() <= seconds + 3


def assert_expires(client: ollama.Client, seconds: float) -> None:
    assert expires(client, seconds), loaded(client)["k"].expires_at


@pytest.mark.parametrize("stated", ["abc", "-1", "10y", "", "1h 30m", "1" * 10_000, "NaN", "1e3s"])
def test_G11_a_time_that_is_none_is_refused(operator: ollama.Client, client: ollama.Client, stated: str) -> None:
    with pytest.raises(ollama.ResponseError, match="keep_alive: is '") as refused:
        operator.embed("m", "a", keep_alive=stated)
    assert refused.value.status_code == 400
    assert len(client.embed("m", "a", keep_alive=stated).embeddings) == 1  # ignored, as before


@pytest.mark.parametrize("stated", [b"true", b"[]", b"{}", b"NaN", b"1e400"])
def test_G11_a_time_of_another_type_is_refused(server: Server, stated: bytes) -> None:
    with http(server) as client:
        answer = client.post("/api/embed", content=b'{"model": "m", "input": "a", "keep_alive": %b}' % stated)
        assert (answer.status_code, answer.json().keys()) == (400, {"error"})
        assert client.post("/api/embed", json={"model": "m", "input": "a", "keep_alive": 1e300}).status_code == 200


def test_G19_what_is_pulled_can_be_used(operator: ollama.Client, client: ollama.Client, hub: FakeHub, server: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.pull("org/curlew")
    lines = list(operator.pull("org/curlew:latest", stream=True))
    assert [lines[0].status, *(line.status for line in lines[-3:])] == [
        "pulling manifest", "verifying sha256 digest", "writing manifest", "success",
    ]  # fmt: skip
    files = {line.digest: line for line in lines if line.digest}
    assert all(line.total == line.completed for line in files.values())
    sizes = {len(data) for data in hub.repositories["org/curlew"].revisions["main"].values()}
    assert {line.total for line in files.values()} <= sizes
    assert max(line.total or 0 for line in files.values()) == 3_000_000
    assert any((line.digest or "").startswith("sha256:") for line in files.values())
    assert "org/curlew:latest" in {model.model for model in client.list().models}
    assert len(client.embed("org/curlew", "a").embeddings) == 1
    left = loaded(client)["org/curlew"].expires_at - datetime.now(UTC)
    assert 200 < left.total_seconds() <= 303
    for again in (operator, client):
        assert again.pull("org/curlew").status == "success"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/nothing", "the hub answers 401 for org/nothing"),
        ("org/gguf", "no weights as safetensors; it has .gguf"),
        ("org/curlew@v9", "no revision 'v9'"),
        ("org/..", "'org/..' is no valid hub id"),
        ("tests/faults", "tests/faults is a folder of the server"),
    ],
)
def test_G19_what_cannot_be_pulled_says_why(operator: ollama.Client, server: Server, name: str, says: str) -> None:
    if "gguf" in name:
        with pytest.raises(ollama.ResponseError, match=says):
            list(operator.pull(name, stream=True))
    else:
        with pytest.raises(ollama.ResponseError, match=says) as refused:
            operator.pull(name)
        assert refused.value.status_code == 422
    assert not server.children("download")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("curlew", "no folder curlew, and this is no hub id"),
        ("../../nothing", "no folder ../../nothing, and this is no hub id"),
        ("org/../x", "this is no hub id"),
        ("/", "/ is a folder of the server"),
        ("~", "~ is a folder of the server"),
        ("a/b/c@d", "this is no hub id"),
        ("org/curlew@", "is no hub id with a revision"),
        ("org/\0", "is no valid hub id"),
    ],
)
def test_G19_a_name_that_is_no_hub_id_is_asked_of_no_hub(name: str, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        fetch_model(name, lambda *_: None)


@pytest.mark.parametrize("name", [None, "", " ", ":latest", "a\nb/c", "x" * 10_000])
def test_G19_a_name_that_is_none_is_refused(server: Server, name: str | None) -> None:
    with http(server) as client:
        answer = client.post("/api/pull", json={"model": name})
        assert (answer.status_code, answer.json()["error"][:7]) == (400, "model: ")
        refused = client.post("/api/pull", json={"model": "org/curlew", "insecure": True})
        assert (refused.status_code, refused.json()["error"][:10]) == (400, "insecure: ")
        elsewhere = client.post("/api/pull", json={"model": "org/late"}, headers={"origin": "https://a.example"})
        assert elsewhere.status_code == 403


def answers(server: Server) -> bool:
    with http(server) as client, suppress(httpx2.HTTPError):
        return client.get("/health/ready").status_code == 200
    return False


def slow(hub: FakeHub) -> None:
    hub.faults.piece, hub.faults.pause = 100_000, 0.3


def fast(hub: FakeHub) -> None:
    hub.faults.piece, hub.faults.pause = 65_536, 0.0


def test_G19_two_pulls_at_once_are_one(operator: ollama.Client, server: Server, hub: FakeHub) -> None:
    slow(hub)
    with ThreadPoolExecutor(2) as threads:
        pulls = [threads.submit(operator.pull, "org/twice") for _ in range(2)]
        assert wait_for(lambda: len(server.children("download")) == 2)
        fast(hub)
        assert [pull.result(SECONDS).status for pull in pulls] == ["success"] * 2
    with http(server) as client:
        models = client.get("/admin/models").json()["models"]
    assert [each["name"] for each in models].count("org/twice") == 1
    assert not server.children("download")


def test_G19_a_pull_ends_with_its_client_its_time_or_its_worker(operator: ollama.Client, server: Server, hub: FakeHub) -> None:
    slow(hub)
    lines = operator.pull("org/left", stream=True)
    first = next(line for line in lines if line.completed and line.completed < (line.total or 0))
    lines.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert wait_for(lambda: not server.children("download"))
    with http(server) as client:
        answer = client.post("/api/pull", json={"model": "org/left"}, headers={"x-request-timeout": "3"})
    assert (answer.status_code, "time that the request gave is over" in answer.text) == (200, True)
    assert wait_for(lambda: not server.children("download"))
    lines = operator.pull("org/left", stream=True)
    next(line for line in lines if line.completed)
    os.kill(server.children("worker")[0], signal.SIGKILL)
    with pytest.raises(httpx.HTTPError):
        list(lines)
    assert wait_for(lambda: not server.children("download"))
    assert wait_for(lambda: answers(server))
    asked = len(hub.requests)
    fast(hub)
    assert operator.pull("org/left").status == "success"
    (range_,) = {part for _, path, part in hub.requests[asked:] if "org/left" in path and path.endswith(f"/cdn/{LARGE}")}
    assert int(range_.removeprefix("bytes=").removesuffix("-")) >= (first.completed or 0)


def test_G19_a_broken_download_and_a_hub_in_trouble(operator: ollama.Client, hub: FakeHub) -> None:
    hub.faults.content[LARGE] = b"x" * 10
    try:
        with pytest.raises(ollama.ResponseError, match=r"of the .* bytes that it states|SHA-256 is"):
            operator.pull("org/late")
    finally:
        hub.faults.content.clear()
    hub.faults.status = 500
    try:
        with pytest.raises(ollama.ResponseError, match="the hub answers 500 for org/late"):
            list(operator.pull("org/late", stream=True))
    finally:
        hub.faults.status = 0


def test_G19_a_pull_ends_with_its_server(operator: ollama.Client, server: Server, hub: FakeHub) -> None:
    """The last test of this server."""
    slow(hub)
    lines = operator.pull("org/late", stream=True)
    next(line for line in lines if line.completed)
    children = server.children()
    server.process.terminate()
    with pytest.raises(ollama.ResponseError, match="the server is about to stop; what was fetched stays"):
        list(lines)
    assert server.process.wait(30) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
