"""TLS and Unix sockets, each with a real client."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import trustme

from raw_http import head
from serving import Server
from waiting import wait_for
from whimbrel.errors import SetupError
from whimbrel.server.http.tls import read_tls_files

BODY = {"input": "A whimbrel is a wader."}


class Files:
    """A certificate and its key, as files."""

    def __init__(self, folder: Path, password: bytes | None = None) -> None:
        self.authority = trustme.CA()
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        self.renew(password)

    def renew(self, password: bytes | None = None) -> None:
        from cryptography.hazmat.primitives import serialization

        issued = self.authority.issue_cert("localhost", "127.0.0.1")
        self.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        pem = issued.private_key_pem.bytes()
        if password is not None:
            key = serialization.load_pem_private_key(pem, None)
            encryption = serialization.BestAvailableEncryption(password)
            pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        self.key.write_bytes(pem)

    @property
    def trusting(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Files]]:
    files = Files(tmp_path_factory.mktemp("tls"), b"secret")
    options = ["--ssl-certfile", str(files.cert), "--ssl-keyfile", str(files.key), "--ssl-keyfile-password", "secret"]
    with Server(*options, WHIMBREL_HEADER_TIMEOUT="2", WHIMBREL_MAX_CONNECTIONS="32") as server:
        yield server, files
        assert "Traceback" not in server.log
        assert server.stop() == 0


def serial(server: Server, files: Files) -> str:
    """The serial number of the certificate that a new connection gets."""
    with (
        socket.create_connection(("127.0.0.1", server.port), 10) as sock,
        files.trusting.wrap_socket(sock, server_hostname="localhost") as tls,
    ):
        return str(tls.getpeercert()["serialNumber"])  # pyright: ignore[reportOptionalSubscript]


def test_a_client_of_https(served: tuple[Server, Files]) -> None:
    server, files = served
    assert server.url.startswith("https://")
    with httpx2.Client(timeout=60, base_url=server.url, verify=files.trusting) as client:
        for size in (1, 2000):  # an answer of 6 MB comes in pieces
            answer = client.post("/v1/embeddings", json={"input": ["a"] * size})
            assert len(answer.json()["data"]) == size
        assert client.get("/docs").text.count(f"{server.url}/v1/embeddings") >= 1
    assert "secret" not in Path(f"/proc/{server.process.pid}/cmdline").read_text()


def test_a_body_that_is_not_wanted_gets_its_answer_over_tls(served: tuple[Server, Files]) -> None:
    server, files = served
    with (
        socket.create_connection(("127.0.0.1", server.port), 30) as sock,
        files.trusting.wrap_socket(sock, server_hostname="localhost") as tls,
    ):
        tls.sendall(head(content_length=40_000_000) + b" " * 2_000_000)
        assert tls.recv(100).startswith(b"HTTP/1.1 413")


def test_what_is_no_tls_takes_no_place(served: tuple[Server, Files]) -> None:
    """Plain HTTP, silence and connections that end in the handshake: honest clients go on."""
    server, files = served
    clients = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(60)]
    for number, client in enumerate(clients):
        if number % 3 == 0:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        elif number % 3 == 1:
            client.sendall(b"\x16\x03\x01\x02\x00\x01")
    with httpx2.Client(base_url=server.url, verify=files.trusting, timeout=30) as client:
        assert client.get("/health/live").status_code == 200
    for client in clients:
        client.close()


def test_sighup_reads_the_certificate_again(served: tuple[Server, Files]) -> None:
    """Connections that are open go on. Files that do not fit are refused, and the certificate stays."""
    server, files = served
    with httpx2.Client(timeout=60, base_url=server.url, verify=files.trusting) as client:
        assert client.post("/v1/embeddings", json=BODY).status_code == 200
        before = serial(server, files)
        files.renew(b"secret")
        server.process.send_signal(signal.SIGHUP)
        assert wait_for(lambda: serial(server, files) != before)
        assert client.post("/v1/embeddings", json=BODY).status_code == 200
        renewed = serial(server, files)
        files.key.write_bytes(trustme.CA().issue_cert("localhost").private_key_pem.bytes())
        server.process.send_signal(signal.SIGHUP)
        assert wait_for(lambda: "does not fit the certificate" in server.log)
        assert serial(server, files) == renewed
        assert client.post("/v1/embeddings", json=BODY).status_code == 200


def test_sighup_reads_the_certificate_again_under_nohup(files: Files) -> None:
    """A parent that ignores SIGHUP, so that a terminal ends nothing, does not take away the renewal."""
    options = ["--ssl-certfile", str(files.cert), "--ssl-keyfile", str(files.key)]
    with Server(*options, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as server:
        before = serial(server, files)
        files.renew()
        server.process.send_signal(signal.SIGHUP)
        assert wait_for(lambda: serial(server, files) != before)
        assert server.stop() == 0


@pytest.mark.parametrize(
    "fault", ["no file", "no certificate", "another key", "no password", "wrong password", "key alone", "folder"]
)
def test_files_that_do_not_fit_are_refused(fault: str, files: Files, tmp_path: Path) -> None:
    cert, key, password = files.cert, files.key, None
    if fault == "no file":
        key = tmp_path / "none.pem"
    elif fault == "no certificate":
        cert.write_text("nothing")
    elif fault == "another key":
        key.write_bytes(trustme.CA().issue_cert("localhost").private_key_pem.bytes())
    elif fault in ("no password", "wrong password"):
        files.renew(b"right")
        password = "wrong" if fault == "wrong password" else None
    elif fault == "folder":
        cert = tmp_path
    says = {
        "no file": "cannot read .*none.pem: No such file",
        "no certificate": "hold no certificate with its key",
        "another key": "does not fit the certificate",
        "no password": "ssl_keyfile_password is missing",
        "wrong password": "ssl_keyfile_password is wrong",
        "key alone": "needs its certificate",
        "folder": "cannot read .*: Is a directory",
    }[fault]
    with pytest.raises(SetupError, match=says):
        read_tls_files(None if fault == "key alone" else cert, key, password)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "whimbrel.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # as a server that was killed leaves it
    with Server("--uds", str(path), "--access-log", "--forwarded-allow-ips", "unix", wait=False) as server:
        assert wait_for(lambda: "In a shell" in server.log, 60)
        assert f"curl --unix-socket {path} http://localhost/v1/embeddings" in server.log
        with httpx2.Client(timeout=60, transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://anything") as client:
            answer = client.post("/v1/embeddings", json=BODY, headers={"X-Forwarded-For": "198.51.100.7"})
            assert len(answer.json()["data"]) == 1
        assert wait_for(lambda: "198.51.100.7" in server.log)
        other = subprocess.run(
            [sys.executable, "-m", "whimbrel", "serve", "--uds", str(path)], capture_output=True, text=True, check=False
        )
        assert (other.returncode, other.stdout) == (1, "")
        assert "another server does" in other.stderr
        assert server.stop() == 0
    assert not path.exists()
    path.write_text("precious")
    other = subprocess.run(
        [sys.executable, "-m", "whimbrel", "serve", "--uds", str(path)], capture_output=True, text=True, check=False
    )
    assert other.returncode == 1
    assert "there is another file" in other.stderr
    assert path.read_text() == "precious"


def test_a_prefix(tmp_path: Path) -> None:
    """A proxy that takes it off, and one that does not."""
    with Server("--root-path", "/vectors", "--access-log", "--forwarded-allow-ips", "127.0.0.1") as server:
        with httpx2.Client(timeout=60, base_url=server.url) as client:
            for prefix in ("", "/vectors"):
                assert client.post(f"{prefix}/v1/embeddings", json=BODY).status_code == 200
            assert client.get("/vectors/openapi.json").json()["servers"] == [{"url": "/vectors"}]
            headers = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "localhost:7777", "X-Forwarded-For": "198.51.100.7"}
            assert "https://localhost:7777/vectors/v1/embeddings" in client.get("/docs", headers=headers).text
            assert client.get("/docs", headers={"X-Forwarded-Host": "evil.example"}).status_code == 403
        assert wait_for(lambda: "198.51.100.7" in server.log)
