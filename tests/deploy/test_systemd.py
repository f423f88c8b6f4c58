"""The unit of deploy/systemd, as systemd's own checker reads it, and the messages that it waits for."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import Server
from waiting import wait_for
from whimbrel.server.processes.service_manager import ALIVE, READY, STOPPING, ServiceManager

UNIT = Path(__file__).parents[2] / "deploy/systemd/whimbrel.service"
MOST_EXPOSED = 2.0
"""The exposure of the unit that `systemd-analyze security` gives at most, of 10."""
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: apt install systemd")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Return the socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(30)
        yield receiver


def unit(folder: Path) -> Path:
    """Return the unit with a program that exists here."""
    text = UNIT.read_text(encoding="utf-8")
    assert text.count("/opt/whimbrel/bin/whimbrel") == 1
    file = folder / UNIT.name
    file.write_text(text.replace("/opt/whimbrel/bin/whimbrel", shutil.which("true") or "/bin/true"))
    return file


@needs_systemd
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@needs_systemd
def test_the_unit_exposes_little(tmp_path: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", unit(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    if "offline" in checked.stderr:
        pytest.skip("this version of systemd checks no files")
    found = re.search(r"exposure level for \S+: ([\d.]+)", checked.stdout)
    assert found is not None, checked.stderr
    assert float(found[1]) <= MOST_EXPOSED


def test_the_server_tells_its_service_manager_of_start_life_and_end(manager: socket.socket) -> None:
    """READY comes when requests are answered, signs of life all the time, and STOPPING at the signal."""
    with Server(NOTIFY_SOCKET=manager.getsockname(), WATCHDOG_USEC="60000000") as server:
        told = [manager.recv(100).decode()]
        while told[-1] != READY:
            told.append(manager.recv(100).decode())
        assert set(told[:-1]) <= {ALIVE}
        assert manager.recv(100).decode() == ALIVE
        assert server.stop() == 0
        assert wait_for(lambda: manager.recv(100).decode() == STOPPING)


def test_no_message_is_sent_to_others(manager: socket.socket) -> None:
    """Neither is life reported to a manager that does not watch, or that watches another process."""
    manager.setblocking(False)
    for variables in ({}, {"WATCHDOG_USEC": "1", "WATCHDOG_PID": str(os.getpid() + 1)}):
        ServiceManager(variables | {"NOTIFY_SOCKET": manager.getsockname()}).tell(ALIVE)
    ServiceManager({}).tell(READY)
    ServiceManager({"NOTIFY_SOCKET": "/nowhere/at/all"}).tell(READY)
    with pytest.raises(BlockingIOError):
        manager.recv(100)
    ServiceManager({"NOTIFY_SOCKET": manager.getsockname()}).tell(READY)
    assert manager.recv(100).decode() == READY
