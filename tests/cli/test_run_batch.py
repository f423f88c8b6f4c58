"""`whimbrel run-batch`: files of requests to files of answers, in their order, by a model here or by a server."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command import Here
from fake_embedder import FakeServer
from waiting import wait_for
from whimbrel import Engine

EMBEDDINGS = "/v1/embeddings"


def request(custom_id: str, url: str = EMBEDDINGS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(file: Path, requests: Sequence[object]) -> Path:
    file.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in requests))
    return file


def read(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def without_times(data: bytes) -> bytes:
    """Return answers without the ids and times that each has of its own."""
    return re.sub(rb'"created":\d+', b"", re.sub(rb'"id":"(embd|score|rerank)-\w+"', b"", data))


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """A server whose answers take a while."""
    with FakeServer(seconds=0.05) as server:
        yield server


def test_J17_every_line_has_its_answer_or_its_error_in_the_order_of_the_file(
    here: Here, engine: Engine, tmp_path: Path
) -> None:
    texts = [f"text number {number}" for number in range(20)]
    requests = [
        *(request(f"t{number}", input=text) for number, text in enumerate(texts)),
        "no json at all",
        request("score", "/v1/score", text_1="a query", text_2=["a document", "another"]),
        request("rerank", "/v1/rerank", query="a query", documents=["a document", "another"]),
        request("unknown url", "/v1/nowhere", input="a"),
        request("unknown model", input="a", model="other"),
        request("wrong body", input=7),
        request("own route", "/v1/batches", input="a"),
        request("a page", "/metrics"),
        request("binary", input="a", encoding_format="bytes"),
        request("t0", input=texts[0]),
        "",
        {**request("get", input="a"), "method": "GET"},
        request("base64", input="a", encoding_format="base64"),
        *(
            request(f"as vLLM {url}", url, text_1="a query", text_2=["a document", "another"])
            for url in ("/score", "/v1/score")
        ),
        *(
            request(f"as vLLM {url}", url, query="a query", documents=["a document", "another"])
            for url in ("/rerank", "/v1/rerank", "/v2/rerank")
        ),
    ]
    source, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    _, err = here.run("run-batch", "-i", str(source), "-o", str(out), code=3)
    assert b"37 requests, of which 8 were refused" in err
    answers = read(out)
    assert [each["custom_id"] for each in answers] == [
        each["custom_id"] if isinstance(each, dict) else "" for each in requests if each
    ]
    assert [each["response"]["status_code"] for each in answers] == [200] * 20 + [
        400,
        200,
        200,
        404,
        404,
        400,
        404,
        404,
        400,
        200,
        400,
        200,
        *[200] * 5,
    ]
    for answer in answers:
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert (
            (answer["response"]["body"] is None) == (answer["error"] is not None) == (answer["response"]["status_code"] != 200)
        )
        assert answer["error"] is None or answer["error"]["error"]["message"]
    assert "line 21" in answers[20]["error"]["error"]["message"]
    vectors = [each["response"]["body"]["data"][0]["embedding"] for each in answers[:20]]
    assert np.array_equal(np.array(vectors, np.float32), engine.embed(texts))
    scores = [each["score"] for each in answers[21]["response"]["body"]["data"]]
    assert np.array_equal(np.float32(scores), engine.score("a query", ["a document", "another"]))
    for answer in answers[-5:]:
        body = answer["response"]["body"]
        found = sorted(body.get("data") or body["results"], key=lambda each: each["index"])
        assert [each.get("score", each.get("relevance_score")) for each in found] == pytest.approx(scores, abs=1e-6)
    assert answers[29]["response"]["body"]["data"] == answers[0]["response"]["body"]["data"]
    assert len({each["id"] for each in answers}) == len(answers)
    assert not out.with_name("out.jsonl.partial").exists()


def test_J17_a_file_of_nothing_gives_a_file_of_nothing(here: Here, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", ["", "  "]), tmp_path / "out.jsonl"
    here.run("run-batch", "-i", str(source), "-o", str(out))
    assert out.read_bytes() == b""


def test_what_is_wrong_with_the_command_is_said_before_a_model_is_loaded(here: Here, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [request("a", input="a")]), str(tmp_path / "out.jsonl")
    base = ("run-batch", "-i", str(source), "-o")
    assert "there is no file" in here.error("run-batch", "-i", str(tmp_path / "none"), "-o", out)
    assert "it is the input" in here.error(*base, str(source))
    assert "it is a folder" in here.error(*base, str(tmp_path))
    assert "no folder" in here.error(*base, str(tmp_path / "no" / "out"))
    assert "--model is for a model that runs here" in here.error(*base, out, "--url", "http://127.0.0.1:1", "-m", "x")
    assert "--max-length is for a model" in here.error(*base, out, "--url", "http://127.0.0.1:1", "--max-length", "3")
    assert "--url" in here.error(*base, out, "--url", "nowhere")
    assert "no regular file" in here.error(*base, "/dev/null")
    assert "no regular file" in here.error("run-batch", "-i", "/dev/null", "-o", out)
    assert "-i takes a file, and not a URL" in here.error("run-batch", "-i", "https://example.com/in.jsonl", "-o", out)
    assert "-o takes a file, and not a URL" in here.error(*base, "http://example.com/out.jsonl")
    assert not list(tmp_path.glob("*.partial"))


def command(source: Path, out: Path, server: FakeServer, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "whimbrel",
        "run-batch",
        "-i",
        str(source),
        "-o",
        str(out),
        "--url",
        f"http://127.0.0.1:{server.port}",
        *more,
    ]


def test_J16_a_run_that_is_killed_goes_on_to_the_same_answers(server: FakeServer, tmp_path: Path) -> None:
    requests = [request(f"r{number}", input=f"text {number}" if number % 10 else 7) for number in range(700)]
    source = write(tmp_path / "in.jsonl", [*requests[:80], "broken", *requests[80:]])
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert subprocess.run(command(source, whole, server), check=False, timeout=120, capture_output=True).returncode == 3
    numbers = [0]
    for _ in range(2):
        with subprocess.Popen(command(source, out, server), stderr=subprocess.DEVNULL) as process:
            assert wait_for(lambda: number_of(out) > numbers[-1], 30)  # it has got on since the last kill
            process.kill()
        numbers.append(number_of(out))
    assert not out.exists()
    assert subprocess.run(command(source, out, server), check=False, timeout=120, capture_output=True).returncode == 3
    assert without_times(out.read_bytes()) == without_times(whole.read_bytes())
    assert [each["custom_id"] for each in read(out)] == [*(f"r{i}" for i in range(80)), "", *(f"r{i}" for i in range(80, 700))]


def number_of(out: Path) -> int:
    """Return the number of the last line that a run has finished."""
    try:
        return json.loads((out.with_name(f"{out.name}.partial") / "progress.json").read_bytes())["number"]
    except FileNotFoundError:
        return 0


def test_J18_an_input_that_changes_during_its_run_gives_no_file(server: FakeServer, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request(f"r{number}", input="text") for number in range(500)])
    out = tmp_path / "out.jsonl"
    with subprocess.Popen(command(source, out, server), stderr=subprocess.PIPE) as process:
        assert wait_for(lambda: number_of(out) > 0, 30)
        with source.open("a") as file:
            file.write(json.dumps(request("late", input="text")) + "\n")
        told = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert b"has changed since the run began" in told
    assert not out.exists()
    again = subprocess.run(command(source, out, server), check=False, capture_output=True, timeout=60)
    assert (again.returncode, b"it differs in input" in again.stderr) == (1, True)


def test_H20_a_file_asks_a_server_for_routes_of_models_alone(server: FakeServer, tmp_path: Path) -> None:
    urls = ("/admin/models", "//example.com/v1/embeddings", "http://example.com/", "/v1/files", "/v1/embeddings?x=1", "")
    source, out = write(tmp_path / "in.jsonl", [request(url, url, input="a") for url in urls]), tmp_path / "out.jsonl"
    ended = subprocess.run(command(source, out, server), check=False, capture_output=True, timeout=60)
    assert ended.returncode == 3
    assert [each["response"]["status_code"] for each in read(out)] == [404] * len(urls)


def test_J18_the_answers_of_another_input_are_not_mixed(server: FakeServer, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [request("a", input="a")]), tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    partial.mkdir()
    (partial / "run.json").write_text("{}")
    refused = subprocess.run(command(source, out, server), check=False, capture_output=True, timeout=60)
    assert refused.returncode == 1
    assert b"has the answers of another run" in refused.stderr
    assert not out.exists()
    assert (
        subprocess.run(command(source, out, server, "--restart"), check=False, timeout=60, capture_output=True).returncode == 0
    )
    assert read(out)[0]["custom_id"] == "a"


def test_J18_two_runs_of_one_file_do_not_meet(server: FakeServer, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request(f"r{number}", input="text") for number in range(5000)])
    out = tmp_path / "out.jsonl"
    first = subprocess.Popen(command(source, out, server), stderr=subprocess.PIPE)
    assert wait_for(lambda: number_of(out) > 0, 30)
    second = subprocess.run(command(source, out, server), check=False, capture_output=True, timeout=60)
    first.send_signal(signal.SIGINT)
    told = first.communicate(timeout=30)[1]
    assert (second.returncode, first.returncode) == (1, 130)
    assert b"another run writes" in second.stderr
    assert b"the same command goes on" in told
    assert not out.exists()
