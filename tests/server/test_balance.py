"""Connections that several workers share: a burst goes to all of them, and a worker that does nothing holds up none."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from serving import Server
from whimbrel.server.http.balance import Balance

BURST = 24


@pytest.mark.parametrize(
    ("counts", "ahead"),
    [([0, 0], False), ([2, 0], False), ([3, 0], True), ([8, 4], False), ([9, 4], True), ([4, 9], False), ([9, 0, 8], True)],
)
def test_who_leaves_connections_to_others(counts: list[int], ahead: bool) -> None:
    assert Balance(counts, 0).is_ahead == ahead


def test_a_process_counts_only_its_own() -> None:
    counts = [5, 5]
    Balance(counts, 1).note(7)
    assert counts == [5, 7]


def num_sockets(pid: int) -> int:
    return sum(os.readlink(file).startswith("socket:") for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_burst_of_connections_goes_to_all_workers(stopped: bool) -> None:
    """While one worker is stopped the other takes them, and loses only a millisecond for each."""
    with Server("--set", "workers=2") as server, ExitStack() as stack:
        workers = server.children("worker")
        httpx2.get(f"{server.url}/health/ready").raise_for_status()
        time.sleep(0.2)
        before = [num_sockets(pid) for pid in workers]
        if stopped:
            os.kill(workers[0], signal.SIGSTOP)
            stack.callback(os.kill, workers[0], signal.SIGCONT)
        for _ in range(BURST):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        taken, end = [0, 0], time.monotonic() + 10
        while sum(taken) < BURST and time.monotonic() < end:
            time.sleep(0.05)
            taken = [num_sockets(pid) - count for pid, count in zip(workers, before, strict=True)]
        assert sum(taken) >= BURST
        assert taken[0] == 0 if stopped else min(taken) >= BURST // 4, taken
