"""The configurations of docs/deploy/proxy.md, as they stand there, run by real proxies in front of real servers."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme

from serving import Server
from waiting import wait_for

PAGE = Path(__file__).parents[2] / "docs/deploy/proxy.md"
BODY = {"input": "A whimbrel is a wader."}
NAME = "vectors.example.com"


def block(language: str) -> str:
    """The configuration of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    """The page's text with the test's own addresses and files."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


class Proxy:
    """A proxy with the page's configuration on `port`, with a certificate of `ca` unless it is plain."""

    def __init__(self, folder: Path, ca: trustme.CA, port: int, *, plain: bool) -> None:
        self.folder, self.ca, self.port, self.plain = folder, ca, port, plain
        issued = ca.issue_cert(NAME, "127.0.0.1")
        self.cert, self.key, self.both = folder / "cert.pem", folder / "key.pem", folder / "both.pem"
        self.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        self.key.write_bytes(issued.private_key_pem.bytes())
        self.both.write_bytes(self.cert.read_bytes() + self.key.read_bytes())

    def client(self, **options: Any) -> httpx2.Client:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        headers = {"Host": NAME}
        scheme = "http" if self.plain else "https"
        return httpx2.Client(
            base_url=f"{scheme}://127.0.0.1:{self.port}", verify=context, headers=headers, timeout=60, **options
        )


def nginx(proxy: Proxy, servers: list[Server], *, prefix: str = "") -> tuple[list[str], str, Path]:
    upstream = " ".join(f"server 127.0.0.1:{server.port};" for server in servers)
    text = replaced(
        block("nginx"),
        ("server 127.0.0.1:8000;", upstream),
        ("listen 443 ssl;", f"listen 127.0.0.1:{proxy.port}{'' if proxy.plain else ' ssl'};"),
        ("/etc/ssl/vectors.pem", str(proxy.cert)),
        ("/etc/ssl/vectors.key", str(proxy.key)),
        ("proxy_read_timeout", "proxy_next_upstream error timeout http_503 non_idempotent;\n        proxy_read_timeout"),
    )
    if prefix:
        forwarded = "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; proxy_set_header X-Forwarded-Proto $scheme;"
        text = replaced(text, ("location / {", f"location {prefix}/ {{ {forwarded}"))
    file = proxy.folder / "nginx.conf"
    folder = proxy.folder
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root; " if os.getuid() == 0 else ""  # otherwise it writes as another user, without the right to do so
    file.write_text(
        f"{user}daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}\nhttp {{ access_log off; {paths}\n{text}\n}}"
    )
    return ["nginx", "-c", str(file), "-e", str(folder / "error.log")], "nginx", file


def haproxy(proxy: Proxy, servers: list[Server]) -> tuple[list[str], str, Path]:
    text = replaced(
        block("haproxy"),
        (
            "bind :443 ssl crt /etc/ssl/vectors.pem alpn h2,http/1.1",
            f"bind 127.0.0.1:{proxy.port}{'' if proxy.plain else f' ssl crt {proxy.both} alpn h2,http/1.1'}",
        ),
        ("10.0.0.1:8000", f"127.0.0.1:{servers[0].port}"),
        ("10.0.0.2:8000", f"127.0.0.1:{servers[-1].port}"),
    )
    file = proxy.folder / "haproxy.cfg"
    file.write_text(text)
    return ["haproxy", "-f", str(file)], "haproxy", file


def caddy(proxy: Proxy, servers: list[Server]) -> tuple[list[str], str, Path]:
    certificate = "" if proxy.plain else f"tls {proxy.cert} {proxy.key}"
    text = replaced(
        block("caddy"),
        ("vectors.example.com {", f"{'http' if proxy.plain else 'https'}://:{proxy.port} {{\n    {certificate}"),
        ("127.0.0.1:8000", " ".join(f"127.0.0.1:{server.port}" for server in servers)),
        ("health_uri", f"header_up Host {NAME}\n        health_uri"),
    )
    file = proxy.folder / "Caddyfile"
    file.write_text(f"{{\n    admin off\n    auto_https off\n    default_sni {NAME}\n}}\n{text}")
    return ["caddy", "run", "--config", str(file), "--adapter", "caddyfile"], "caddy", file


