"""Models that come, change and go while a server serves (G5, G6, G11 to G14, H15 of the catalogue)."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import fault_injection
from checkpoints.variants import change_weights, write_variant
from load import ask, vectors_of
from serving import Server
from settings_file import key_of, write_settings
from texts import TEXTS
from waiting import wait_for
from whimbrel import Engine
from whimbrel.types.arrays import Float32Array

AUTHORIZED = {"authorization": f"Bearer {key_of('operator')}"}
SOME = [text for text in TEXTS if text][:60]
HEADER = "x-whimbrel-revision"
SECONDS = 120
"""Patience of clients: this machine may be busy."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("variants")
    return {
        "a": write_variant(root / "a"),
        "near": write_variant(root / "near", 3, noise=0.001),
        "far": write_variant(root / "far", 4),
        "wide": write_variant(root / "wide", width=64),
    }


@pytest.fixture(scope="module")
def expected(folders: Mapping[str, Path]) -> Mapping[str, Float32Array]:
    """The vectors of SOME by each revision, as an engine in this process computes them."""
    found: dict[str, Float32Array] = {}
    for folder in folders.values():
        with Engine(folder, dtype="float32") as engine:
            found[engine.plan.revision] = engine.embed(SOME)
    return found


class Operated(Server):
    """A server with a key for its operator, which opens the routes of clients too."""

    def __init__(self, folder: Path, *args: str, file: Path, name: str = "m", **env: str) -> None:
        write_settings(file, keys={"operator": {"admin": True, "routes": ["/v1/embeddings", "/v1/rerank", "/v1/models"]}})
        flags = ("--served-name", name, "--dtype", "float32", "--max-queue-seconds", "1000")
        super().__init__(str(folder), *flags, "--config", str(file), *args, **env)

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=SECONDS, headers=AUTHORIZED)

    def put(self, name: str, **table: Any) -> httpx2.Response:
        with self.client() as client:
            return client.post("/admin/models", json={"name": name} | table)

    def delete(self, name: str) -> httpx2.Response:
        with self.client() as client:
            return client.request("DELETE", f"/admin/models/{name}")

    def ask(self, texts: list[str], model: str = "m") -> httpx2.Response:
        with self.client() as client:
            return ask(client, texts, model=model)

    def models(self) -> dict[str, Any]:
        with self.client() as client:
            return {model["name"]: model for model in client.get("/admin/models").json()["models"] if model["served"]}

    def alone(self, num_engines: int = 1) -> bool:
        """Wait until no model drains any more."""
        return wait_for(lambda: len(self.children("engine")) == num_engines)


@pytest.fixture(scope="module")
def server(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    file = tmp_path_factory.mktemp("settings") / "whimbrel.toml"
    with Operated(folders["a"], "--workers", "2", file=file, **fault_injection.ENVIRONMENT) as server:
        yield server


class Clients:
    """Clients that compare each answer with the vectors of the revision that its header names."""

    def __init__(self, url: str, expected: Mapping[str, Float32Array], *, num: int = 2, model: str = "m") -> None:
        self.wrong: list[str] = []
        self.statuses: list[int] = []
        self.revisions: set[str] = set()
        self._stop = threading.Event()
        self._args = url, expected, model
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(num)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a client hangs"

    def _run(self, seed: int) -> None:
        url, expected, model = self._args
        rng = random.Random(seed)
        with httpx2.Client(base_url=url, timeout=SECONDS, headers=AUTHORIZED) as client:
            while not self._stop.wait(0.02):  # the engines that load need the processor too
                chosen = rng.choices(range(len(SOME)), k=rng.choice((1, 1, 3, 40)))
                try:
                    answer = ask(client, [SOME[i] for i in chosen], model=model)
                except httpx2.HTTPError as error:
                    self.wrong.append(repr(error))
                    continue
                self.statuses.append(answer.status_code)
                if answer.status_code != 200:
                    self.wrong.append(answer.text[:200])
                    continue
                revision = answer.headers[HEADER]
                self.revisions.add(revision)
                if not np.array_equal(vectors_of(answer), expected[revision][chosen]):
                    self.wrong.append(f"not the vectors of {revision}")

    def more(self, num: int = 10) -> bool:
        """Wait for further answers."""
        before = len(self.statuses)
        return wait_for(lambda: len(self.statuses) >= before + num)


def right(answer: httpx2.Response, texts: list[str], expected: Mapping[str, Float32Array]) -> bool:
    if answer.status_code != 200:
        return False
    rows = expected[answer.headers[HEADER]]
    return np.array_equal(vectors_of(answer), rows[[SOME.index(text) for text in texts]])


def test_G5_a_model_is_replaced_under_load(
    server: Operated, folders: Mapping[str, Path], expected: Mapping[str, Float32Array]
) -> None:
    with Clients(server.url, expected) as clients:
        for name in ("near", "a", "far", "near", "a"):
            assert clients.more()
            answer = server.put("m", source=str(folders[name]), min_cosine="any")
            assert answer.status_code == 200, answer.text
            assert clients.more()
    assert clients.wrong == []
    assert len(clients.revisions) == 3
    assert server.alone()


def test_G5_pairs_that_two_engines_score_are_of_one_model(
    server: Operated, folders: Mapping[str, Path], expected: Mapping[str, Float32Array]
) -> None:
    """Each engine scores a part of a list while the model is replaced, and each list has the scores of one revision."""
    short = [number for number, text in enumerate(SOME) if len(text) < 20]
    options = {"replicas": 2, "max_batch_tokens": 64}
    assert server.put("n", source=str(folders["a"]), **options).status_code == 200
    wrong: list[str] = []
    revisions: set[str] = set()
    stop = threading.Event()

    def run(seed: int) -> None:
        rng = random.Random(seed)
        with server.client() as client:
            while not stop.is_set():
                query, *chosen = rng.choices(short, k=201)
                body = {"model": "n", "query": SOME[query], "documents": [SOME[number] for number in chosen]}
                answer = client.post("/v1/rerank", json=body)
                if answer.status_code != 200:
                    wrong.append(answer.text[:200])
                    continue
                revisions.add(answer.headers[HEADER])
                rows = expected[answer.headers[HEADER]]
                told = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
                if not np.allclose([told[i] for i in range(200)], rows[chosen] @ rows[query], atol=1e-5):
                    wrong.append(f"not the scores of {answer.headers[HEADER]}")

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(run, seed) for seed in range(2)]
        try:
            for name in ("far", "a"):
                answer = server.put("n", source=str(folders[name]), min_cosine="any", **options)
                assert answer.status_code == 200, answer.text
                assert wait_for(lambda: answer.json()["revision"] in revisions)  # noqa: B023
        finally:
            stop.set()
    assert [each.result() for each in running] == [None, None]
    assert wrong == []
    assert len(revisions) == 2
    assert server.delete("n").status_code == 200
    assert server.alone()


