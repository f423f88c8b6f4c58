"""The unit of deploy/systemd, as systemd's own checker reads it, and the messages that it waits for."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import Server
from settings_file import write_settings
from waiting import wait_for
from whimbrel.server.processes.service_manager import ALIVE, READY, RELOADING, STOPPING, ServiceManager

UNIT = Path(__file__).parents[2] / "deploy/systemd/whimbrel.service"
MOST_EXPOSED = 2.0
"""The exposure of the unit that `systemd-analyze security` gives at most, of 10."""
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: apt install systemd")


class Manager:
    """A service manager: a socket, and the states that it was told."""

    def __init__(self, folder: Path) -> None:
        self.told: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self.name: str = self._socket.getsockname()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while state := self._socket.recv(100).decode():
            self.told.append(state)

    def close(self) -> None:
        """End the reader by an empty message."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ended:
            ended.sendto(b"", self.name)
        self._reader.join(10)
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path)
    yield manager
    manager.close()


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


def test_the_server_tells_its_service_manager_of_start_life_and_end(manager: Manager) -> None:
    """READY comes when requests are answered, signs of life all the time, and STOPPING at the signal."""
    with Server(NOTIFY_SOCKET=manager.name, WATCHDOG_USEC="60000000") as server:
        assert wait_for(lambda: READY in manager.told)
        before = manager.told[: manager.told.index(READY)]
        assert set(before) == {ALIVE}
        assert wait_for(lambda: manager.told[-1] == ALIVE)
        assert server.stop() == 0
        assert wait_for(lambda: STOPPING in manager.told)
    assert (manager.told.count(READY), manager.told.count(STOPPING)) == (1, 1)


def test_the_server_tells_its_service_manager_of_a_reload(manager: Manager, tmp_path: Path) -> None:
    """RELOADING has the time by which the manager tells it from an older one; READY follows, also if all is refused."""
    file = write_settings(tmp_path / "whimbrel.toml", models={"m": {}})
    with Server("--config", str(file), NOTIFY_SOCKET=manager.name) as server:
        assert wait_for(lambda: READY in manager.told)
        for text in (file.read_text(), "broken"):
            before = len(manager.told)
            file.write_text(text)
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            server.process.send_signal(signal.SIGHUP)
            assert wait_for(lambda: len(manager.told) == before + 2)  # noqa: B023
            state, ready = manager.told[before:]
            assert int(state.removeprefix(f"{RELOADING}\nMONOTONIC_USEC=")) >= now
            assert ready == READY
        assert server.stop() == 0


def test_no_message_is_sent_to_others(manager: Manager) -> None:
    """Neither is life reported to a manager that does not watch, or that watches another process."""
    for variables in ({}, {"WATCHDOG_USEC": "1", "WATCHDOG_PID": str(os.getpid() + 1)}):
        ServiceManager(variables | {"NOTIFY_SOCKET": manager.name}).tell(ALIVE)
    ServiceManager({}).tell(READY)
    ServiceManager({"NOTIFY_SOCKET": "/nowhere/at/all"}).tell(READY)
    ServiceManager({"NOTIFY_SOCKET": manager.name}).tell(STOPPING)
    assert wait_for(lambda: manager.told == [STOPPING])


def test_a_manager_that_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    """Signs of life are lost then; a state waits for a moment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "notify"))
        teller = ServiceManager({"NOTIFY_SOCKET": deaf.getsockname(), "WATCHDOG_USEC": "1"})
        for _ in range(1000):
            teller.tell(ALIVE)
        started = time.monotonic()
        teller.tell(READY)
        assert time.monotonic() - started < 10
