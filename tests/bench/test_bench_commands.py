"""`whimbrel bench` as a user runs it: against a real server of MiniLM, against broken servers, and with Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench_servers import always, answer, fake_server
from serving import Server
from waiting import wait_for
from whimbrel import Engine
from whimbrel.errors import SetupError
from whimbrel_bench import clients
from whimbrel_bench.backends import Sample, find_backend, read_rows
from whimbrel_bench.clients import choose_processes
from whimbrel_bench.offline import cosines
from whimbrel_bench.processes import Worker, family
from whimbrel_bench.target import Target, TargetOptions

BENCH = [sys.executable, "-m", "whimbrel", "bench"]


def bench(*args: str, code: int = 0, cwd: Path | None = None) -> tuple[str, str]:
    """Return stdout and stderr of a command."""
    done = subprocess.run([*BENCH, *args], capture_output=True, text=True, check=False, timeout=200, cwd=cwd)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def numbers(block: str) -> dict[str, float]:
    """Return the numbers of a block by the names of its lines."""
    return {name: float(value) for name, value in re.findall(r"^(.{1,39}?):\s+([\d.]+)\s*$", block, re.MULTILINE)}


@pytest.mark.parametrize("backend", ["openai-embeddings", "rerank", "pooling", "tei", "ollama", "native"])
@pytest.mark.sample(2)
def test_every_backend_loads_our_server(backend: str, server: Server) -> None:
    """The server states the tokens of each request, and random prompts have as many as asked for."""
    dataset = "random-rerank" if backend == "rerank" else "random"
    out, err = bench(
        "serve", "--url", server.url, "--backend", backend, "--dataset-name", dataset, "--random-input-len", "16",
        "--random-batch-size", "2", "--num-prompts", "12", "--max-concurrency", "3", "--num-warmups", "2",
    )  # fmt: skip
    found = numbers(out)
    assert (found["Successful requests"], found["Failed requests"]) == (6, 0)
    assert found["Maximum request concurrency"] == 3
    if dataset == "random":
        assert found["Total input tokens"] == 12 * 16
    assert found["Input throughput (inputs/s)"] == pytest.approx(2 * found["Request throughput (req/s)"], abs=0.02)
    assert "count of the client" not in err
    assert "12 texts" in err


def test_results_are_written(server: Server, tmp_path: Path) -> None:
    args = ("serve", "--url", server.url, "--random-input-len", "12", "--num-prompts", "8", "--request-rate", "100")
    bench(
        *args, "--save-result", "--result-dir", str(tmp_path / "new"), "--save-detailed", "--metadata", "run=1",
        "--markdown", str(tmp_path / "t.md"), "--api-key", "secret-key", "--metric-percentiles", "50,99",
    )  # fmt: skip
    (file,) = (tmp_path / "new").iterdir()
    assert re.fullmatch(r"openai-embeddings-100\.0qps-all-MiniLM-L6-v2-\d{8}-\d{6}\.json", file.name)
    record = json.loads(file.read_text())
    assert record["completed"] == len(record["latencies"]) == 8
    assert record["run"] == "1"
    assert record["total_input_tokens"] == 96
    assert "p50_e2el_ms" in record
    text = (tmp_path / "t.md").read_text()
    assert "| " in text
    assert "secret-key" not in text
    bench(*args, "--save-result", "--result-filename", "mine.json", cwd=tmp_path)
    assert "latencies" not in json.loads((tmp_path / "mine.json").read_text())


def test_a_sweep_of_two_servers_makes_a_page(server: Server, tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    out, _ = bench(
        "serve", "--url", f"ours={server.url}", "--url", f"peer={server.url.replace('127.0.0.1', 'localhost')}", "--sweep",
        "20,40,inf", "--sweep-seconds", "0.5", "--num-prompts", "16", "--random-input-len", "12", "--picture", str(page),
    )  # fmt: skip
    assert out.count("Serving Benchmark Result") == 6
    rows = [line.split("|")[1:3] for line in out.splitlines() if line.startswith(("| ours", "| peer"))]
    assert [tuple(cell.strip() for cell in row) for row in rows] == [
        (name, rate) for rate in ("20", "40", "inf") for name in ("ours", "peer")
    ]
    assert page.read_text().count(", median") == 2


def test_datasets_from_files(server: Server, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": ["a query", "one document", "another"]}\n')
    args = ("serve", "--url", server.url, "--num-prompts", "3", "--dataset-path")
    out, _ = bench(*args, str(tmp_path / "p.jsonl"), "--dataset-name", "custom", "--backend", "rerank")
    assert numbers(out)["Successful requests"] == 3
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\nnot JSON\n')
    _, err = bench(*args, str(tmp_path / "bad.jsonl"), "--dataset-name", "custom", code=1)
    assert "bad.jsonl, line 2: no JSON" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--port", "9"), "cannot reach http://127.0.0.1:9"),
        (("--request-rate", "0"), "sends nothing"),
        (("--endpoint", "/nowhere"), "answers the first request with 404"),
        (("--model", "other"), "no model 'other'"),
        (("--backend", "rerank"), "the dataset has no queries"),
        (("--percentile-metrics", "ttft"), "of models that generate tokens"),
        (("--metric-percentiles", "101"), "no list of percentiles"),
        (("--extra-body", "{"), "no JSON object"),
        (("--header", "x"), "no name and value"),
        (("--sweep", "a"), "sends nothing"),
        (("--url", "a=http://h", "--url", "a=http://i"), "named twice"),
        (("--picture", "x.pdf"), "cannot draw .pdf"),
        (("--picture", "no/x.html"), "cannot write no/x.html"),
        (("--markdown", "/"), "cannot write /"),
        (("--save-result", "--result-filename", "no/x.json"), "cannot write no/x.json"),
        (("--save-result", "--result-dir", "/proc"), "cannot write /proc/"),
        (("--request-rate", "nan"), "sends nothing"),
        (("--request-rate", "-1"), "sends nothing"),
        (("--sweep", "5", "--request-rate", "5"), "has no effect with --sweep"),
        (("--sweep-seconds", "5"), "is of sweeps"),
        (("--scale", "small"), "is of presets"),
        (("--preset", "gritlm"), "--num-prompts has no effect: --preset gritlm settles it"),
        (("--dataset-path", "x.jsonl"), "is not read by --dataset-name random"),
        (("--dataset-name", "texts", "--dataset-path", "missing"), "cannot read missing"),
        (("--backend", "ollama", "--endpoint", "/v1/embeddings"), "has no vectors or scores"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.sample(4)
def test_bad_input_is_one_line_and_a_hint(args: tuple[str, ...], words: str, server: Server) -> None:
    where = () if "--port" in args or "--url" in args else ("--url", server.url)
    out, err = bench("serve", *where, "--num-prompts", "2", "--random-input-len", "8", *args, code=1)
    assert words in err
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines() if line.startswith(("error:", "hint:"))] == ["error", "hint"]


@pytest.mark.parametrize(
    "args",
    [
        ("serve", "--max-concurrency", "0"),
        ("serve", "--timeout", "inf"),
        ("serve", "--sweep", "5", "--sweep-seconds", "inf"),
        ("serve", "--random-range-ratio", "nan"),
        ("serve", "--client-processes", "0"),
        ("compare", "--rounds", "0"),
        ("offline", "--num-prompts", "0"),
    ],
    ids=" ".join,
)
@pytest.mark.sample(2)
def test_numbers_out_of_range_are_wrong_usage(args: tuple[str, ...]) -> None:
    out, err = bench(*args, code=2)
    assert "Invalid value for" in err
    assert out == ""


@pytest.mark.parametrize("command", ["compare", "offline"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(command: str, tmp_path: Path) -> None:
    out, err = bench(command, "--json", str(tmp_path / "no" / "x.json"), code=1)
    assert "cannot write" in err
    assert out == ""


def fails_after_the_first(response: bytes | None, seconds: float = 0.0) -> Callable[[int, socket.socket], bytes | None]:
    """Answer the request that asks whether the server works, and fail at all others."""

    def respond(number: int, connection: socket.socket) -> bytes | None:
        if number:
            time.sleep(seconds)
        return response if number else answer()

    return respond


@pytest.mark.parametrize(
    ("response", "seconds", "reason"),
    [
        (answer(500, b"broken"), 0.0, "HTTP 500: broken"),
        (None, 0.0, "closed the connection"),
        (answer(), 3.0, "no answer within 0.3 s"),
    ],
    ids=["500", "closes", "stalls"],
)
def test_a_failing_server_is_counted_and_explained_and_the_exit_code_is_1(
    response: bytes | None, seconds: float, reason: str
) -> None:
    with fake_server(fails_after_the_first(response, seconds)) as fake:
        out, err = bench(
            "serve", "--url", fake.url, "--num-prompts", "5", "--random-input-len", "4", "--timeout", "0.3", code=1
        )
    assert numbers(out)["Failed requests"] == 5
    assert "note: Failed, 5 of 5: " in err
    assert reason in err
    assert "Lengths are approximate" in err


@pytest.mark.parametrize("whole_group", [False, True], ids=["the process", "the terminal"])
@pytest.mark.sample(1)
def test_ctrl_c_prints_the_results_so_far(whole_group: bool) -> None:
    with fake_server(always(answer(), 0.02)) as fake:
        command = [
            *BENCH,
            "serve",
            "--url",
            fake.url,
            "--num-prompts",
            "100000",
            "--max-concurrency",
            "2",
            "--random-input-len",
            "4",
        ]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
            while len(fake.bodies) < 20:
                time.sleep(0.05)
            (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert 10 <= numbers(out)["Successful requests"] < 100_000
    assert "Stopped early" in err
    assert "Traceback" not in err


def test_a_terminal_shows_progress(tmp_path: Path) -> None:
    with fake_server(always(answer(), 0.05)) as fake:
        args = ["serve", "--url", fake.url, "--num-prompts", "40", "--max-concurrency", "1", "--random-input-len", "4"]
        ours, theirs = pty.openpty()
        shown = b""
        with subprocess.Popen([*BENCH, *args], stdout=subprocess.DEVNULL, stderr=theirs) as process:
            os.close(theirs)
            while process.poll() is None or select.select([ours], [], [], 0)[0]:
                if select.select([ours], [], [], 0.1)[0]:
                    try:
                        shown += os.read(ours, 2**16)
                    except OSError:
                        break
        os.close(ours)
    assert process.returncode == 0
    assert re.search(rb"\d+ of 40, \d+/s", shown)
    _, err = bench(*args[:1], "--url", "http://127.0.0.1:9", code=1)
    assert "\x1b[" not in err


def test_servers_are_compared(server: Server) -> None:
    args = ("--rounds", "3", "--num-prompts", "8", "--random-input-len", "12")
    out, _ = bench("compare", server.url, server.url.replace("127.0.0.1", "localhost"), *args)
    assert "lowest of 8 cosines 1.000000" in out
    assert re.search(r"ratio of medians over 3 rounds: [\d.]+ \(95 % interval [\d.]+ to [\d.]+\)", out)
    _, err = bench("compare", server.url, code=1)
    assert "two URLs" in err


def test_servers_that_differ_are_not_timed(server: Server) -> None:
    body = json.dumps({"data": [{"index": 0, "embedding": [1.0] * 384}]}).encode()
    with fake_server(always(answer(200, body))) as fake:
        out, err = bench(
            "compare", server.url, fake.url, "--num-prompts", "4", "--random-input-len", "12", "--model", "", code=1
        )
    assert re.search(r"lowest of 4 cosines is -?[\d.]+, text \d", err)
    assert "--min-cosine is 0.999" in err
    assert out == ""
    with fake_server(always(answer())) as fake:
        _, err = bench("compare", server.url, fake.url, "--num-prompts", "4", "--random-input-len", "12", "--model", "", code=1)
    assert "shape [384] on one side, [2] on the other" in err


@pytest.mark.parametrize("backend", ["openai-embeddings", "pooling", "tei", "ollama", "native", "rerank"])
def test_results_of_every_backend_are_read(backend: str, server: Server, engine: Engine) -> None:
    """A comparison checks the vectors and scores that the engine gives."""
    texts = ("a wader", "a long, curved bill", "wheat")
    target = Target(server.url, TargetOptions(backend=backend))
    target.connect()
    rows = read_rows(target.backend, target.ask(Sample(texts, "a bird" if backend == "rerank" else None)))
    expected = engine.score("a bird", list(texts)) if backend == "rerank" else engine.embed(list(texts))
    assert len(rows) == 3
    assert cosines(rows, [np.asarray(row) for row in expected]).min() > 0.99999


def test_an_answer_that_is_something_else_is_refused() -> None:
    with pytest.raises(SetupError, match="cannot be read"):
        read_rows(find_backend("openai-embeddings"), b'{"data": [1]}')


def test_client_processes_follow_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "usable_processors", lambda: 32)
    assert [choose_processes(rate, None, 10_000) for rate in (1.0, 2000.0, 9000.0, 1e9)] == [1, 1, 5, 16]
    assert choose_processes(float("inf"), 64, 10_000) == 1
    assert choose_processes(float("inf"), None, 10_000) == 10
    monkeypatch.setattr(clients, "usable_processors", lambda: 2)
    assert choose_processes(1e9, None, 10_000) == 1


@pytest.mark.parametrize("whole_group", [False, True], ids=["the process", "the terminal"])
@pytest.mark.sample(1)
def test_ctrl_c_in_a_sweep_prints_and_draws_the_results_so_far(whole_group: bool, tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    with fake_server(always(answer())) as fake:
        command = [*BENCH, "serve", "--url", fake.url, "--random-input-len", "4", "--num-prompts", "9000"]
        command += ["--sweep", "40,41", "--sweep-seconds", "1", "--picture", str(page)]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
            while len(fake.bodies) < 50:  # the first, 40 at the first rate, some at the second
                time.sleep(0.01)
            (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out.count("Serving Benchmark Result") == 2
    assert "| 41 |" in re.sub(" +", " ", out)
    assert "Stopped early" in err
    assert "Traceback" not in err
    assert page.read_text().count("<tr>") == 3


def test_ctrl_c_in_a_comparison_prints_the_rounds_so_far() -> None:
    with fake_server(always(answer(), 0.002)) as fake:
        command = [*BENCH, "compare", fake.url, fake.url, "--rounds", "10000", "--num-prompts", "4", "--random-input-len", "4"]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
            while len(fake.bodies) < 8 + 8 + 3 * 8:
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Stopped early: these are the rounds so far." in out
    assert re.search(r"ratio of medians over \d+ rounds: ", out)
    assert "Traceback" not in err


def test_a_server_that_fails_in_a_comparison_leaves_the_rounds_before() -> None:
    def respond(number: int, connection: socket.socket) -> bytes:
        return answer(500, b"broken") if number >= 40 else answer()

    with fake_server(respond) as fake:
        args = ("--rounds", "50", "--num-prompts", "4", "--random-input-len", "4")
        out, err = bench("compare", fake.url, fake.url, *args, code=1)
    assert "ratio of medians over 3 rounds" in out
    assert re.search(r"error: \w+: \d of \d requests failed: HTTP 500: broken. The rounds before are above.", err)


class _CtrlC:
    """An argument that a process reads before it calls anything; then Ctrl-C comes."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return signal.raise_signal, (signal.SIGINT,)


def _echo(_: object) -> Callable[[Any], Any]:
    return lambda message: message


def test_a_worker_does_not_hear_ctrl_c_while_it_starts() -> None:
    worker = Worker(_echo, _CtrlC())
    assert worker.ask("still here") == "still here"
    worker.close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the parent hears it"


def test_ctrl_c_ends_an_offline_run_at_once() -> None:
    command = [*BENCH, "offline", "--dtype", "float32", "--num-prompts", "20000"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
        assert wait_for(lambda: len(family(process.pid)) == 3)  # with multiprocessing's tracker and the process that computes
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == "", "no round has ended"
    assert "stopped while float32 ran" in err
    assert "Traceback" not in err
