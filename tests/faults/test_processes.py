"""F and G of the catalogue: processes that are killed, stopped, hang or go mad; signals and the end."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest

import fault_injection
import whimbrel
from checkpoints.encoders import write_bert
from checkpoints.families import DECODER, write_model
from checkpoints.sentence_layout import sentence_layout
from load import Load, ask, queued_tokens, vectors_of
from raw_http import Connection, head
from serving import Server
from texts import TEXTS
from waiting import wait_for
from whimbrel import Engine
from whimbrel.types.arrays import Float32Array

PATIENT = ("--max-queue-seconds", "1000")  # a busy machine must not turn requests away
SOME = [text for text in TEXTS if text][:200:2]


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Float32Array:
    return engine.embed(SOME)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*PATIENT) as server:
        yield server


def lives(pid: int) -> bool:
    """Return True if a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def golden(server: Server, expected: Float32Array) -> None:
    """The server is ready and right."""
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        assert wait_for(lambda: client.get("/health/ready").status_code == 200)
        assert np.array_equal(vectors_of(ask(client, SOME[:3])), expected[:3])


def test_F1_engine_killed_while_idle(server: Server, expected: Float32Array) -> None:
    (old,) = server.children("engine")
    os.kill(old, signal.SIGKILL)
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        assert np.array_equal(vectors_of(ask(client, SOME)), expected)
        assert client.get("/info").json()["models"][0]["plan"]["same_bits"] is True
    assert server.children("engine") != [old]
    golden(server, expected)


@pytest.mark.extended
def test_F2_engine_killed_half_way_through_a_split_text(tmp_path: Path) -> None:
    """The text runs again, from its beginning, and has the vector of an engine that lives."""
    write_model(tmp_path, "Qwen3", DECODER | {"head_dim": 16, "max_position_embeddings": 8192})
    sentence_layout(tmp_path, modes=("mean",))
    options = {"max_batch_tokens": 32, "max_length": 8192}
    text = "far " * 7000
    with Engine(str(tmp_path), dtype="float32", **options) as engine:  # pyright: ignore
        assert engine.plan.chunked_prefill
        expected = engine.embed([text])
    flags = ("--max-batch-tokens", "32", "--max-length", "8192", "--dtype", "float32")
    with Server(str(tmp_path), *flags, *PATIENT) as server, ThreadPoolExecutor(1) as threads:
        (old,) = server.children("engine")
        with httpx2.Client(base_url=server.url, timeout=120) as client:
            answer = threads.submit(ask, client, [text])
            time.sleep(0.4)  # it runs for seconds
            assert not answer.done()
            os.kill(old, signal.SIGKILL)
            assert np.array_equal(vectors_of(answer.result(120)), expected)
        assert server.children("engine") != [old]


@pytest.mark.extended
def test_F2_engine_killed_in_mid_batch_under_load(server: Server, expected: Float32Array) -> None:
    with Load(server.url, SOME, expected, sizes=(1, 10)) as load:
        for _ in range(4):
            assert wait_for(lambda: server.children("engine"))
            answered = len(load.statuses)
            assert wait_for(lambda: len(load.statuses) > answered + 20)  # noqa: B023
            os.kill(server.children("engine")[0], signal.SIGKILL)
    assert load.wrong == []
    assert set(load.statuses) == {200}
    golden(server, expected)


def test_F3_engine_that_is_stopped_is_replaced(expected: Float32Array) -> None:
    with Server("--step-timeout", "3") as server:
        (old,) = server.children("engine")
        os.kill(old, signal.SIGSTOP)
        with httpx2.Client(base_url=server.url, timeout=60) as client:
            assert np.array_equal(vectors_of(ask(client, SOME)), expected)
        assert server.children("engine") != [old]
        assert "stood still" in server.log


