"""The way of a request: how many files `POST /v1/embeddings` enters, in all processes of a server."""

from __future__ import annotations

import os
from pathlib import Path
from time import sleep

import httpx2
import pytest

from serving import Server

MOST_FILES = 48
WINDOWS = 6
"""Requests that are watched. A file is on the way if every one of them enters it; what a clock starts is in few of them."""
AFTER = 0.05
"""Seconds after a response in which its log line and its metrics are written."""

PROBE = """
import mmap, os, sys, threading
folder = os.environ["WHIMBREL_WAY"]
with open(folder + "/window", "r+b") as file:
    window = mmap.mmap(file.fileno(), 1)
entered = open(f"{folder}/{os.getpid()}.entered", "a", buffering=1)
seen = set()

def profile(frame, event, argument):
    if event == "call" and window[0] != 48:
        name = frame.f_code.co_filename
        if "/whimbrel/" in name and (window[0], name) not in seen:
            seen.add((window[0], name))
            print(window[:1].decode(), name.rpartition("/whimbrel/")[2], file=entered)

threading.setprofile(profile)
sys.setprofile(profile)
"""


@pytest.mark.extended
def test_a_request_enters_few_files(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PROBE, encoding="utf-8")
    window = tmp_path / "window"
    window.write_bytes(b"0")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Server(PYTHONPATH=paths, WHIMBREL_WAY=str(tmp_path)) as server:
        for number in range(-3, WINDOWS):
            with window.open("r+b") as file:
                file.write(b"%d" % max(0, number + 1))
            reply = httpx2.post(f"{server.url}/v1/embeddings", json={"input": "a bird"})
            assert reply.status_code == 200
            sleep(AFTER)
        window.write_bytes(b"0")
    lines = [line.split() for path in tmp_path.glob("*.entered") for line in path.read_text(encoding="utf-8").splitlines()]
    windows = [{name for number, name in lines if number == str(i + 1)} for i in range(WINDOWS)]
    files = sorted(set.intersection(*windows))
    assert "model/transformer.py" in files
    assert "server/http/connection.py" in files
    assert len(files) <= MOST_FILES, f"{len(files)} files:\n" + "\n".join(files)
