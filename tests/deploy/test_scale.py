"""Three servers behind real load balancers, as docs/deploy/scale.md configures them: one is killed, one is replaced, nothing is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest

from load import Load, ask, vectors_of
from serving import Server
from texts import TEXTS
from waiting import wait_for

PAGE = Path(__file__).parents[2] / "docs/deploy/scale.md"
SOME = [text for text in TEXTS if 5 < len(text) < 200][:40]
NUM_SERVERS = 3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def block(language: str) -> str:
    """Return the page's configuration."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return found


def placed(text: str, port: int, servers: list[int]) -> str:
    """Return a configuration with the test's own ports."""
    for number, server in enumerate(servers, 1):
        assert text.count(f"10.0.0.{number}:8000") == 1
        text = text.replace(f"10.0.0.{number}:8000", f"127.0.0.1:{server}")
    found = re.findall(r"(bind :|listen )8080", text)
    assert len(found) == 1
    return text.replace(f"{found[0]}8080", f"{'bind ' if 'bind' in found[0] else 'listen '}127.0.0.1:{port}")


def haproxy(folder: Path, port: int, servers: list[int]) -> list[str]:
    file = folder / "haproxy.cfg"
    file.write_text(placed(block("haproxy"), port, servers))
    return ["haproxy", "-f", str(file)]


def nginx(folder: Path, port: int, servers: list[int]) -> list[str]:
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root; " if os.getuid() == 0 else ""
    file = folder / "nginx.conf"
    file.write_text(
        f"{user}daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {paths}\n{placed(block('nginx'), port, servers)}\n}}"
    )
    return ["nginx", "-c", str(file), "-e", str(folder / "error.log")]


BALANCERS: dict[str, Callable[[Path, int, list[int]], list[str]]] = {"haproxy": haproxy, "nginx": nginx}


@contextmanager
def balanced(kind: str, folder: Path, servers: list[int]) -> Iterator[str]:
    """Run a load balancer, and give its URL."""
    port = free_port()
    with subprocess.Popen(BALANCERS[kind](folder, port, servers), stderr=subprocess.PIPE, text=True) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            assert wait_for(lambda: process.poll() is not None or httpx2.get(f"{url}/health/ready").status_code == 200, 30)
            assert process.poll() is None, process.communicate()[1]
            yield url
        finally:
            process.terminate()
            process.wait(30)


def kill(server: Server) -> None:
    """End all processes of a server at once, as a machine that loses its power."""
    for pid in [*server.children(), server.process.pid]:
        os.kill(pid, signal.SIGKILL)
    server.process.wait(30)


def server_on(port: int) -> Server:
    return Server("--port", str(port), "--workers", "1")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", BALANCERS)
def test_a_server_is_killed_and_one_is_replaced_and_nothing_is_lost(kind: str, tmp_path: Path) -> None:
    """Under load, with every vector compared. What came back serves again."""
    if shutil.which(kind) is None:
        pytest.skip(f"{kind} is not installed (Debian's package {kind})")
    ports = [free_port() for _ in range(NUM_SERVERS)]
    with ExitStack() as stack:
        servers = [stack.enter_context(server_on(port)) for port in ports]
        url = stack.enter_context(balanced(kind, tmp_path, ports))
        with httpx2.Client(base_url=url, timeout=60) as client:
            expected = vectors_of(ask(client, SOME))
        with Load(url, SOME, expected, num_clients=6, sizes=(1, 8)) as load:
            assert wait_for(lambda: len(load.statuses) > 30)
            kill(servers[0])
            after_kill = len(load.statuses)
            assert wait_for(lambda: len(load.statuses) > after_kill + 60)
            assert servers[1].stop() == 0, "the server was cut off while it drained"
            replacement = stack.enter_context(server_on(ports[1]))
            revived = stack.enter_context(server_on(ports[0]))
            assert servers[2].stop() == 0
            after_all = len(load.statuses)
            assert wait_for(lambda: len(load.statuses) > after_all + 60)
        assert load.wrong == []
        assert set(load.statuses) == {200}
        for server in (replacement, revived):
            assert answered(server) > 0


def answered(server: Server) -> float:
    """Return the requests that a server answered."""
    page = httpx2.get(f"{server.url}/metrics").text
    return sum(
        float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith("whimbrel_requests_total") and 'route="/v1/embeddings"' in line
    )
