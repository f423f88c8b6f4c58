"""New options for a server that serves (G15 of the catalogue)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import pytest

from checkpoints.variants import write_variant
from waiting import wait_for

SCRIPT = Path(__file__).parents[1] / "support" / "reloading_server.py"


class Reloading:
    def __init__(self, **told: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._client = httpx2.Client(base_url=f"http://127.0.0.1:{self.line()}", timeout=120)

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, **told: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()

    def apply(self, **told: Any) -> str:
        self.tell(**told)
        return self.line()

    def models(self) -> dict[str, Any]:
        listed = self._client.get("/admin/models", headers={"authorization": "Bearer an-operator-s-key"}).json()
        return {model["name"]: model for model in listed["models"] if model["served"]}

    def ask(self, model: str, key: str = "") -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self._client.post("/v1/embeddings", json={"input": "x", "model": model}, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._client.close()
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(60) == 0
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("variants")
    return {name: str(write_variant(root / name, seed)) for name, seed in (("a", 0), ("b", 2))}


@pytest.fixture
def server(folders: dict[str, str]) -> Iterator[Reloading]:
    with Reloading(models={"x": {"source": folders["a"]}, "y": {"source": folders["b"]}}, keys=["old"]) as server:
        yield server


def test_G15_only_the_difference_is_done(server: Reloading, folders: dict[str, str], tmp_path: Path) -> None:
    a, b = folders["a"], folders["b"]
    before = server.models()
    assert server.ask("x", "old").status_code == 200
    for half_right in (
        {"x": {"source": a}, "z": {"source": str(tmp_path / "nothing")}},
        {"x": {"source": a, "names": ["z"]}, "z": {"source": b}},
        {"x": {"source": a, "dtype": "float3"}},
    ):
        assert server.apply(models=half_right, keys=["new"]).startswith("refused: ")
        assert server.ask("y", "old").status_code == 200
        assert server.models()["x"]["id"] == before["x"]["id"]
    changed = {"x": {"source": a}, "z": {"source": b, "names": ["y2"]}, "k": {"source": a, "keep": "10m"}}
    assert server.apply(models=changed, keys=["new"]) == "applied"
    after = server.models()
    assert {name: model["state"] for name, model in after.items()} == {"x": "ready", "z": "ready", "k": "unloaded"}
    assert after["x"]["id"] == before["x"]["id"]
    assert after["x"]["engines"] == before["x"]["engines"]  # nothing was done to it
    assert server.ask("x", "old").status_code == 401
    assert [server.ask(name, "new").status_code for name in ("x", "z", "y2", "k", "y")] == [200, 200, 200, 200, 404]


@pytest.mark.extended
def test_G15_of_options_that_come_meanwhile_the_last_are_applied(server: Reloading, folders: dict[str, str]) -> None:
    a, b = folders["a"], folders["b"]
    server.tell(models={"x": {"source": a}, "first": {"source": b}}, keys=["1"])
    server.tell(models={"x": {"source": a}, "second": {"source": b}}, keys=["2"])
    server.tell(models={"x": {"source": a}, "y": {"source": a}}, keys=["3"])  # another model on purpose
    assert [server.line() for _ in range(3)] == ["applied"] * 3
    assert wait_for(lambda: server.ask("x", "3").status_code == 200)
    revisions = {name: model["revision"] for name, model in server.models().items()}
    assert revisions["x"] == revisions["y"]
    assert set(revisions) == {"x", "y"}


@pytest.mark.extended
def test_G15_a_new_model_that_cannot_be_loaded_is_tried_again(
    server: Reloading, folders: dict[str, str], tmp_path: Path
) -> None:
    """Its card can be read, so the others are changed as told; its requests say why it is not there."""
    folder = write_variant(tmp_path / "late")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert server.apply(models={"x": {"source": folders["a"]}, "late": {"source": str(folder)}}) == "applied"
    refused = server.ask("late")
    assert refused.status_code == 503
    assert "late cannot be loaded" in refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert server.ask("x").status_code == 200
    assert set(server.models()) == {"x", "late"}
    assert server.models()["late"]["state"] in ("failed", "loading")