def test_G5_a_worker_is_killed_while_an_operator_waits(server: Operated, folders: Mapping[str, Path]) -> None:
    """The next life of the worker gets no answers to commands of the last."""
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(server.put, "m", source=str(folders["near"]))
        assert wait_for(lambda: len(server.children("engine")) == 2)
        for worker in server.children("worker"):
            os.kill(worker, signal.SIGKILL)
        assert isinstance(lost.exception(SECONDS), httpx2.HTTPError)
    assert wait_for(lambda: server.models()["m"]["source"] == str(folders["near"]))
    workers = server.children("worker")
    assert server.put("m", source=str(folders["a"])).status_code == 200
    assert server.children("worker") == workers
    assert "bug" not in server.log
    assert server.alone()


def test_G13_a_worker_takes_no_other_tokenizer_than_its_engines(
    server: Operated, folders: Mapping[str, Path], expected: Mapping[str, Float32Array], tmp_path: Path
) -> None:
    """A worker that starts after the files were changed refuses this model, serves the others, and takes the mended files."""
    folder = shutil.copytree(folders["far"], tmp_path / "far")
    tokenizer = folder / "tokenizer.json"
    right_one = tokenizer.read_text()
    assert server.put("n", source=str(folder)).status_code == 200
    for wrong in (
        right_one.replace('"lowercase":true', '"lowercase":false').replace('"lowercase": true', '"lowercase": false'),
        "{",
    ):
        assert wrong != right_one
        tokenizer.write_text(wrong)
        for worker in server.children("worker"):
            os.kill(worker, signal.SIGKILL)
        assert wait_for(lambda: server.ask(SOME[:1]).status_code == 200)
        assert right(server.ask(SOME[:3]), SOME[:3], expected)
        assert server.ask(SOME[:1], model="n").status_code == 503
    assert "others than when it was first loaded" in server.log
    tokenizer.write_text(right_one)
    assert wait_for(lambda: right(server.ask(SOME[:3], model="n"), SOME[:3], expected))
    assert server.delete("n").status_code == 200
    assert server.alone()


@pytest.mark.extended
def test_G5_a_worker_is_killed_while_a_model_is_replaced(
    server: Operated, folders: Mapping[str, Path], expected: Mapping[str, Float32Array]
) -> None:
    """Its connections are lost; no answer is wrong, and the new worker knows the models as they are then."""
    before = server.models()["m"]["revision"]
    with Clients(server.url, expected) as clients:
        assert clients.more()
        assert server.put("m", source=str(folders["near"]), wait=False).status_code == 202
        assert wait_for(lambda: len(server.children("engine")) == 2)
        os.kill(server.children("worker")[0], signal.SIGKILL)
        assert wait_for(lambda: server.models()["m"]["revision"] != before)
        assert clients.more(40)
    assert all("Error" in text for text in clients.wrong), clients.wrong
    assert len({server.ask(SOME[:1]).headers[HEADER] for _ in range(20)}) == 1
    assert server.put("m", source=str(folders["a"])).status_code == 200
    assert server.alone()