@pytest.mark.extended
def test_F3_worker_that_is_stopped_is_replaced(expected: Float32Array) -> None:
    with Server("--step-timeout", "3") as server:
        (old,) = server.children("worker")
        os.kill(old, signal.SIGSTOP)
        assert wait_for(lambda: server.children("worker") not in ([old], []))
        golden(server, expected)


def test_a_worker_that_is_killed_is_replaced(server: Server, expected: Float32Array) -> None:
    (old,) = server.children("worker")
    os.kill(old, signal.SIGKILL)
    assert wait_for(lambda: server.children("worker") not in ([old], []))
    golden(server, expected)
    assert len(server.children("engine")) == 1


def test_G9_supervisor_killed_leaves_nothing(expected: Float32Array) -> None:
    with Server("--workers", "2") as server, Load(server.url, SOME, expected, num_clients=2):
        children = server.children()
        assert len(children) == 3
        time.sleep(0.5)
        server.process.kill()
        assert wait_for(lambda: not any(map(lives, children)), 10)


@pytest.mark.extended
def test_G9_a_supervisor_that_is_killed_while_it_loads_leaves_nothing() -> None:
    with Server(wait=False) as server:
        assert wait_for(lambda: len(server.children()) == 2)
        children = server.children()
        server.process.kill()
        assert wait_for(lambda: not any(map(lives, children)), 1)


@pytest.mark.extended
def test_G1_sigterm_under_load(expected: Float32Array) -> None:
    with Server(*PATIENT) as server:
        with Load(server.url, SOME, expected, sizes=(30, 60)) as load, httpx2.Client(timeout=60, base_url=server.url) as probe:
            assert wait_for(lambda: len(load.statuses) > 4)
            server.process.send_signal(signal.SIGTERM)
            seen: set[tuple[int, int]] = set()

            def ended() -> bool:
                seen.add((probe.get("/health/live").status_code, probe.get("/health/ready").status_code))
                return server.process.poll() is not None

            wait_for(ended, 3)
            load._stop.set()
            assert server.process.wait(30) == 0
        assert (200, 503) in seen
        refused = [text for text in load.wrong if "about to stop" not in text and "Error" not in text]
        assert refused == []


def test_G2_a_second_signal_ends_at_once(expected: Float32Array) -> None:
    with Server(*PATIENT) as server, Load(server.url, SOME, expected, sizes=(200, 200)) as load:
        with httpx2.Client(timeout=60, base_url=server.url) as probe:
            assert wait_for(lambda: queued_tokens(probe) > 10_000)
        children = server.children()
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert server.process.wait(10) == 130
        assert time.monotonic() - started < 3
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)
        load._stop.set()


def test_G3_sigterm_while_loading() -> None:
    for seconds in (0.0, 0.5, 1.0):
        with Server(wait=False) as server:
            assert wait_for(server.children)
            time.sleep(seconds)
            assert server.stop() == 0
            assert "Traceback" not in server.log


def catches(server: Server, name: signal.Signals) -> bool:
    """Return True if the process has a handler of its own for the signal."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s+(\w+)", status)[1], 16) >> (name - 1) & 1)  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT], ids=lambda name: name.name)
def test_G3_a_signal_in_the_first_moments(name: signal.Signals) -> None:
    """From Whimbrel's first line on, while it imports, before and after there are other processes."""
    for milliseconds in (0, 5, 10, 20, 40, 70, 100, 150, 200, 250, 300, 350, 400, 500, 700):
        with Server(wait=False) as server:
            assert wait_for(lambda: catches(server, signal.SIGTERM))
            time.sleep(milliseconds / 1000)
            assert server.stop(name) == 0, milliseconds
            assert "Traceback" not in server.log
            assert "KeyboardInterrupt" not in server.log


