"""The command `whimbrel run`: its last line, its exit codes, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bulk_runs import dense_of, documents, files_of, table_of, write_lines
from command import error, run
from serving import Server
from whimbrel import Engine


def test_a_folder_of_files_becomes_a_folder_of_vectors(engine: Engine, tmp_path: Path) -> None:
    """The last line says rows done, cut and refused; the exit code is 3 if rows were refused, and 0 if none were."""
    rows = [
        {"key": number, "title": f"title {number}", "body": "far " * (400 if number == 3 else 3), "n": number}
        for number in range(20)
    ]
    path = write_lines(tmp_path / "rows.jsonl", [*rows, {"key": 20, "title": None}])
    out = tmp_path / "out"
    done = run(
        "run", str(path), "--text", "title,body", "--separator", ": ", "--id", "key", "--keep", "n", "--out", str(out), code=3
    )
    assert done.stdout == b""
    said = done.stderr.decode().splitlines()
    assert re.fullmatch(rf"20 rows done, 1 cut, 1 refused \({out}/errors\), in [\d.]+ s: {out}", said[-1])
    assert "  21 rows in 1 part" in said
    expected = engine.embed([f"{row['title']}: {row['body']}" for row in rows], truncate=True)
    assert table_of(out).column_names == ["key", "n", "cut", "dense"]
    assert np.abs(dense_of(out) - expected).max() < 1e-2


def test_usage_that_cannot_be_right(tmp_path: Path) -> None:
    path, out = str(write_lines(tmp_path / "rows.jsonl", [{"text": "a"}])), str(tmp_path / "out")
    for arguments, words in (
        (("--overlap", "3"), "--overlap is for --chunk"),
        (("--chunk", "3", "--overlap", "3"), "--overlap 3 must be less than --chunk 3"),
        (("--query", "q", "--outputs", "dense"), "--query gives scores, and goes with no other"),
        (("--outputs", "dens"), "--outputs takes dense, sparse, multi_vector, scores, not dens"),
        (("--url", "http://127.0.0.1:9", "--dtype", "float32"), "--dtype is for a model that runs here"),
    ):
        assert words in error("run", path, "--out", out, *arguments)
    assert "--out takes a folder of this machine" in error("run", path, "--out", "s3://bucket/vectors")
    assert f"--out takes a folder, and {path} is a file" in error("run", path, "--out", path)
    assert b"Missing option '--out'" in run("run", path, code=2).stderr
    assert b"Missing argument 'INPUT'" in run("run", code=2).stderr
    assert b"--dtype-out" in run("run", path, "--out", out, "--dtyp-out", "int8", code=2).stderr
    assert not Path(out).exists()


def test_a_run_by_a_server(server: Server, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", list(documents(30)))
    run("run", str(path), "--id", "id", "--url", server.url, "--dtype-out", "float16", "--out", str(tmp_path / "out"))
    assert str(table_of(tmp_path / "out").schema.field("dense").type) == "fixed_size_list<element: halffloat>[384]"


def test_ctrl_c_leaves_a_folder_that_goes_on(tmp_path: Path) -> None:
    """Ctrl-C ends the run with 130 and says how far it came; the same command gives the bytes of a run without it."""
    rows = [{"text": f"{number} " + "word " * 20} for number in range(600)]
    path = write_lines(tmp_path / "rows.jsonl", rows)

    def command(out: str) -> list[str]:
        return [sys.executable, "-m", "whimbrel", "run", str(path), "--shard-rows", "10", "--out", str(tmp_path / out)]

    process = subprocess.Popen(command("stopped"), stderr=subprocess.PIPE, text=True, env=os.environ)
    while process.poll() is None and not list((tmp_path / "stopped").glob("shards/part-*.json")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    found = re.search(r"stopped: .* has (\d+) of 60 parts, (\d+) rows\. The same command goes on\.", said)
    assert found is not None, said
    assert 0 < int(found[1]) < 60
    assert int(found[2]) == 10 * int(found[1])
    for out in ("stopped", "whole"):
        subprocess.run(command(out), check=True, capture_output=True)
    assert files_of(tmp_path / "stopped") == files_of(tmp_path / "whole")


@pytest.mark.extended
def test_a_command_that_is_killed_goes_on(tmp_path: Path) -> None:
    """SIGKILL at random moments of the real command, with a model, leaves the bytes of a run without it."""
    path = write_lines(tmp_path / "rows.jsonl", [{"text": f"{number} " + "word " * 40} for number in range(400)])

    def command(out: str) -> list[str]:
        return [sys.executable, "-m", "whimbrel", "run", str(path), "--shard-rows", "10", "--out", str(tmp_path / out)]

    for count in (1, 3, 8, 20):
        process = subprocess.Popen(command("killed"), stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list((tmp_path / "killed").glob("shards/part-*.json"))) < count:
            time.sleep(0.01)
        process.kill()
        process.wait()
    for out in ("killed", "whole"):
        subprocess.run(command(out), check=True, capture_output=True)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    assert len(json.loads((tmp_path / "whole/manifest.json").read_text())["inputs"][0]["cuts"]) == 40