@pytest.mark.extended
def test_G5_an_engine_is_killed_while_its_model_drains(
    server: Operated, folders: Mapping[str, Path], expected: Mapping[str, Float32Array]
) -> None:
    """A request that began on the old model ends on it, also if its engine dies after the names have gone."""
    (old,) = server.children("engine")
    before = server.models()["m"]["revision"]
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.ask, [SOME[0], "@@sleep:10"])
        time.sleep(0.5)
        assert server.put("m", source=str(folders["near"])).status_code == 200
        assert not answer.done()
        assert server.ask(SOME[:1]).headers[HEADER] != before
        os.kill(old, signal.SIGKILL)
        first = answer.result(SECONDS)
    assert (first.status_code, first.headers[HEADER]) == (200, before)
    assert np.array_equal(vectors_of(first)[0], expected[before][0])
    assert server.alone()
    assert server.put("m", source=str(folders["a"])).status_code == 200
    assert server.alone()


def test_G5_an_engine_is_killed_while_it_loads(
    server: Operated, folders: Mapping[str, Path], expected: Mapping[str, Float32Array]
) -> None:
    (old,) = server.children("engine")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.put, "m", source=str(folders["near"]))
        assert wait_for(lambda: len(server.children("engine")) == 2)
        os.kill(max(server.children("engine")), signal.SIGKILL)
        refused = answer.result(SECONDS)
    assert refused.status_code == 422
    assert "SIGKILL" in refused.json()["error"]["message"]
    assert server.children("engine") == [old]
    assert right(server.ask(SOME[:3]), SOME[:3], expected)


def broken(folder: Path) -> Path:
    change_weights(folder, 1, float("nan"))
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folders, tmp: folders["far"], "cosine with the old one is"),
        (lambda folders, tmp: folders["wide"], "it gives 64 numbers for a text, the old one 48"),
        (lambda folders, tmp: broken(shutil.copytree(folders["a"], tmp / "broken")), "NaN or infinity"),
        (lambda folders, tmp: tmp / "nothing", "no folder"),
    ],
    ids=["far", "wide", "nan", "missing"],
)
def test_G5_a_model_that_may_not_replace_another_is_refused(
    make: Callable[[Mapping[str, Path], Path], Path],
    says: str,
    server: Operated,
    folders: Mapping[str, Path],
    expected: Mapping[str, Float32Array],
    tmp_path: Path,
) -> None:
    before = server.models()["m"]
    refused = server.put("m", source=str(make(folders, tmp_path)))
    assert refused.status_code == 422
    assert says in refused.json()["error"]["message"]
    assert server.models()["m"] | {"in_flight": 0, "idle_seconds": 0} == before | {"in_flight": 0, "idle_seconds": 0}
    assert right(server.ask(SOME[:3]), SOME[:3], expected)
    assert server.alone()


def test_G6_a_model_is_unloaded_under_load(
    server: Operated, folders: Mapping[str, Path], expected: Mapping[str, Float32Array]
) -> None:
    assert server.put("n", source=str(folders["far"]), replicas=2).status_code == 200
    with ThreadPoolExecutor(1) as threads, Clients(server.url, expected, model="n") as clients:
        assert clients.more()
        slow = threads.submit(server.ask, [SOME[0], "@@sleep:2"], model="n")
        time.sleep(0.5)
        assert server.delete("n").json()["state"] == "draining"
        assert clients.more()
        assert slow.result(SECONDS).status_code == 200
    assert set(clients.statuses) == {200, 404}
    assert all("no model 'n' here; this server serves m" in text for text in clients.wrong)
    assert server.delete("n").status_code == 404
    assert server.alone()