@pytest.mark.extended
def test_G1_ctrl_c_in_a_terminal_reaches_all_processes_and_ends_them_in_order(expected: Float32Array) -> None:
    """A terminal sends SIGINT to the supervisor and to all its children."""
    with Server(*PATIENT, start_new_session=True) as server:
        with Load(server.url, SOME, expected, sizes=(30, 60)) as load:
            assert wait_for(lambda: len(load.statuses) > 2)
            os.killpg(server.process.pid, signal.SIGINT)
            assert server.process.wait(60) == 0
            load._stop.set()
        assert not [text for text in load.wrong if "about to stop" not in text and "Error" not in text]
        assert "Traceback" not in server.log
        assert "KeyboardInterrupt" not in server.log


def test_G4_what_is_left_when_the_time_is_over_gets_an_answer() -> None:
    with Server("--drain-timeout", "1", **fault_injection.ENVIRONMENT) as server:
        with ThreadPoolExecutor(2) as threads, httpx2.Client(base_url=server.url, timeout=60) as client:
            slow = threads.submit(ask, client, ["@@sleep:30"])
            time.sleep(0.5)
            assert server.stop() == 1
            assert slow.result().status_code == 503
            assert "retry-after" in slow.result().headers
        assert "draining" in server.log


def test_G4_bodies_that_wait_for_memory_get_an_answer_too() -> None:
    """A client that sends slowly holds the memory; the others wait unread until the time is over."""
    limits = '{"max_inflight_bytes": 1000000, "max_body_bytes": 1000000}'
    with (
        Server("--drain-timeout", "1", WHIMBREL_GUARDS=limits) as server,
        ThreadPoolExecutor(3) as threads,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        with Connection(server.port) as slow:
            slow.send(head(content_length=900_000))
            time.sleep(0.3)
            waiting = [threads.submit(ask, client, ["a"], user="x" * 900_000) for _ in range(3)]
            time.sleep(0.5)
            assert not any(each.done() for each in waiting)
            server.process.send_signal(signal.SIGTERM)
            for each in waiting:
                assert each.result().status_code == 503
                assert "retry-after" in each.result().headers
        assert server.process.wait(30) == 1


def test_G7_alive_before_it_is_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    seen: list[tuple[int, int]] = []
    with (
        Server("--port", str(port), wait=False) as server,
        httpx2.Client(timeout=60, base_url=f"http://127.0.0.1:{port}") as client,
    ):

        def ready() -> bool:
            seen.append((client.get("/health/live").status_code, client.get("/health/ready").status_code))
            if seen[-1] == (200, 503):
                answer = ask(client, ["a"])
                assert answer.status_code in (200, 503)
                assert answer.status_code == 200 or int(answer.headers["retry-after"]) >= 1
            return seen[-1] == (200, 200)

        assert wait_for(ready)
        server.stop()
        assert "/health" not in server.log
    assert (200, 503) in seen


def test_F12_only_monotonic_clocks_measure() -> None:
    """The wall clock says when a model was made known, a request came, an answer was made and sent, a batch did what, and how old files are."""
    source = Path(whimbrel.__file__).parent
    using = {str(path.relative_to(source)) for path in source.rglob("*.py") if "time.time()" in path.read_text()}
    assert using <= {
        "cli/models_on_disk.py",
        "dialects/common/responses.py",
        "telemetry/metrics.py",
        "server/app/app.py",
        "server/batches/records.py",
        "server/http/exchange.py",
        "server/app/request_context.py",
    }


@pytest.mark.extended
def test_F4_crash_loop(expected: Float32Array) -> None:
    """An engine that never comes up: the server says so, answers 503 with Retry-After, and recovers."""
    with Server() as server, httpx2.Client(base_url=server.url, timeout=100) as client:
        stop = threading.Event()

        def kill_on_sight() -> None:
            while not stop.is_set():
                for pid in server.children("engine"):
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)

        killer = threading.Thread(target=kill_on_sight)
        killer.start()
        try:
            answer = ask(client, SOME[:2])  # accepted before it is known that it will last
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            health = client.get("/health/ready")
            assert health.status_code == 503
            assert "keeps" in health.text
            assert "SIGKILL" in health.text
            assert client.get("/health/live").status_code == 200
            started = time.monotonic()
            assert ask(client, SOME[:2]).status_code == 503
            assert time.monotonic() - started < 1
        finally:
            stop.set()
            killer.join()
        assert wait_for(lambda: client.get("/health/ready").status_code == 200, 60)
        golden(server, expected)
        assert server.log.count("is started again in") >= 2


