"""A file of settings that is read again while the server serves (G15 to G18 of the catalogue)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

import fault_injection
from checkpoints.variants import write_variant
from raw_http import hold
from serving import Server
from settings_file import key_of, write_settings
from waiting import wait_for

OPERATOR = {"operator": {"admin": True}}
SERVES, KEEPS = "SIGHUP: the server serves what its file states now", "SIGHUP: nothing is changed: "


class Reloading(Server):
    """A server of a file that a test changes."""

    def __init__(self, file: Path, *args: str, **tables: Any) -> None:
        self.file = write_settings(file, **tables)
        super().__init__("--config", str(file), "--dtype", "float32", "--workers", "2", *args, **fault_injection.ENVIRONMENT)

    def hang_up(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def told(self) -> list[str]:
        """Return the ends of reloads, as the log has them."""
        return [line.partition("SIGHUP: ")[2] for line in self.log.splitlines() if SERVES in line or KEEPS in line]

    def reload(self, **tables: Any) -> str:
        """Change the file, have it read, and return what the log says of that."""
        before = len(self.told())
        write_settings(self.file, **tables)
        self.hang_up()
        assert wait_for(lambda: len(self.told()) > before)
        return self.told()[-1]

    def models(self) -> dict[str, Any]:
        listed = self.operate("GET").json()["models"]
        return {model["name"]: model for model in listed if model["served"]}

    def operate(self, method: str, path: str = "/admin/models", **options: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key_of('operator')}"}
        return httpx2.request(method, f"{self.url}{path}", headers=headers, timeout=120, **options)

    def ask(self, model: str = "x", key: str = "client", text: str = "x") -> httpx2.Response:
        headers = {"authorization": f"Bearer {key_of(key)}"}
        return httpx2.post(f"{self.url}/v1/embeddings", json={"input": text, "model": model}, headers=headers, timeout=120)

    def soon(self, status: int, **asked: str) -> bool:
        """Wait for a status: a worker takes other keys some moments after the log says so."""
        return wait_for(lambda: {self.ask(**asked).status_code for _ in range(8)} == {status})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("variants")
    return {name: str(write_variant(root / name, seed)) for name, seed in (("a", 0), ("b", 2))}


@pytest.fixture(scope="module")
def models(folders: dict[str, str]) -> dict[str, Any]:
    return {"x": {"source": folders["a"]}, "y": {"source": folders["b"]}, "z": {"source": folders["b"]}}


@pytest.fixture(scope="module")
def server(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reloading]:
    file = tmp_path_factory.mktemp("settings") / "whimbrel.toml"
    with Reloading(file, models=models, keys=OPERATOR | {"client": {}}) as server:
        yield server
        assert server.stop() == 0
        assert "bug" not in server.log


def engines(served: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: [engine["pid"] for engine in model["engines"]] for name, model in served.items()}


def test_G15_of_three_models_the_one_that_differs_is_replaced(
    server: Reloading, models: dict[str, Any], folders: dict[str, str]
) -> None:
    before = server.models()
    keys = OPERATOR | {"client": {}}
    assert server.reload(models=models | {"z": {"source": folders["b"], "max_batch_tokens": 64}}, keys=keys) in SERVES
    after = server.models()
    assert engines(after)["x"] == engines(before)["x"]
    assert engines(after)["y"] == engines(before)["y"]
    assert after["z"]["id"] > before["z"]["id"]
    assert wait_for(lambda: len(server.children("engine")) == 3)
    others = {"y": models["y"] | {"names": ["y2"]}, "k": {"source": folders["a"], "keep": "10m"}, "x": models["x"]}
    assert server.reload(models=others, keys=keys) in SERVES
    assert {name: model["state"] for name, model in server.models().items()} == {"x": "ready", "y": "ready", "k": "unloaded"}
    assert [engines(server.models())[name] for name in ("x", "y")] == [engines(before)[name] for name in ("x", "y")]
    assert server.models()["y"]["names"] == ["y", "y2"]
    assert [server.ask(name).status_code for name in ("x", "y", "y2", "k", "z")] == [200, 200, 200, 200, 404]
    assert server.reload(models=models, keys=keys) in SERVES


def test_G15_what_is_half_right_is_refused_whole(
    server: Reloading, models: dict[str, Any], folders: dict[str, str], tmp_path: Path
) -> None:
    before = engines(server.models())
    late = write_variant(tmp_path / "late")
    weights = (late / "model.safetensors").read_bytes()
    (late / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    other_keys = OPERATOR | {"client": {}, "new": {}}
    for wrong, says in (
        ({}, "no model is stated any more"),
        ({"x": models["x"], "new": {"sauce": "x"}}, "models.new.sauce is not known. (did you mean source?)"),
        ({"x": models["x"] | {"names": ["y"]}, "y": models["y"]}, "has the name y already"),
        ({"x": models["x"], "new": {"source": str(tmp_path)}}, "config.json"),
        ({"x": models["x"], "late": {"source": str(late)}, "k": {"source": folders["a"], "keep": "1m"}}, "model.safetensors"),
    ):
        told = server.reload(models=wrong, keys=other_keys)
        assert told.startswith(KEEPS.removeprefix("SIGHUP: "))
        assert says in told
        assert server.ask(key="new").status_code == 401
        assert engines(server.models()) == before
    assert wait_for(lambda: len(server.children("engine")) == 3)
    assert server.reload(models=models, keys=OPERATOR | {"client": {}}) in SERVES
    assert engines(server.models()) == before


def test_G16_keys_come_go_and_change(server: Reloading, models: dict[str, Any]) -> None:
    def reload(**keys: Any) -> None:
        assert server.reload(models=models, keys=OPERATOR | {"client": {}} | keys) in SERVES

    reload(day={"tokens_per_day": 30}, short={})
    assert server.soon(200, key="short")
    while (left := server.ask(key="day")).status_code == 200:
        pass
    assert left.status_code == 429
    reload(new={"requests_per_minute": 1}, day={"tokens_per_day": 30})
    assert server.soon(401, key="short")
    assert server.soon(429, key="day")  # it is counted on
    reload(day={"tokens_per_day": 60})
    assert server.soon(401, key="new")
    told = server.ask(key="day")
    assert (told.status_code, told.headers["x-ratelimit-limit-tokens"]) == (429, "60")  # full at the same time as before
    reload(day={})
    assert server.soon(200, key="day")
    reload(day={"tokens_per_day": 60})
    assert server.soon(429, key="day")  # nor does it begin anew
    os.kill(server.children("worker")[0], signal.SIGKILL)
    assert wait_for(lambda: len(server.children("worker")) == 2)
    reload(**{f"team-{number}": {"requests_in_flight": 1} for number in range(2000)})  # more than the memory had room for
    assert server.soon(200, key="team-1999")
    assert server.soon(401, key="day")
    reload()


def test_G16_requests_in_flight_are_counted_on(server: Reloading, models: dict[str, Any]) -> None:
    def reload(most: int) -> None:
        assert server.reload(models=models, keys=OPERATOR | {"client": {}, "two": {"requests_in_flight": most}}) in SERVES

    reload(2)
    assert server.soon(200, key="two")
    body, headers = {"input": "x", "model": "x"}, {"authorization": f"Bearer {key_of('two')}"}
    with hold(server.port, body, **headers) as first, hold(server.port, body, **headers) as second:
        assert server.ask(key="two").status_code == 429
        reload(3)
        assert server.soon(200, key="two")  # a third
        reload(2)
        assert server.soon(429, key="two")
        for connection in (first, second):
            connection.send(b"}")
            assert connection.answer().status == 200
    assert server.soon(200, key="two")  # they ended where they were counted
    reload(2)


def test_G17_a_hundred_signals_under_load_lose_nothing(
    server: Reloading, models: dict[str, Any], folders: dict[str, str]
) -> None:
    keys = OPERATOR | {"client": {}, "budget": {"requests_per_minute": 10**6}}
    assert server.reload(models=models, keys=keys) in SERVES
    assert server.soon(200, key="budget")
    wrong: list[str] = []
    num_answers, stop = [0, 0], threading.Event()

    def run(number: int) -> None:
        with httpx2.Client(base_url=server.url, timeout=120, headers={"authorization": f"Bearer {key_of('budget')}"}) as client:
            while not stop.is_set():
                answer = client.post(
                    "/v1/embeddings", json={"input": ["x", "a few words"], "model": "xyz"[num_answers[number] % 3]}
                )
                num_answers[number] += 1
                if answer.status_code != 200:
                    wrong.append(answer.text)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    before = engines(server.models())
    for number in range(100):
        table = {"source": folders["b"], "max_batch_tokens": 64 + number}
        write_settings(server.file, models=models | {"z": table}, keys=keys | {f"key-{number}": {}})
        server.hang_up()
        time.sleep(0.01)
    assert wait_for(lambda: server.ask(key="key-99").status_code == 200)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert min(num_answers) > 10
    after = engines(server.models())
    assert (after["x"], after["y"]) == (before["x"], before["y"])
    assert after["z"] != before["z"]
    assert wait_for(lambda: len(server.children("engine")) == 3)
    info = httpx2.get(f"{server.url}/info", headers={"authorization": f"Bearer {key_of('client')}"}).json()
    assert [each["plan"]["max_batch_tokens"] for each in info["models"] if each["plan"]["served_name"] == "z"] == [163]
    assert server.reload(models=models, keys=OPERATOR | {"client": {}}) in SERVES


def test_G15_a_time_to_keep_changes_without_a_load(server: Reloading, models: dict[str, Any], folders: dict[str, str]) -> None:
    keys = OPERATOR | {"client": {}}
    lazy = {"source": folders["a"], "keep": "10m"}
    assert server.reload(models=models | {"k": lazy, "never": lazy}, keys=keys) in SERVES
    assert server.ask("k").status_code == 200
    before = engines(server.models())
    assert server.reload(models=models | {"k": lazy | {"keep": "2h"}, "never": lazy | {"max_length": 9}}, keys=keys) in SERVES
    after = server.models()
    assert engines(after) == before
    assert (after["k"]["keep_seconds"], after["never"]["state"]) == (7200.0, "unloaded")
    assert server.reload(models=models, keys=keys) in SERVES


def test_G18_a_model_that_is_put_during_a_reload_stays(
    server: Reloading, models: dict[str, Any], folders: dict[str, str]
) -> None:
    """Names that the file states are busy meanwhile, also those that it states no more."""
    keys = OPERATOR | {"client": {}}
    assert server.reload(models=models | {"y": models["y"] | {"names": ["y2"]}}, keys=keys) in SERVES
    before = len(server.told())
    write_settings(server.file, models=models | {"z": {"source": folders["b"], "max_batch_tokens": 32}}, keys=keys)
    server.hang_up()
    assert wait_for(lambda: len(server.children("engine")) == 4)
    lazy = {"source": folders["a"], "keep": "10m"}
    assert [server.operate("POST", json={"name": name} | lazy).status_code for name in ("z", "y2")] == [409, 409]
    assert server.operate("POST", json={"name": "z", "wait": False} | lazy).status_code == 409
    assert server.operate("DELETE", "/admin/models/y").status_code == 409
    assert server.operate("POST", json={"name": "q"} | lazy).status_code == 200
    assert wait_for(lambda: len(server.told()) > before)
    assert server.told()[-1] in SERVES
    assert list(server.models()) == ["x", "y", "z", "q"]
    assert [server.ask(name).status_code for name in ("q", "y2")] == [200, 404]
    assert server.operate("DELETE", "/admin/models/q").status_code == 200
    assert server.reload(models=models, keys=keys) in SERVES


def test_G15_a_typo_is_one_line_in_the_log(server: Reloading, models: dict[str, Any]) -> None:
    before, num_lines = engines(server.models()), len(server.log.splitlines())
    server.file.write_text("[models.x")
    server.hang_up()
    assert wait_for(lambda: "whimbrel.toml:1" in server.told()[-1])
    server.file.write_text("[models.x]")
    server.hang_up()
    assert wait_for(lambda: "opens no server" in server.told()[-1])
    assert "the key clients names the model q" in server.reload(models=models, keys=OPERATOR | {"clients": {"models": ["q"]}})
    assert len(server.log.splitlines()) == num_lines + 3
    assert engines(server.models()) == before
    assert [server.ask(name).status_code for name in "xyz"] == [200] * 3


def test_G18_models_of_requests_stay_until_the_file_names_them(
    server: Reloading, models: dict[str, Any], folders: dict[str, str]
) -> None:
    keys = OPERATOR | {"client": {}}
    for name, options in (("q", {"source": folders["a"]}), ("y", {"source": folders["a"], "min_cosine": "any"})):
        assert server.operate("POST", json={"name": name, **options}).status_code == 200
    before = server.models()
    assert before["y"]["revision"] == before["x"]["revision"]
    assert server.reload(models=models, keys=OPERATOR | {"client": {}, "more": {}}) in SERVES
    assert engines(server.models()) == engines(before)  # the file says of y what it said before
    assert "two models are named q" in server.reload(models=models | {"x": models["x"] | {"names": ["q"]}}, keys=keys)
    assert server.reload(models=models | {"q": {"source": folders["b"]}}, keys=keys) in SERVES
    assert server.models()["q"]["revision"] == before["z"]["revision"]
    assert server.reload(models=models, keys=keys) in SERVES
    assert "q" not in server.models()
    assert server.operate("DELETE", "/admin/models/x").status_code == 200
    assert server.reload(models=models, keys=keys) in SERVES
    assert server.ask("x").status_code == 200


@pytest.mark.extended
def test_G14_sigterm_while_the_file_is_read_again(folders: dict[str, str], tmp_path: Path) -> None:
    with Reloading(tmp_path / "whimbrel.toml", models={"x": {"source": folders["a"]}}, keys=OPERATOR) as server:
        write_settings(server.file, models={"x": {"source": folders["b"]}}, keys=OPERATOR)
        server.hang_up()
        assert wait_for(lambda: len(server.children("engine")) == 2)
        assert server.stop() == 0
        assert "Traceback" not in server.log


@pytest.mark.extended
def test_G15_what_needs_another_start_is_named(folders: dict[str, str], tmp_path: Path) -> None:
    models = {"x": {"source": folders["a"]}}
    with Reloading(tmp_path / "whimbrel.toml", models=models, keys=OPERATOR) as server:
        told = server.reload(models=models, keys=OPERATOR | {"client": {}}, server={"host": "0.0.0.0", "log_format": "json"})
        assert told in SERVES
        assert "host, log_format: what has changed there needs a restart" in server.log
        assert server.soon(200)
        assert "TLS begins and ends" in server.reload(models=models, keys=OPERATOR, server={"ssl_certfile": "none.pem"})
        assert server.soon(200)
        assert server.stop() == 0