def test_G11_a_model_is_loaded_by_its_first_request_and_unloaded_when_idle(
    server: Operated, folders: Mapping[str, Path], expected: Mapping[str, Float32Array]
) -> None:
    put = server.put("k", source=str(folders["far"]), keep="1s")
    assert (put.status_code, put.json()["state"]) == (200, "unloaded")
    for wait in (True, False):
        refused = server.put("k", source=str(folders["a"]), keep="1s", wait=wait)
        assert (refused.status_code, "was never loaded" in refused.text) == (422, True)
    assert len(server.children("engine")) == 1
    with server.client() as client:
        assert "k" in {model["id"] for model in client.get("/v1/models").json()["data"]}
        assert client.get("/health/ready").status_code == 200
        late = ask(client, SOME[:1], model="k")  # warm: the next has too little time
        assert right(late, SOME[:1], expected)
        assert wait_for(lambda: server.models()["k"]["state"] == "unloaded")
        client.headers["x-request-timeout"] = "0.2"
        assert ask(client, SOME[:1], model="k").status_code == 504
        del client.headers["x-request-timeout"]
        assert server.models()["k"]["state"] == "loading"  # it goes on
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda text: server.ask([text], model="k"), SOME[:4]))
        assert all(right(answer, [text], expected) for answer, text in zip(answers, SOME, strict=False))
        assert len(server.children("engine")) == 2  # one load for all
        names = {engine["name"] for model in server.models().values() for engine in model["engines"]}
        assert names < {f"engine-{number}-0" for number in range(3)}  # however many there were: metrics go by these names
        for name, status in (("m", 409), ("nothing", 404), ("k", 200)):
            assert client.post("/models/unload", json={"model": name}).status_code == status
        assert wait_for(lambda: server.models()["k"]["state"] == "unloaded")
        assert client.post("/models/load", json={"model": "k"}).json() == {"success": True}
        assert wait_for(lambda: server.models()["k"]["state"] == "ready")
        for _ in range(3):  # as it is being unloaded, or has just been
            time.sleep(1.1)
            assert right(ask(client, SOME[:3], model="k"), SOME[:3], expected)
    assert server.delete("k").status_code == 200
    assert server.alone()


def test_G13_a_model_that_cannot_be_loaded_harms_no_other(
    server: Operated, folders: Mapping[str, Path], expected: Mapping[str, Float32Array], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["far"], tmp_path / "later")
    weights = (folder / "model.safetensors").read_bytes()
    assert server.put("k", source=str(folder), keep="5m").status_code == 200
    (folder / "model.safetensors").write_bytes(weights[:5000])
    refused = server.ask(SOME[:1], model="k")
    assert refused.status_code == 503
    assert "k cannot be loaded" in refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert right(server.ask(SOME[:3]), SOME[:3], expected)
    with server.client() as client:
        assert client.get("/health/ready").status_code == 200
    assert server.models()["k"]["error"]
    (folder / "model.safetensors").write_bytes(weights)
    assert wait_for(lambda: server.ask(SOME[:1], model="k").status_code == 200)
    change_weights(folder, 9, 1.0)  # other files under a model that is served: its engine must not come back with them
    (engine,) = [each["pid"] for each in server.models()["k"]["engines"]]
    os.kill(engine, signal.SIGKILL)
    assert wait_for(lambda: "others than when it was first loaded" in server.log)
    assert server.delete("k").status_code == 200
    assert server.alone()


def test_G12_models_make_room_for_each_other(
    server: Operated, folders: Mapping[str, Path], expected: Mapping[str, Float32Array], tmp_path: Path
) -> None:
    """Memory has room for two of three models, as measured; one that is always kept stays."""
    limit = round(2.3 * server.models()["m"]["memory_bytes"])  # processes share libraries: two take less than twice as much
    with Operated(folders["a"], "--set", f"memory={limit}", file=tmp_path / "whimbrel.toml") as server:
        for name in ("near", "far"):
            assert server.put(name, source=str(folders[name]), keep="1h").status_code == 200
        for name in ("near", "far", "near"):
            answer = server.ask(SOME[:3], model=name)
            assert right(answer, SOME[:3], expected)
            assert wait_for(lambda: server.models()[name]["state"] == "ready")  # noqa: B023
            states = {each: model["state"] for each, model in server.models().items()}
            assert states["m"] == "ready"
            assert "unloaded" in states.values()
            assert len(server.children("engine")) == 2
        refused = server.put("m", source=str(folders["near"]), replicas=2)
        assert refused.status_code == 507
        assert f"memory is {limit:,} bytes" in refused.json()["error"]["message"]
        assert right(server.ask(SOME[:3]), SOME[:3], expected)


@pytest.mark.extended
def test_G12_a_model_larger_than_memory_is_refused(folders: Mapping[str, Path], tmp_path: Path) -> None:
    with Operated(folders["a"], "--set", "memory=50000000", "--set", "keep=10m", file=tmp_path / "whimbrel.toml") as server:
        answer = server.ask(SOME[:1])
        assert answer.status_code == 503
        assert "memory is 50,000,000 bytes" in answer.text
        assert server.children("engine") == []


def test_G14_sigterm_while_a_model_is_replaced(folders: Mapping[str, Path], tmp_path: Path) -> None:
    with Operated(folders["a"], file=tmp_path / "whimbrel.toml") as server, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.put, "m", source=str(folders["near"]))
        assert wait_for(lambda: len(server.children("engine")) == 2)
        children = server.children()
        assert server.stop() == 0
        assert "about to stop" in answer.result(SECONDS).text
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)
        assert "bug" not in server.log
