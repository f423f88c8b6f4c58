"""Server process and HTTP connections for load tests, and a reader of its metrics."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import perf_counter
from typing import IO, Any, Final, Self

import numpy as np
import orjson
import pybase64
from common import family
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from whimbrel.types.arrays import Float32Array

PATH: Final = "/v1/embeddings"
_JSON: Final = {"content-type": "application/json"}


# A process


@dataclass(frozen=True, slots=True)
class Serving:
    """Running server. It leads its own session, and its temporary files are in `folder`."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    _log: IO[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """Return the log so far."""
        return os.pread(self._log.fileno(), 2**26, 0).decode(errors="replace")

    def engines(self) -> list[int]:
        """Return the engine processes."""
        return [pid for pid in family(self.pid) if b"whimbrel.server.processes.bootstrap\0engine" in _command(pid)]

    def stop(self) -> int:
        """Stop the server, wait, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


@contextmanager
def serving(dtype: str, *args: str) -> Generator[Serving]:
    """Run `whimbrel serve` on a free port with further arguments. Default: the packaged model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "whimbrel", "serve", "--port", str(port), "--dtype", dtype, *args]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        environment = os.environ | {"TMPDIR": folder}
        with subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True) as process:
            server = Serving(process, port, Path(folder), log)
            try:
                while not is_ready(port):
                    if process.poll() is not None:
                        raise SystemExit(f"the server ended with {process.returncode}:\n{server.log}")
                    time.sleep(0.1)
                yield server
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()


def is_ready(port: int) -> bool:
    """Return whether the server answers."""
    with suppress(OSError, HTTPException):
        return get(port, "/health/ready").status == 200
    return False


# Requests and answers


@dataclass(frozen=True, slots=True)
class Answer:
    """Response of the server."""

    status: int
    headers: Mapping[str, str]
    """Header fields by lower-case name."""
    body: bytes


def body_of(texts: Sequence[str], **fields: Any) -> bytes:
    """Return the JSON of a request. Vectors come back as base64 unless `encoding_format` is given."""
    return orjson.dumps({"input": list(texts), "encoding_format": "base64"} | fields)


def vectors_of(body: bytes) -> Float32Array:
    """Return the vectors of a 200 response in order. Raises ValueError if rows are not numbered from 0."""
    rows = orjson.loads(body)["data"]
    if [row["index"] for row in rows] != list(range(len(rows))):
        raise ValueError("the rows are not numbered from 0")
    vectors = [row["embedding"] for row in rows]
    if rows and isinstance(vectors[0], str):
        return np.array([np.frombuffer(pybase64.b64decode(vector), "<f4") for vector in vectors], np.float32)
    return np.array(vectors, np.float32)


def get(port: int, path: str) -> Answer:
    """Send one GET request on its own connection."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        return ask(connection, b"", path, method="GET")
    finally:
        connection.close()


def ask(connection: HTTPConnection, body: bytes, path: str = PATH, *, method: str = "POST") -> Answer:
    """Send one request on an open connection."""
    connection.request(method, path, body, _JSON)
    response = connection.getresponse()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def send_all(port: int, bodies: Sequence[bytes], *, path: str = PATH) -> list[tuple[float, bytes]]:
    """Send the requests of one connection in turn and return (seconds, response) of each. All must get 200."""
    connection = HTTPConnection("127.0.0.1", port)
    answers: list[tuple[float, bytes]] = []
    for body in bodies:
        started = perf_counter()
        answer = ask(connection, body, path)
        answers.append((perf_counter() - started, answer.body))
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}: {answer.body[:1000].decode()}")
    connection.close()
    return answers


def request_of(body: bytes = b"", *, method: str = "POST", path: str = PATH, **headers: str) -> bytes:
    """Return a request as bytes. `_` in the names of headers stands for `-`."""
    fields = _JSON | {"host": "127.0.0.1", "content-length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body


class Connection:
    """Bare HTTP/1.1 connection in an event loop. It is cheap for a load generator, and a client can misuse it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int, *, receive_buffer: int = 0) -> Self:
        """Return a new connection. `receive_buffer` is in bytes; 0 keeps the system's default."""
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            return cls(*await asyncio.open_connection(sock=sock))
        except BaseException:
            sock.close()
            raise

    @property
    def closed(self) -> bool:
        """Return whether either side has closed the connection. A server closes it after a long idle time."""
        return self.reader.at_eof() or self.writer.is_closing()

    async def ask(self, request: bytes) -> Answer:
        """Send a request and read its response. Raises OSError or EOFError if the connection breaks."""
        self.writer.write(request)
        await self.writer.drain()
        status, headers = await self.head()
        return Answer(status, headers, await self.body(headers))

    async def body(self, headers: Mapping[str, str], *, pause: float = 0.0) -> bytes:
        """Return the body of a response with these headers, whole or in chunks, with a pause after every 32 KiB."""
        if headers.get("transfer-encoding") != "chunked":
            return await self._take(int(headers.get("content-length", 0)), pause)
        chunks: list[bytes] = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            chunks.append((await self._take(size + 2, pause))[:size])
        await self.reader.readexactly(2)
        return b"".join(chunks)

    async def _take(self, size: int, pause: float) -> bytes:
        if not pause:
            return await self.reader.readexactly(size)
        taken = bytearray()
        while len(taken) < size:
            taken += await self.reader.readexactly(min(2**15, size - len(taken)))
            await asyncio.sleep(pause)
        return bytes(taken)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return the first line and the headers of a response."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        return int(first.split()[1]), {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    async def close(self, *, reset: bool = False) -> None:
        """Close the connection, or reset it so that the other side's next byte fails."""
        if reset:
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


# Metrics


def read_metrics(port: int) -> list[Metric]:
    """Return the body of /metrics."""
    return list(text_string_to_metric_families(get(port, "/metrics").body.decode()))


def total(metrics: Sequence[Metric], name: str, **labels: str) -> float:
    """Return the sum of the samples of a metric that have these labels, or 0 without samples."""
    samples = (sample for metric in metrics for sample in metric.samples if sample.name == name)
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def has(metrics: Sequence[Metric], name: str) -> bool:
    """Return whether a metric has any samples."""
    return any(sample.name == name for metric in metrics for sample in metric.samples)