@pytest.mark.extended
def test_G1_a_terminal_that_hangs_up(expected: Float32Array) -> None:
    """It tells every process of its session; requests on their way are answered all the same."""
    with Server(*PATIENT, start_new_session=True, **fault_injection.ENVIRONMENT) as server:
        client = httpx2.Client(base_url=server.url, timeout=60)
        with client, ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(ask, client, ["@@sleep:5", *SOME])
            assert wait_for(lambda: queued_tokens(client) > 0)
            os.killpg(server.process.pid, signal.SIGHUP)
            assert np.array_equal(vectors_of(waiting.result())[1:], expected)
        assert server.process.wait(30) == 0


@pytest.mark.extended
def test_G1_a_server_under_nohup_does_not_hang_up(expected: Float32Array) -> None:
    with Server(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as server:
        server.process.send_signal(signal.SIGHUP)
        golden(server, expected)
        assert server.stop() == 0


def deafen() -> None:
    """Ignore and block the signals that a parent may have ignored and blocked for purposes of its own."""
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT], ids=lambda name: name.name)
def test_G1_a_parent_that_ignores_and_blocks_signals(name: signal.Signals, expected: Float32Array) -> None:
    """The server can be stopped, and it learns how its processes end."""
    with Server(preexec_fn=deafen) as server:
        os.kill(server.children("engine")[0], signal.SIGKILL)
        golden(server, expected)
        assert "SIGKILL" in server.log
        assert server.stop(name) == 0


@pytest.mark.extended
def test_G1_an_idle_server_drains_in_no_time() -> None:
    with Server("--drain-timeout", "0") as server:
        assert server.stop() == 0


@pytest.mark.extended
def test_two_models_and_two_replicas(minilm: Path, tmp_path: Path, engine: Engine, expected: Float32Array) -> None:
    """Models are chosen by name or alias; replicas share the work, and one's death is made good by the other."""
    other = tmp_path / "other"
    write_bert(other)
    sentence_layout(other)
    with Server(
        str(minilm), str(other), "--served-name", "minilm,text-embedding-3-small", "--served-name", "other", "--replicas", "2",
        "--workers", "2",
    ) as server, httpx2.Client(base_url=server.url, timeout=60) as client:  # fmt: skip
        assert len(server.children("engine")) == 4
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [
            "minilm",
            "text-embedding-3-small",
            "other",
        ]
        for name in ("minilm", "text-embedding-3-small"):
            answer = ask(client, SOME[:20], model=name)
            assert answer.json()["model"] == "minilm"
            assert np.array_equal(vectors_of(answer), expected[:20])
        with Engine(str(other)) as reference:
            assert np.array_equal(vectors_of(ask(client, SOME[:20], model="other")), reference.embed(SOME[:20]))
        assert ask(client, ["a"]).status_code == 400
        assert "minilm, text-embedding-3-small, other" in ask(client, ["a"]).text
        assert ask(client, ["a"], model="nope").status_code == 404
        assert client.get("/v1/models/text-embedding-3-small").json()["id"] == "text-embedding-3-small"
        os.kill(server.children("engine")[0], signal.SIGKILL)
        os.kill(server.children("engine")[-1], signal.SIGKILL)
        assert np.array_equal(vectors_of(ask(client, SOME, model="minilm")), expected)
        assert wait_for(lambda: client.get("/health/ready").status_code == 200 and len(server.children("engine")) == 4)
