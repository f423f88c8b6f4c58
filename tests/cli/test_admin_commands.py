"""The commands load, unload and ps, on a server that runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from checkpoints.variants import write_variant
from command import Here
from serving import Server
from settings_file import key_of, write_settings
from waiting import wait_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(tmp_path_factory.mktemp("variants") / "a")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = {"operator": {"admin": True}, "client": {}}
    models = {"m": {"source": str(folder)}, "late": {"source": str(folder), "keep": "1h"}}
    file = write_settings(tmp_path_factory.mktemp("settings") / "whimbrel.toml", models=models, keys=keys)
    with Server("--config", str(file), "--dtype", "float32") as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHIMBREL_ADMIN_KEY", key_of("operator"))


def out(here: Here, server: Server, *args: str) -> str:
    return here.run(*args, "--url", server.url)[0].decode()


def test_the_banner_says_what_is_loaded_later(server: Server) -> None:
    assert server.log.count("by its first request, and unloaded when idle for 3600 s") == 1


def test_a_model_comes_and_goes(here: Here, server: Server, folder: Path) -> None:
    assert " ready " in out(here, server, "ps")
    told = out(
        here, server, "load", "n", str(folder), "--set", "names=n2,n3", "--set", 'prompts={"query": "q: "}', "--set", "keep=1h"
    )
    assert told.startswith("n is loaded by its first request: revision files-")
    (found,) = [each for each in json.loads(out(here, server, "ps", "--json"))["models"] if each["name"] == "n"]
    assert (found["names"], found["keep_seconds"], found["source"]) == (["n", "n2", "n3"], 3600.0, str(folder))
    table = out(here, server, "ps")
    assert table.splitlines()[0].split() == ["NAME", "STATE", "REVISION", "DTYPE", "DEVICE", "MEMORY", "KEEP", "IN", "FLIGHT"]
    assert "3600 s" in table
    assert "Memory of models: " in table
    assert out(here, server, "load", "m", "--set", "max_batch_tokens=64").startswith("m is ready: revision files-")
    assert out(here, server, "unload", "n").startswith("n is served no more, and ends")
    gone = here.error("unload", "n", "--url", server.url)
    assert "no model 'n'" in gone
    assert "whimbrel ps lists the models" in gone
    assert out(here, server, "load", "w", str(folder), "--no-wait") == "w is being loaded; whimbrel ps shows it.\n"
    assert wait_for(lambda: "\n  w " in out(here, server, "ps") and out(here, server, "ps").count(" ready ") == 2)
    headers = {"authorization": f"Bearer {key_of('client')}"}
    answer = httpx2.post(f"{server.url}/v1/embeddings", json={"input": "x", "model": "w"}, headers=headers)
    assert answer.status_code == 200


def test_refusals_say_why(here: Here, server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = ("--url", server.url)
    assert "did you mean max_length?" in here.error("load", "n", str(folder), "--set", "max_lenght=9", *url)
    assert "--set max_length is '0'" in here.error("load", "n", str(folder), "--set", "max_length=0", *url)
    shorter = here.error("load", "m", "--set", "max_length=9", *url)
    assert "m is not replaced: its cosine" in shorter
    assert "--any" in shorter
    assert "no folder" in here.error("load", "n", "./nothing", *url)
    monkeypatch.setenv("WHIMBREL_ADMIN_KEY", key_of("client"))
    assert "admin = true" in here.error("ps", *url)
    monkeypatch.setenv("WHIMBREL_ADMIN_KEY", "wrong")
    assert "holds no key of this server" in here.error("ps", *url)
    monkeypatch.delenv("WHIMBREL_ADMIN_KEY")
    assert "WHIMBREL_ADMIN_KEY is not set" in here.error("ps", *url)
    monkeypatch.setenv("WHIMBREL_ADMIN_KEY", "any")
    assert "does not answer" in here.error("ps", "--url", "http://127.0.0.1:1")