PROXIES: dict[str, Callable[..., tuple[list[str], str, Path]]] = {"nginx": nginx, "haproxy": haproxy, "caddy": caddy}


@contextmanager
def running(kind: str, folder: Path, servers: list[Server], *, plain: bool = False, **options: Any) -> Iterator[Proxy]:
    if shutil.which(kind) is None:
        pytest.skip(f"{kind} is not installed (Debian's package {kind})")
    proxy = Proxy(folder, trustme.CA(), free_port(), plain=plain)
    command = PROXIES[kind](proxy, servers, **options)[0]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:

            def listens() -> bool:
                assert process.poll() is None, process.communicate()[1]
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", proxy.port)) == 0

            assert wait_for(listens, 30)
            with proxy.client() as client:
                assert wait_for(lambda: client.get(f"{options.get('prefix', '')}/health").status_code == 200, 30)
            yield proxy
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--allowed-host", NAME, "--workers", "1") as server:
        yield server
        assert "Traceback" not in server.log


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", PROXIES)
@pytest.mark.extended
def test_requests_through_a_proxy(kind: str, plain: bool, server: Server, tmp_path: Path) -> None:
    """On kept connections with pauses, large answers, and bodies over the limit; with TLS and without."""
    with running(kind, tmp_path, [server, server], plain=plain) as proxy, proxy.client() as client:
        for pause in (0, 0.1, 5.2, 0):
            time.sleep(pause)
            answers = [client.post("/v1/embeddings", json=BODY) for _ in range(20)]
            assert {answer.status_code for answer in answers} == {200}
        large = client.post("/v1/embeddings", json={"input": ["a"] * 1500, "encoding_format": "float"})
        assert len(large.json()["data"]) == 1500
        assert (
            client.post("/v1/embeddings", content=b" " * 40_000_000, headers={"Content-Type": "application/json"}).status_code
            == 413
        )
        assert client.post("/v1/embeddings", json=BODY).status_code == 200


@pytest.mark.parametrize("kind", ["nginx", "haproxy"])
@pytest.mark.extended
def test_no_request_is_lost_while_servers_stop(kind: str, tmp_path: Path) -> None:
    """One of two servers is told to stop under load."""
    with (
        Server("--allowed-host", NAME) as one,
        Server("--allowed-host", NAME) as two,
        running(kind, tmp_path, [one, two]) as proxy,
    ):
        statuses: list[int] = []
        done = threading.Event()

        def load() -> None:
            with proxy.client() as client:
                while not done.is_set():
                    statuses.append(client.post("/v1/embeddings", json=BODY).status_code)

        with ThreadPoolExecutor(8) as threads:
            loads = [threads.submit(load) for _ in range(8)]
            try:
                time.sleep(3)
                assert one.stop() == 0
                so_far = len(statuses)
                time.sleep(3)
            finally:
                done.set()
            for each in loads:
                each.result()
        assert len(statuses) > so_far > 0
        assert set(statuses) == {200}


@pytest.mark.parametrize("takes_off", [False, True])
@pytest.mark.extended
def test_a_prefix_behind_nginx(takes_off: bool, tmp_path: Path) -> None:
    options = ["--allowed-host", NAME, "--root-path", "/embeddings", "--forwarded-allow-ips", "127.0.0.1", "--access-log"]
    with Server(*options) as server:
        if takes_off:  # a URI after the upstream's name makes nginx replace the prefix
            original = PAGE.read_text(encoding="utf-8")
            assert "proxy_pass http://whimbrel;" in original
        with running("nginx", tmp_path, [server], prefix="/embeddings") as proxy, proxy.client() as client:
            if takes_off:
                file = tmp_path / "nginx.conf"
                file.write_text(replaced(file.read_text(), ("proxy_pass http://whimbrel;", "proxy_pass http://whimbrel/;")))
                subprocess.run(["nginx", "-c", str(file), "-e", str(tmp_path / "error.log"), "-s", "reload"], check=True)
                time.sleep(1)
            answer = client.post("/embeddings/v1/embeddings", json=BODY, headers={"X-Forwarded-For": "198.51.100.7"})
            assert len(answer.json()["data"]) == 1
            assert f"https://{NAME}/embeddings/v1/embeddings" in client.get("/embeddings/docs").text
        # the stranger's own header is not believed beyond the proxy that added his address
        assert wait_for(lambda: "198.51.100.7" in server.log)
